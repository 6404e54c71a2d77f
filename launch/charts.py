"""A chart of lines over a common axis: one look for the planner, the report of a run, and that of a sweep."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, isfinite, log10
from statistics import fmean

from launch.drawing import Dot, Drawing, Line, Text, text_width

COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#64748b", "#be185d")
AXIS, GRID, FAINT = "#94a3b8", "#e2e8f0", "#64748b"
LEFT, RIGHT, BOTTOM = 58, 18, 44
TITLE_Y, LEGEND_Y, ROW = 18, 38, 17
FEW_DOTS, MOST_DOTS = 20, 300  # dots are smaller above the first, and left out above the second
WIDER = 1.16  # a browser's letters than those that are measured with

Series = Mapping[str, Sequence[tuple[float, float]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """The x axis. With `labels` the values are places and the labels their names."""

    name: str
    labels: Mapping[float, str] | None = None
    whole: bool = False  # values are counts: no tick between two


def chart(
    title: str, x: Axis, series: Series, *, note: str = "", from_zero: bool = True, last_values: bool = False,
    width: int = 460, height: int = 280,
) -> Drawing:  # fmt: skip
    """A line a series; points that are no numbers are left out. Raises ValueError when nothing is left."""
    kept = {name: [(a, b) for a, b in points if isfinite(a) and isfinite(b)] for name, points in series.items()}
    kept = {name: points for name, points in kept.items() if points}
    if not kept:
        raise ValueError(f"{title}: no series has a point")
    xs = [a for points in kept.values() for a, _ in points]
    ys = [b for points in kept.values() for _, b in points]
    y_ticks = ticks(min(0.0, *ys) if from_zero else min(ys), max(*ys, 0.0) if from_zero else max(ys), count=5)
    drawing = Drawing(width, height)
    drawing.add(Text(LEFT, TITLE_Y, title, size=14, bold=True), Text(width - RIGHT, TITLE_Y, note, "end", FAINT))
    top = LEGEND_Y + ROW * _draw_legend(drawing, kept, last_values)
    plane = _Plane(drawing, top, (min(xs), max(xs)), (y_ticks[0], y_ticks[-1]), padded=x.labels is not None)
    for tick in y_ticks:
        y = plane.y(tick)
        drawing.add(Line([(LEFT, y), (width - RIGHT, y)], GRID), Text(LEFT - 7, y + 4, f"{tick:.4g}", "end", FAINT))
    drawing.add(Line([(LEFT, height - BOTTOM), (width - RIGHT, height - BOTTOM)], AXIS))
    for value, label in (x.labels or _ticks_within(min(xs), max(xs), whole=x.whole)).items():
        drawing.add(Text(plane.x(value), height - BOTTOM + 17, label, "middle", FAINT))
    drawing.add(Text((LEFT + width - RIGHT) / 2, height - 8, x.name, "middle", FAINT))
    for i, (name, points) in enumerate(kept.items()):
        _draw_series(drawing, plane, f"{name}, {x.name}", points, COLOURS[i % len(COLOURS)])
    return drawing


class _Plane:
    """From values to pixels. Padded, the outermost values stand off the edges."""

    def __init__(self, drawing: Drawing, top: float, xs: tuple[float, float], ys: tuple[float, float], *, padded: bool) -> None:
        pad = 0.08 * (drawing.width - LEFT - RIGHT) if padded else 0.0
        self._x0, self._x_span = xs[0], (xs[1] - xs[0]) or 1.0
        self._left, self._width = LEFT + pad, drawing.width - LEFT - RIGHT - 2 * pad
        self._y0, self._y_span = ys[0], (ys[1] - ys[0]) or 1.0
        self._bottom, self._height = drawing.height - BOTTOM, drawing.height - top - BOTTOM

    def x(self, value: float) -> float:
        return self._left + (value - self._x0) / self._x_span * self._width

    def y(self, value: float) -> float:
        return self._bottom - (value - self._y0) / self._y_span * self._height


def _draw_series(drawing: Drawing, plane: _Plane, what: str, points: Sequence[tuple[float, float]], colour: str) -> None:
    """A dot a point; where several share their x, the line goes through their mean."""
    means = {x: fmean(b for a, b in points if a == x) for x, _ in points}
    drawing.add(Line([(plane.x(a), plane.y(b)) for a, b in means.items()], colour, 2.0))
    if len(points) <= MOST_DOTS:
        radius = 3.0 if len(points) <= FEW_DOTS else 1.8
        drawing.add(*(Dot(plane.x(a), plane.y(b), colour, radius, hint=f"{what} {a:g}: {b:.4g}") for a, b in points))


def _draw_legend(drawing: Drawing, series: Series, last_values: bool) -> int:
    """Under the title, in as many rows as it needs; their number."""
    at, row = float(LEFT), 0
    for i, (name, points) in enumerate(series.items()):
        words = f"{name} {points[-1][1]:.3g}" if last_values else name
        needed = 19 + WIDER * text_width(words)
        if at > LEFT and at + needed > drawing.width - RIGHT:
            at, row = float(LEFT), row + 1
        y, colour = LEGEND_Y + ROW * row, COLOURS[i % len(COLOURS)]
        drawing.add(Line([(at, y - 4), (at + 14, y - 4)], colour, 3.0), Text(at + 19, y, words, colour=colour))
        at += needed + 14
    return row + 1


def _ticks_within(low: float, high: float, *, whole: bool) -> dict[float, str]:
    found = [t for t in ticks(low, high) if low <= t <= high and not (whole and t % 1)]
    return {t: f"{t:g}" for t in found}


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Round numbers that reach from `low` or below to `high` or above."""
    span = max(high - low, 1e-12, 1e-9 * abs(high))
    raw = span / count
    power = 10.0 ** floor(log10(raw))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= raw * (1 - 1e-9))
    first = floor(low / step + 1e-9)
    return [step * i for i in range(first, max(ceil(high / step - 1e-9), first + 1) + 1)]
