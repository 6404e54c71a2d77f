"""A simulated run as one HTML page that needs nothing else: step times, idle fractions, lags, the queue."""

from collections.abc import Mapping, Sequence
from html import escape
from math import floor, log10
from pathlib import Path

from launch.simulate.report import Report, text
from launch.simulate.simulation import Result
from launch.simulate.trainer import Step

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 860, 220, 60, 30, 12
MOST_BARS = 300
QUARTERS = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 7.5, 8, 10)
PHASES = (
    ("train_s", "train", "#3b6ea5"),
    ("old_logprob_s", "old log-probs", "#6d9dc5"),
    ("ref_logprob_s", "reference log-probs", "#a5c4de"),
    ("push_s", "push", "#8a6bb1"),
    ("checkpoint_s", "checkpoint", "#444444"),
    ("wait_s", "wait for a batch", "#d9822b"),
    ("drain_s", "wait for the fleet", "#c0392b"),
)
STYLE = (
    "body{font:14px sans-serif;max-width:900px;margin:2em auto;color:#222}"
    "pre{background:#f4f4f4;padding:1em;white-space:pre-wrap;font-size:12px}"
)


def write_page(result: Result, report: Report, path: Path, *, steps: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(result, report, steps=steps))


def page(result: Result, report: Report, *, steps: int) -> str:
    shown = result.steps[:: max(1, -(-len(result.steps) // MOST_BARS))]
    engines = len(result.engines)
    idle = {
        "trainer": [(s.wait_s + s.drain_s) / s.step_s for s in shown],
        "engines": [s.engine_idle_s / engines / s.step_s for s in shown],
    }
    queue = {
        "ready, beside the batch": [float(s.ready_groups) for s in shown],
        "admitted": [float(s.untaken_groups) for s in shown],
    }
    numbers = [s.step for s in shown]
    parts = [
        f"<h1>{escape(report.name)}</h1><pre>{escape(text(report, steps=steps))}</pre>",
        _panel("Seconds of a step", _stacked(shown), [(label, colour) for _, label, colour in PHASES]),
        _panel("Idle fraction of a step", *_lines(numbers, idle, top=1.0)),
        _panel("Groups in the queue when a batch is taken", *_lines(numbers, queue)),
        _panel("Trained tokens by lag, in versions", _bars(report.lag_fractions), []),
    ]
    return f"<!doctype html><meta charset='utf-8'><title>{escape(report.name)}</title><style>{STYLE}</style>{''.join(parts)}"


def _panel(title: str, drawing: str, legend: Sequence[tuple[str, str]]) -> str:
    keys = " ".join(f"<span style='color:{colour}'>&#9632;</span> {escape(label)} &nbsp;" for label, colour in legend)
    return f"<h3>{escape(title)}</h3><svg viewBox='0 0 {WIDTH} {HEIGHT}' width='100%'>{drawing}</svg><div>{keys}</div>"


def _stacked(steps: Sequence[Step]) -> str:
    highest = _round_up(max(step.step_s for step in steps))
    width = (WIDTH - LEFT) / len(steps)
    drawn = [_axis(highest, steps[0].step, steps[-1].step)]
    for i, step in enumerate(steps):
        below = 0.0
        for key, _, colour in PHASES:
            seconds = getattr(step, key)
            if seconds > 0:
                drawn.append(_rectangle(LEFT + i * width, below, seconds, highest, width, colour))
            below += seconds
    return "".join(drawn)


def _lines(numbers: Sequence[int], series: Mapping[str, Sequence[float]], top: float = 0.0) -> tuple[str, list[tuple[str, str]]]:
    highest = top or _round_up(max(max(values) for values in series.values()) or 1.0)
    colours = ("#d9822b", "#3b6ea5")
    drawn = [_axis(highest, numbers[0], numbers[-1])]
    span = max(len(numbers) - 1, 1)
    for values, colour in zip(series.values(), colours, strict=False):
        points = " ".join(f"{LEFT + i * (WIDTH - LEFT) / span:.1f},{_y(v, highest):.1f}" for i, v in enumerate(values))
        drawn.append(f"<polyline fill='none' stroke='{colour}' stroke-width='1.5' points='{points}'/>")
    return "".join(drawn), list(zip(series, colours, strict=False))


def _bars(fractions: Mapping[int, float]) -> str:
    width = min(120.0, (WIDTH - LEFT) / max(len(fractions), 1))
    drawn = [_axis(1.0, "", "")]
    for i, (lag, part) in enumerate(fractions.items()):
        x = LEFT + i * width
        drawn.append(_rectangle(x + 8, 0.0, part, 1.0, width - 16, "#3b6ea5"))
        drawn.append(_label(x + width / 2, HEIGHT - 8, f"{lag}: {part:.1%}", "middle"))
    return "".join(drawn)


def _round_up(value: float) -> float:
    """The top of an axis whose quarters are round numbers."""
    magnitude = 10.0 ** floor(log10(value / 4))
    return next(4 * part * magnitude for part in QUARTERS if part * magnitude >= value / 4 * (1 - 1e-9))


def _axis(highest: float, first: object, last: object) -> str:
    lines = []
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _y(part * highest, highest)
        lines.append(f"<line x1='{LEFT}' x2='{WIDTH}' y1='{y:.1f}' y2='{y:.1f}' stroke='#ddd'/>")
        lines.append(_label(LEFT - 6, y + 4, f"{part * highest:,.4g}", "end"))
    return "".join([*lines, _label(LEFT, HEIGHT - 8, f"{first}", "start"), _label(WIDTH, HEIGHT - 8, f"{last}", "end")])


def _rectangle(x: float, below: float, value: float, highest: float, width: float, colour: str) -> str:
    y, height = _y(below + value, highest), value / highest * (HEIGHT - BOTTOM - TOP)
    return f"<rect x='{x:.1f}' y='{y:.1f}' width='{max(width, 0.5):.2f}' height='{height:.2f}' fill='{colour}'/>"


def _label(x: float, y: float, words: str, anchor: str) -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' font-size='11' text-anchor='{anchor}' fill='#555'>{escape(words)}</text>"


def _y(value: float, highest: float) -> float:
    return HEIGHT - BOTTOM - value / highest * (HEIGHT - BOTTOM - TOP)
