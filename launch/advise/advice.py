"""What limits a run, and what to change: its phases measured, predicted and refitted, and each knob turned in the simulator.

The refit is the simulator's (`launch/simulate/measured.py`): speeds that reproduce the first half of the run's metrics. They must
predict the second half before anything is concluded from them. For a run on GPUs the plan's own prediction stands beside what was
measured, and says by what factor trainer and engines differ from the calibration.
"""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from conf.compose.load import read_run
from conf.schema import ConfigError, RunConfig
from launch.plan.table import table
from launch.simulate.measured import (
    PHASES,
    WARM_UP_STEPS,
    Comparison,
    Metrics,
    busy_tokens_per_s,
    from_run,
    rollout_idle,
    simulated_idle,
    simulated_trainer_idle,
    step_lines,
    trainer_idle,
)
from launch.simulate.measured import table as comparison_table
from launch.simulate.options import Options, scenario_of
from launch.simulate.report import steady
from launch.simulate.scenario import Fleet, Scenario
from launch.simulate.simulation import simulate
from launch.simulate.speeds import TrainerSpeeds
from launch.simulate.trainer import Step

SATURATED = 0.10  # a side that waits for less than so much of a step is what limits it
WORTH = 0.02  # of a step: a smaller gain is within what the simulator can tell
STEPS = 24  # that are simulated for each knob
MORE, OBJECTIVE = "GPUs", "another objective"
SHARED = (
    "\nTrainer, engines and judges share the machine's cores: more of these shorten a step, and so does less work. What is "
    "predicted of a setting holds while it leaves the others as many."
)


def run_report(run_dir: Path) -> str:
    """Raises ConfigError for a folder that is no run or holds too few steps."""
    config, lines = read_run(run_dir), step_lines(run_dir)[WARM_UP_STEPS:]
    comparison = from_run(run_dir)
    parts = [comparison_table(comparison), _refitted(comparison.scenario)]
    if config.cluster.device == "cuda":
        parts.append(_beside_the_plan(config, lines))
    parts.append(_advice(comparison, config, lines))
    return "\n\n".join(parts)


def _refitted(scenario: Scenario) -> str:
    trainer, fleet = scenario.trainer, scenario.fleets[0]
    full = fleet.concurrency
    rows = [
        ("old log-probs", f"{trainer.old_logprob_s_per_token * 1e6:.1f} us a token, prompts included"),
        ("reference log-probs", f"{trainer.ref_logprob_s_per_token * 1e6:.1f} us a token"),
        ("train", f"{trainer.train_s_per_token * 1e6:.1f} us a token, and {trainer.step_overhead_s:.2f} s a step"),
        ("push", f"{trainer.push_s:.2f} s"),
        ("an engine", f"{fleet.speeds.decode_s[1] * 1e3:.1f} ms a token with 1 sequence, "
                      f"{fleet.speeds.decode_s[full] * 1e3:.1f} ms with {full}"),
        ("a verdict", f"{scenario.workload.grading_mean_s:.2f} s"),
        ("completions", f"{scenario.workload.completion_mean_tokens:.0f} tokens on average"),
    ]  # fmt: skip
    return table(("refitted", "to the first half"), rows, left=2)


# A run on GPUs beside the plan.


def _beside_the_plan(config: RunConfig, lines: Sequence[Metrics]) -> str:
    """What the calibrated plan says of this very run, its lengths taken as measured."""
    measured = deepcopy(config)
    completions = config.algo.groups_per_step * config.algo.completions_per_group
    measured.plan.completion_tokens = fmean(line["tokens/trained"] for line in lines) / completions
    try:
        scenario = scenario_of(measured, Options(failures=False, steps=min(STEPS, config.trainer.steps)))
    except ConfigError as error:
        return f"The plan knows no such run, so nothing stands beside it: {error}"
    steps = steady(simulate(scenario).steps, scenario.rules.lead)
    said, seen = _figures(steps, config.rollout.engines), _measured(lines)
    rows = [(what, f"{said[what]:.2f}", f"{seen[what]:.2f}", f"{_off(seen[what], said[what])}") for what in said]
    train = _times(seen["train"] + seen["old log-probs"], said["train"] + said["old log-probs"])
    return (
        f"{table(('this run', 'the plan', 'measured', 'measured / plan'), rows)}\n"
        f"The trainer takes {train} the time that the plan gives it, and a busy fleet samples at "
        f"{_times(seen['busy tokens/s'], said['busy tokens/s'])} the rate."
    )


