"""A real run's first half fits the simulator, which then predicts the second half.

python -m launch.simulate from_run=outputs/NAME
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from launch.simulate.fit import fitted, simulated_steps
from launch.simulate.measured_run import WARM_UP_STEPS, MeasuredRun
from launch.simulate.scenario import Scenario
from launch.simulate.step_figures import PHASES, StepFigures, measured_figures, simulated_figures

RELATIVE_ERROR = 0.20  # largest relative error of a good prediction
FRACTION_ERROR = 0.05  # largest absolute error of a good prediction, for fractions of a step


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    what: str
    first_half: float  # measured
    predicted: float  # for the second half
    measured: float
    unit: str  # s | tokens/s | fraction
    binding: bool = False

    @property
    def within(self) -> bool:
        near = FRACTION_ERROR if self.unit == "fraction" else 0.0
        return abs(self.predicted - self.measured) <= max(near, RELATIVE_ERROR * self.measured)

    @property
    def error(self) -> float:
        """Relative; of a fraction, the difference."""
        difference = self.predicted - self.measured
        return difference if self.unit == "fraction" else difference / self.measured


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    run: str
    first: tuple[int, int]  # steps
    second: tuple[int, int]
    left_out: int  # the last steps, when nothing was left to generate
    rows: tuple[Compared, ...]
    scenario: Scenario  # fitted to the first half

    @property
    def within(self) -> bool:
        return all(row.within for row in self.rows if row.binding)


def predict_second_half(run: MeasuredRun, *, seed: int = 0) -> Comparison:
    """Raises ConfigError when the run's metrics do not hold enough."""
    lines = run.supplied
    half = len(lines) // 2
    first, second = lines[WARM_UP_STEPS:half], lines[half:]
    scenario = fitted(run.config, first, seed=seed)
    predicted = simulated_figures(simulated_steps(scenario, second), run.config.rollout.engines)
    return Comparison(
        run=run.name,
        first=(first[0]["step"], first[-1]["step"]),
        second=(second[0]["step"], second[-1]["step"]),
        left_out=len(run.steps) - len(lines),
        rows=tuple(_rows(measured_figures(first), predicted, measured_figures(second), scenario.trainer.step_overhead_s)),
        scenario=scenario,
    )


def _rows(before: StepFigures, predicted: StepFigures, after: StepFigures, overhead_s: float) -> Iterator[Compared]:
    def row(what: str, unit: str, value: Callable[[StepFigures], float], *, binding: bool = False) -> Compared:
        return Compared(
            what=what, unit=unit, binding=binding, first_half=value(before), predicted=value(predicted), measured=value(after)
        )

    yield row("step", "s", lambda f: f.step_s, binding=True)
    yield row("trainer idle", "fraction", lambda f: f.trainer_idle, binding=True)
    yield row("rollout idle", "fraction", lambda f: f.engines_idle, binding=True)
    for phase in PHASES:
        compared = row(phase, "s", partial(_phase_s, phase))
        if phase == "train":  # the simulator's training holds what the metrics leave out of every phase
            compared = replace(compared, predicted=compared.predicted - overhead_s)
        if compared.measured > 0:
            yield compared
    yield replace(row("busy engines", "tokens/s", lambda f: f.busy_tokens_per_s), predicted=before.busy_tokens_per_s)


def _phase_s(phase: str, figures: StepFigures) -> float:
    return figures.phases_s[phase]


def table(comparison: Comparison) -> str:
    lines = [
        f"{comparison.run}: calibrated on steps {comparison.first[0]}-{comparison.first[1]}, predicts steps "
        f"{comparison.second[0]}-{comparison.second[1]}",
        f"{'':<24}{'first half':>12}{'predicted':>12}{'measured':>12}{'error':>14}",
    ]
    for row in comparison.rows:
        fraction = row.unit == "fraction"
        form, error = (".3f", f"{100 * row.error:+.1f} points") if fraction else (".2f", f"{row.error:+.0%}")
        what = row.what if fraction else f"{row.what}, {row.unit}"
        mark = " *" if row.binding else ""
        lines.append(f"{what:<24}{row.first_half:>12{form}}{row.predicted:>12{form}}{row.measured:>12{form}}{error:>14}{mark}")
    off = ", ".join(row.what for row in comparison.rows if row.binding and not row.within)
    allowed = (
        f"within {RELATIVE_ERROR:.0%} of what was measured, or of a fraction within {100 * FRACTION_ERROR:.0f} points of a step"
    )
    lines.append(f"* {allowed}{f': NOT {off}' if off else ''}")
    if comparison.left_out:
        lines.append(f"The last {comparison.left_out} steps are left out: the fleet had nothing left to generate.")
    if not comparison.within:
        lines.append(
            "A figure that is far off changed between the halves, for example by another load on the machine or by other lengths."
        )
    return "\n".join(lines)
