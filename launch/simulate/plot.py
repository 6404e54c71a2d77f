"""A simulated run as one HTML page: step times, idle fractions, the queue, lags, over the steps that were simulated."""

from pathlib import Path

from launch.report.charts import Axis, Series, chart, stack
from launch.report.drawing import Drawing
from launch.report.page import html_page, pre
from launch.simulate.simulation import Result
from launch.simulate.simulation_report import Report, text

WIDTH, HEIGHT = 620, 320
PHASES = {
    "train": "train_s", "old log-probs": "old_logprob_s", "reference log-probs": "ref_logprob_s", "push": "push_s",
    "checkpoint": "checkpoint_s", "wait for the fleet": "drain_s", "wait for a batch": "wait_s",
}  # fmt: skip


def write_page(result: Result, report: Report, path: Path, *, steps: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(html_page(report.name, [pre(text(report, steps=steps))], drawings(result, report)))


def drawings(result: Result, report: Report) -> list[Drawing]:
    last_time = {step.step: step for step in result.steps}  # a step that is repeated after a failure counts once
    steps, engines = [last_time[number] for number in sorted(last_time)], len(result.engines)
    phases = {name: [(s.step, getattr(s, key)) for s in steps] for name, key in PHASES.items()}
    idle: Series = {
        "trainer": [(s.step, (s.wait_s + s.drain_s) / s.step_s) for s in steps],
        "engines": [(s.step, s.engine_idle_s / engines / s.step_s) for s in steps],
    }
    queue: Series = {
        "ready": [(s.step, s.ready_groups) for s in steps],
        "admitted, in any state": [(s.step, s.untaken_groups) for s in steps],
    }
    lags = Axis(name="versions", labels={lag: f"{lag}: {part:.1%}" for lag, part in report.lag_fractions.items()})
    step = Axis(name="step", whole=True)
    seen = {name: points for name, points in phases.items() if any(seconds for _, seconds in points)}
    first = "the first steps wait for the first finished completions"
    last = "the trainer waits while the fleet starts; at the end nothing is left to generate"
    return [
        stack("Seconds per step", step, seen, note=first, width=WIDTH, height=HEIGHT),
        chart("Idle fraction of a step", step, idle, note=last, width=WIDTH, height=HEIGHT),
        chart("Groups in the queue", step, queue, note="besides the batch, when it is taken", width=WIDTH, height=HEIGHT),
        stack("Trained tokens by lag", lags, {"share": list(report.lag_fractions.items())}, width=WIDTH, height=HEIGHT),
    ]