def _figures(steps: Sequence[Step], engines: int) -> dict[str, float]:
    step_s = fmean(s.step_s for s in steps)
    busy_s = sum(s.step_s for s in steps) - sum(s.engine_idle_s for s in steps) / engines
    return {
        "step": step_s,
        "old log-probs": fmean(s.old_logprob_s for s in steps),
        "reference log-probs": fmean(s.ref_logprob_s for s in steps),
        "train": fmean(s.train_s for s in steps),
        "push": fmean(s.push_s for s in steps),
        "trainer idle": simulated_trainer_idle(steps),
        "rollout idle": simulated_idle(steps, engines),
        "busy tokens/s": sum(s.generated_tokens for s in steps) / max(busy_s, 1e-9),
    }


def _measured(lines: Sequence[Metrics]) -> dict[str, float]:
    seconds = {what: fmean(line.get(key, 0.0) for line in lines) for what, key in PHASES.items()}
    return {
        "step": fmean(line["time/step_s"] for line in lines),
        **seconds,
        "trainer idle": trainer_idle(lines),
        "rollout idle": rollout_idle(lines),
        "busy tokens/s": busy_tokens_per_s(lines),
    }


def _times(value: float, of: float) -> str:
    return f"{value / of:.2f} times" if of > 0 else "-"


def _off(value: float, of: float) -> str:
    return f"{value / of:.2f}" if of > 1e-9 else "-"


# What to turn.


@dataclass(frozen=True, kw_only=True, slots=True)
class Knob:
    setting: str
    scenario: Scenario
    takes: str = ""  # what it costs beside the setting


