"""What limits a run, and which setting to change first.

The simulator is fitted to the first half of the run's metrics and must predict the second half before anything is concluded from
it. Then each setting is changed alone in the simulator. For a run on GPUs the plan's prediction stands beside what was measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launch.advise.beside_plan import beside_plan
from launch.advise.knobs import ANOTHER_OBJECTIVE, Knob, knobs
from launch.plan.table import table
from launch.simulate.measured_run import MeasuredRun, read_measured_run
from launch.simulate.prediction import predict_second_half
from launch.simulate.prediction import table as comparison_table
from launch.simulate.scenario import Scenario
from launch.simulate.simulated_trainer import SimulatedStep
from launch.simulate.simulation import simulate
from launch.simulate.simulation_report import steady
from launch.simulate.step_figures import StepFigures, measured_figures, simulated_figures

SATURATED = 0.10  # a side that waits for a smaller fraction of a step limits it
SMALLEST_GAIN = 0.02  # fraction of a step; the simulator cannot tell smaller gains from none
STEPS = 24  # simulated for each knob
SHARED_CORES = (
    "\nTrainer, engines and judges share the machine's cores. More cores shorten a step, and so does less work. The predictions "
    "hold while the other processes keep their cores."
)


def run_report(run_dir: Path, overrides: Sequence[str] = ()) -> str:
    """Raises ConfigError for a folder that is no run's or holds too few steps."""
    run = read_measured_run(run_dir, overrides)
    comparison = predict_second_half(run)
    parts = [comparison_table(comparison), _fitted(comparison.scenario)]
    if run.config.cluster.device == "cuda":
        parts.append(beside_plan(run, STEPS))
    parts.append(_advice(comparison.scenario, run))
    return "\n\n".join(parts)


def _fitted(scenario: Scenario) -> str:
    trainer, fleet = scenario.trainer, scenario.engine_groups[0]
    full = fleet.concurrency
    rows = [
        ("old log-probs", f"{trainer.old_logprob_s_per_token * 1e6:.1f} us per token, prompts included"),
        ("reference log-probs", f"{trainer.ref_logprob_s_per_token * 1e6:.1f} us per token"),
        ("train", f"{trainer.train_s_per_token * 1e6:.1f} us per token, and {trainer.step_overhead_s:.2f} s per step"),
        ("push", f"{trainer.push_s:.2f} s"),
        ("one engine", f"{fleet.speeds.decode_s[1] * 1e3:.1f} ms per token with 1 sequence, "
                      f"{fleet.speeds.decode_s[full] * 1e3:.1f} ms with {full}"),
        ("one verdict", f"{scenario.workload.grading_mean_s:.2f} s"),
        ("completions", f"{scenario.workload.completion_mean_tokens:.0f} tokens on average"),
    ]  # fmt: skip
    return table(("fitted", "to the first half"), rows, left=2)


@dataclass(frozen=True, kw_only=True, slots=True)
class KnobOutcome:
    """What a knob would do."""

    knob: Knob
    gain: float  # relative to the present step; below 0 the step is shorter
    figures: StepFigures
    mean_lag: float

    @property
    def row(self) -> tuple[str, ...]:
        figures = self.figures
        return (
            self.knob.setting, f"{figures.step_s:.2f}", f"{self.gain:+.0%}" if self.gain else "", f"{figures.trainer_idle:.0%}",
            f"{figures.engines_idle:.0%}", f"{self.mean_lag:.2f}", self.knob.costs,
        )  # fmt: skip


def _advice(scenario: Scenario, run: MeasuredRun) -> str:
    rules = scenario.rules
    base = replace(scenario, rules=replace(rules, total_steps=min(STEPS, scenario.steps)))
    now = _outcome(Knob(setting="as it is", scenario=base))
    outcomes = [_outcome(knob, now.figures.step_s) for knob in knobs(base, run.config)]
    outcomes.sort(key=lambda outcome: outcome.gain)
    head = ("predicted, one setting changed", "step s", "", "trainer idle", "engines idle", "mean lag", "costs")
    shared = "" if run.config.cluster.device == "cuda" else SHARED_CORES
    measured = measured_figures(run.warm)
    limited = bottleneck(measured.trainer_idle, measured.engines_idle)
    return f"{limited}{shared}\n{verdict(outcomes)}\n\n{table(head, [now.row, *(outcome.row for outcome in outcomes)])}"


def _outcome(knob: Knob, present_s: float = 0.0) -> KnobOutcome:
    """What the simulator says of a knob, compared with the present length of a step; 0 compares it with itself."""
    scenario = knob.scenario
    steps = steady(simulate(scenario).steps, scenario.rules.lead)
    figures = simulated_figures(steps, scenario.engine_groups[0].engines)
    return KnobOutcome(
        knob=knob, gain=figures.step_s / (present_s or figures.step_s) - 1, figures=figures, mean_lag=_mean_lag(steps)
    )


def verdict(found: Sequence[KnobOutcome]) -> str:
    """The setting that gains most at no cost, and the one that gains most with more hardware."""
    parts = []
    for said, chosen in (
        ("Change first", [t for t in found if not t.knob.costs]),
        ("With more hardware", [t for t in found if t.knob.costs not in ("", ANOTHER_OBJECTIVE)]),
    ):
        best = min(chosen, key=lambda outcome: outcome.gain, default=None)
        if best and best.gain <= -SMALLEST_GAIN:
            costs = f", {best.knob.costs}" if best.knob.costs else ""
            parts.append(f"{said}: {best.knob.setting} ({best.gain:+.0%} of a step predicted{costs}).")
    return "\n".join(parts) or "No single setting gains anything."


def bottleneck(trainer_waits: float, engines_idle: float) -> str:
    """What limits the step, from the share of a step in which each side has nothing to do."""
    seen = f"the trainer waits {trainer_waits:.0%} of a step, and engines are idle {engines_idle:.0%}"
    if trainer_waits < SATURATED and engines_idle < SATURATED:
        return f"Bottleneck: both sides equally; {seen}."
    if trainer_waits < SATURATED:
        return f"Bottleneck: training; {seen}."
    if engines_idle < SATURATED:
        return f"Bottleneck: generation; {seen}."
    return f"Bottleneck: latency. The longest completions or the verdicts take the time, as neither side is busy; {seen}."


def _mean_lag(steps: Sequence[SimulatedStep]) -> float:
    tokens = sum(step.lag_tokens.total() for step in steps)
    return sum(lag * n for step in steps for lag, n in step.lag_tokens.items()) / max(tokens, 1)
