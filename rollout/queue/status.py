"""The state of the queue for people and for metrics: the table of who waits for what, and the server's status."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from rollout.ledger.ledger import Ledger
from rollout.queue.roster import Roster

SHOWN_GROUPS = 8
PHASES = ("to_generate", "generating", "to_grade", "grading", "graded")


class Busy(NamedTuple):
    """Sums over all workers since they started, from their last heartbeats."""

    workers: int = 0
    up_s: float = 0.0
    idle_s: float = 0.0
    generated_tokens: float = 0.0


class Row(NamedTuple):
    who: str
    waits_for: str
    since: str


def table(ledger: Ledger, roster: Roster, asked: Mapping[str, float], now: float) -> str:
    """Who waits for what, and for how long. `asked` maps what the trainer waits for to the time when it first asked."""
    counts = ledger.summary()
    rows = [
        Row("who", "waits for", "for"),
        *(Row("trainer", what, f"{now - since_s:.0f} s") for what, since_s in asked.items()),
        *_groups(ledger),
        *_engines(ledger, roster),
        *_holders(ledger, roster, now),
    ]
    who, what = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(
        [
            f"step {ledger.state.steps_taken}: {counts['ready_groups']} groups are ready, {ledger.rules.groups_per_step} make "
            f"a batch, {counts['untaken_groups']} are admitted and untaken; version {ledger.version} is published",
            "trajectories: " + ", ".join(f"{counts['trajectories'].get(phase, 0)} {phase}" for phase in PHASES),
            *(f"{row.who:{who}}   {row.waits_for:{what}}   {row.since}".rstrip() for row in rows),
        ]
    )


def _groups(ledger: Ledger) -> Iterator[Row]:
    """One row per group, for the oldest groups that are not ready."""
    for index in ledger.unready(SHOWN_GROUPS):
        phases, holders = ledger.leases.phases(index), ledger.leases.holders(index)
        doing = ", ".join(f"{phases[phase]} {phase}" for phase in PHASES if phases[phase])
        leased = f" (leased to {', '.join(sorted(holders))})" if holders else ""
        yield Row(f"group {index}", f"{doing}{leased}", f"since version {ledger.state.groups[index].version}")


def _engines(ledger: Ledger, roster: Roster) -> Iterator[Row]:
    for engine in roster.fleet(ledger.version, ledger.state.engines):
        needs = f"nothing: it holds version {engine.version}" if engine.version is not None else "a push of the published version"
        yield Row(f"engine {engine.name}", f"{needs} ({engine.url})", "")
    for engine_id, reason in roster.condemned_now():
        yield Row(f"engine {engine_id}", f"its restart: {reason}", "")


WORK = {"worker": "segments to generate", "teacher": "segments to score", "judge-model": "answers to score"}


def _holders(ledger: Ledger, roster: Roster, now: float) -> Iterator[Row]:
    leases = ledger.leases.counts()
    for name, holder in sorted(roster.holders.items()):
        own = f"{leases[name]} leases of its own"
        waits_for = own if leases[name] else WORK.get(holder.role, "completions to grade")
        hungry = "" if holder.hungry_s is None or leases[name] else f"{now - holder.hungry_s:.0f} s, "
        yield Row(f"{holder.role or 'process'} {name}", waits_for, f"{hungry}heard {now - holder.heard_s:.1f} s ago")
    for role in ("worker", "judge"):
        if not any(holder.role == role for holder in roster.holders.values()):
            yield Row(f"no {role} is running", "", "")


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
    """Metrics of the queue. The workers' idle fraction and speed are for the time between `before` and `busy`."""
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
    if 0 <= idle_s <= up_s and up_s > 0 and tokens >= 0:  # otherwise a worker was restarted in between
        found["idle/rollout_fraction"] = idle_s / up_s
        found["tokens/generated_per_s"] = tokens / up_s * busy.workers
    return found


def busy(roster: Roster) -> Busy:
    sums = [holder.sums for holder in roster.holders.values() if holder.role == "worker"]
    up_s, idle_s, tokens = (sum(s.get(name, 0.0) for s in sums) for name in ("up_s", "idle_s", "generated_tokens"))
    return Busy(len(sums), up_s, idle_s, tokens)