def knobs(scenario: Scenario, config: RunConfig) -> Iterator[Knob]:
    """One thing changed each; what is not possible is left out. Without GPUs nothing can be added: processes share the cores."""
    yield from _of_the_ledger(scenario)
    fleet = scenario.fleets[0]
    for concurrency in {max(1, fleet.concurrency // 2), 2 * fleet.concurrency} - {fleet.concurrency}:
        changed_fleet = _with_concurrency(fleet, concurrency)
        yield Knob(setting=f"rollout.concurrency={concurrency}", scenario=replace(scenario, fleets=(changed_fleet,)))
    if scenario.trainer.ref_logprob_s_per_token:
        without = replace(scenario.trainer, ref_logprob_s_per_token=0.0)
        yield Knob(setting="algo.kl_coef=0", scenario=replace(scenario, trainer=without), takes=OBJECTIVE)
    if config.cluster.device == "cuda":
        yield from _of_the_hardware(scenario, config)


def _of_the_ledger(scenario: Scenario) -> Iterator[Knob]:
    rules = scenario.rules
    for staleness in (rules.max_staleness - 1, rules.max_staleness + 1):
        if staleness >= 0 and staleness - (rules.max_staleness - rules.lead) >= 0:
            changed = replace(rules, max_staleness=staleness)
            yield Knob(setting=f"rollout.max_staleness={staleness}", scenario=replace(scenario, rules=changed))
    if rules.max_staleness and not rules.window:
        changed = replace(rules, window=rules.groups_per_step)
        yield Knob(setting=f"rollout.window={rules.groups_per_step}", scenario=replace(scenario, rules=changed))
    if rules.segment_tokens < rules.max_completion_tokens:
        changed = replace(rules, segment_tokens=rules.max_completion_tokens)
        yield Knob(setting=f"rollout.segment_tokens={rules.max_completion_tokens}", scenario=replace(scenario, rules=changed))


def _of_the_hardware(scenario: Scenario, config: RunConfig) -> Iterator[Knob]:
    """The GPUs split otherwise, and more of everything."""
    fleet, dp = scenario.fleets[0], config.trainer.dp
    a_replica = config.trainer.tp * config.trainer.pp * config.trainer.cp

    def with_both(new_dp: int, engines: int) -> Scenario:
        trainer = _faster(scenario.trainer, new_dp / dp)
        return replace(scenario, trainer=trainer, fleets=(replace(fleet, engines=engines),))

    moved, rest = divmod(a_replica, config.rollout.engine_tp)
    for other_dp, engines in ((dp + 1, fleet.engines - moved), (dp - 1, fleet.engines + moved)):
        if not rest and other_dp > 0 and engines > 0:
            yield Knob(setting=f"trainer.dp={other_dp} rollout.engines={engines}", scenario=with_both(other_dp, engines))
    for other_dp, engines in ((dp, fleet.engines + 1), (2 * dp, fleet.engines), (2 * dp, 2 * fleet.engines)):
        changed = {"trainer.dp": (dp, other_dp), "rollout.engines": (fleet.engines, engines)}
        setting = " ".join(f"{key}={new}" for key, (old, new) in changed.items() if new != old)
        gpus = (other_dp - dp) * a_replica + (engines - fleet.engines) * config.rollout.engine_tp
        yield Knob(setting=setting, scenario=with_both(other_dp, engines), takes=f"{gpus} more {MORE}")
    work = replace(scenario.workload, grading_mean_s=scenario.workload.grading_mean_s / 2)
    yield Knob(
        setting=f"reward.judges={2 * config.reward.judges}",
        scenario=replace(scenario, workload=work),
        takes="twice the sandboxes",
    )


def _faster(trainer: TrainerSpeeds, factor: float) -> TrainerSpeeds:
    return replace(
        trainer, old_logprob_s_per_token=trainer.old_logprob_s_per_token / factor,
        train_s_per_token=trainer.train_s_per_token / factor, ref_logprob_s_per_token=trainer.ref_logprob_s_per_token / factor,
    )  # fmt: skip


def _with_concurrency(fleet: Fleet, concurrency: int) -> Fleet:
    """Beyond what was measured a decode step grows as it did before."""
    known = fleet.speeds.decode_s
    growth = known[-1] - known[-2]
    decode_s = known + tuple(known[-1] + growth * (i + 1) for i in range(concurrency + 1 - len(known)))
    return replace(fleet, concurrency=concurrency, speeds=replace(fleet.speeds, decode_s=decode_s[: concurrency + 1]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Turned:
    """What a knob would do."""

    knob: Knob
    gain: float  # relative, of a step; below 0 it is shorter
    figures: dict[str, float]
    mean_lag: float


def _advice(comparison: Comparison, config: RunConfig, lines: Sequence[Metrics]) -> str:
    base = _short(comparison.scenario)
    steps = _steady(base)
    now = _figures(steps, config.rollout.engines)
    found = sorted((_turned(knob, now) for knob in knobs(base, config)), key=lambda turned: turned.gain)
    rows = [("as it is", f"{now['step']:.2f}", "", *_idle(now), f"{_mean_lag(steps):.2f}", "")]
    rows += [
        (t.knob.setting, f"{t.figures['step']:.2f}", f"{t.gain:+.0%}", *_idle(t.figures), f"{t.mean_lag:.2f}", t.knob.takes)
        for t in found
    ]
    head = ("predicted, one thing changed", "step s", "", "trainer idle", "engines idle", "mean lag", "takes")
    shared = "" if config.cluster.device == "cuda" else SHARED
    limited = limit(trainer_idle(lines), rollout_idle(lines))
    return f"{limited}{shared}\n{verdict(found)}\n\n{table(head, rows)}"


def _turned(knob: Knob, now: dict[str, float]) -> Turned:
    steps = _steady(knob.scenario)
    figures = _figures(steps, knob.scenario.fleets[0].engines)
    return Turned(knob=knob, gain=figures["step"] / now["step"] - 1, figures=figures, mean_lag=_mean_lag(steps))


def verdict(found: Sequence[Turned]) -> str:
    """The setting that gains most for nothing; and what would, for something."""
    parts = []
    for said, chosen in (
        ("Turn first", [t for t in found if not t.knob.takes]),
        ("With more hardware", [t for t in found if t.knob.takes not in ("", OBJECTIVE)]),
    ):
        best = min(chosen, key=lambda turned: turned.gain, default=None)
        if best and best.gain <= -WORTH:
            takes = f", {best.knob.takes}" if best.knob.takes else ""
            parts.append(f"{said}: {best.knob.setting} ({best.gain:+.0%} of a step predicted{takes}).")
    return "\n".join(parts) or "No single setting gains anything."


def limit(trainer_waits: float, engines_idle: float) -> str:
    """What the step is limited by, in words, from the shares of a step in which each side has nothing to do."""
    seen = f"the trainer waits {trainer_waits:.0%} of a step, and engines are idle {engines_idle:.0%}"
    if trainer_waits < SATURATED and engines_idle < SATURATED:
        return f"Bottleneck: both sides, which are balanced; {seen}."
    if trainer_waits < SATURATED:
        return f"Bottleneck: training; {seen}."
    if engines_idle < SATURATED:
        return f"Bottleneck: generation; {seen}."
    return f"Bottleneck: latency, of the longest completions or of verdicts, as neither side is busy; {seen}."


def _short(scenario: Scenario) -> Scenario:
    rules = scenario.rules
    return replace(scenario, rules=replace(rules, total_steps=min(STEPS, scenario.steps)))


def _steady(scenario: Scenario) -> Sequence[Step]:
    return steady(simulate(scenario).steps, scenario.rules.lead)


def _idle(figures: dict[str, float]) -> tuple[str, str]:
    return f"{figures['trainer idle']:.0%}", f"{figures['rollout idle']:.0%}"


def _mean_lag(steps: Sequence[Step]) -> float:
    tokens = sum(step.lag_tokens.total() for step in steps)
    return sum(lag * n for step in steps for lag, n in step.lag_tokens.items()) / max(tokens, 1)
