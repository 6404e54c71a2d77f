"""How things stand, for people and for metrics: the table of what a batch waits for, and the server's status."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from rollout.ledger import Ledger
from rollout.roster import Roster

SHOWN_GROUPS = 8
PHASES = ("to_generate", "generating", "to_grade", "grading", "graded")


class Busy(NamedTuple):
    """What all workers together did since they began, as of their last heartbeats."""

    workers: int = 0
    up_s: float = 0.0
    idle_s: float = 0.0
    generated_tokens: float = 0.0


def table(ledger: Ledger, roster: Roster, now: float) -> str:
    """Who waits for what: the oldest groups that are not ready, the engines, and who was heard when."""
    counts = ledger.summary()
    step_groups, trajectories = ledger.rules.groups_per_step, counts["trajectories"]
    lines = [
        f"step {ledger.state.steps_taken}: {counts['ready_groups']} groups are ready, {step_groups} make a batch, "
        f"{counts['untaken_groups']} are admitted and untaken; version {ledger.version} is published",
        "trajectories: " + ", ".join(f"{trajectories.get(phase, 0)} {phase}" for phase in PHASES),
    ]
    for index in ledger.unready(SHOWN_GROUPS):
        phases = ledger.leases.phases(index)
        doing = ", ".join(f"{phases[phase]} {phase}" for phase in PHASES if phases[phase])
        lines.append(f"group {index} (admitted at version {ledger.state.groups[index].version}): {doing}")
    for engine in roster.fleet(ledger.version, ledger.state.engines):
        holds = f"version {engine.version}" if engine.version is not None else "not the published version: needs a push"
        lines.append(f"engine {engine.name} at {engine.url}: {holds}")
    leases = ledger.leases.counts()
    for name, holder in sorted(roster.holders.items()):
        lines.append(f"{holder.role or 'process'} {name}: heard {now - holder.heard_s:.1f} s ago, {leases[name]} leases")
    for role in ("worker", "judge"):
        if not any(holder.role == role for holder in roster.holders.values()):
            lines.append(f"no {role} is there")
    return "\n".join(lines)


def status(ledger: Ledger, roster: Roster, now: float) -> dict[str, Any]:
    return {
        "ledger": ledger.summary(),
        "leases": dict(ledger.leases.counts()),
        "engines": [
            {"id": e.id, "url": e.url, "tp": e.tp, "version": e.version}
            for e in roster.fleet(ledger.version, ledger.state.engines)
        ],
        "condemned": dict(roster.condemned),
        "holders": {
            name: {"role": holder.role, "heard_s_ago": round(now - holder.heard_s, 3), "sums": dict(holder.sums)}
            for name, holder in roster.holders.items()
        },
    }


def figures(ledger: Ledger, busy: Busy, before: Busy) -> dict[str, float]:
    """Metrics of the queue; the workers' idle fraction and speed between two looks."""
    counts = ledger.summary()
    trajectories: Mapping[str, int] = counts["trajectories"]
    found: dict[str, float] = {
        "queue/ready_groups": counts["ready_groups"],
        "queue/untaken_groups": counts["untaken_groups"],
        "queue/waiting_tokens": counts["waiting_tokens"],
        "queue/to_grade": trajectories.get("to_grade", 0) + trajectories.get("grading", 0),
        "queue/dropped_groups": sum(counts["dropped_groups"].values()),
        "queue/lost_tokens": sum(counts["lost_tokens"].values()),
    }
    up_s, idle_s = busy.up_s - before.up_s, busy.idle_s - before.idle_s
    tokens = busy.generated_tokens - before.generated_tokens
    if 0 <= idle_s <= up_s and up_s > 0 and tokens >= 0:  # otherwise a worker began anew
        found["idle/rollout_fraction"] = idle_s / up_s
        found["tokens/generated_per_s"] = tokens / up_s * busy.workers
    return found


def busy(roster: Roster) -> Busy:
    sums = [holder.sums for holder in roster.holders.values() if holder.role == "worker"]
    up_s, idle_s, tokens = (sum(s.get(name, 0.0) for s in sums) for name in ("up_s", "idle_s", "generated_tokens"))
    return Busy(len(sums), up_s, idle_s, tokens)
