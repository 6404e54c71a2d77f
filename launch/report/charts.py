"""Charts of lines, of grouped bars and of stacked bars. Planner, simulator and the reports of runs and sweeps share them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, isfinite, log10
from statistics import fmean

from launch.report.drawing import Box, Dot, Drawing, Line, Text, text_width

COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#64748b", "#be185d")
AXIS, GRID, FAINT = "#94a3b8", "#e2e8f0", "#64748b"
LEFT, RIGHT, BOTTOM = 58, 18, 44
TITLE_Y, ROW, UNDER_TITLE = 18, 17, 20
FEW_DOTS, MOST_DOTS = 20, 300  # with more points than the first, dots are smaller; with more than the second, there are none
MOST_BARS = 150  # beyond this number, neighbours are drawn as their mean
WIDER = 1.16  # a browser's letters are wider than the measured ones by this factor

Series = Mapping[str, Sequence[tuple[float, float]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """The x axis. With `labels`, each value is a position and its label is shown there."""

    name: str
    labels: Mapping[float, str] | None = None
    whole: bool = False  # values are counts, so no tick stands between two of them


def chart(
    title: str, x: Axis, series: Series, *, note: str = "", from_zero: bool = True, log: bool = False,
    last_values: bool = False, width: int = 460, height: int = 280,
) -> Drawing:  # fmt: skip
    """One line per series; with `log` the y axis is logarithmic. Points that such an axis cannot show are left out. Raises
    ValueError when no point remains."""
    kept = _kept(title, series, lambda y: isfinite(y) and (y > 0 or not log))
    ys = [y for points in kept.values() for _, y in points]
    base = [0.0] if from_zero and not log else []
    y_ticks = (decades if log else ticks)(min(ys + base), max(ys + base), 5)
    drawing, plane = _frame(title, note, x, kept, y_ticks, log=log, pad=0.08 if x.labels else 0.0, last_values=last_values,
                            size=(width, height))  # fmt: skip
    for i, (name, points) in enumerate(kept.items()):
        _draw_line(drawing, plane, f"{name}, {x.name}", points, COLOURS[i % len(COLOURS)])
    return drawing


def stack(
    title: str, x: Axis, series: Series, *, note: str = "", last_values: bool = False, width: int = 460, height: int = 280
) -> Drawing:
    """Stacked bars: one bar per x value, one segment per series, the first at the bottom. Raises ValueError when no point
    remains."""
    kept = _kept(title, series, lambda y: isfinite(y) and y >= 0)
    parts = {name: dict(points) for name, points in kept.items()}
    places = sorted({at for points in kept.values() for at, _ in points})
    highest = max(sum(part.get(at, 0.0) for part in parts.values()) for at in places)
    drawing, plane = _frame(title, note, x, kept, ticks(0.0, highest, 5), pad=0.5 / len(places), last_values=last_values,
                            size=(width, height))  # fmt: skip
    at_once = ceil(len(places) / MOST_BARS)
    for i in range(0, len(places), at_once):
        _draw_bar(drawing, plane, x.name, places[i : i + at_once], parts)
    return drawing


def grouped_bars(
    title: str, x: Axis, series: Series, *, note: str = "", log: bool = False, width: int = 460, height: int = 280
) -> Drawing:
    """Grouped bars: one group per x value, one bar per series. Where several points of a series share their x value, the bar is
    their mean and each point is a dot. Raises ValueError when no point remains."""
    kept = _kept(title, series, lambda y: isfinite(y) and (y > 0 or not log))
    ys = [y for points in kept.values() for _, y in points]
    base = [] if log else [0.0]
    y_ticks = (decades if log else ticks)(min(ys + base), max(ys + base), 5)
    places = {at for points in kept.values() for at, _ in points}
    drawing, plane = _frame(title, note, x, kept, y_ticks, log=log, pad=0.5 / len(places), last_values=False,
                            size=(width, height))  # fmt: skip
    bar_width = 1.7 * plane.pad / len(kept)
    foot = plane.y(y_ticks[0] if log else 0.0)
    for i, (name, points) in enumerate(kept.items()):
        for at in dict.fromkeys(at for at, _ in points):
            values = [y for x_value, y in points if x_value == at]
            left, top = plane.x(at) - 0.85 * plane.pad + i * bar_width, plane.y(fmean(values))
            label = (x.labels or {}).get(at, f"{at:g}")
            hint = f"{name}, {x.name} {label}: {figure(fmean(values))}"
            drawing.add(Box(left, min(top, foot), 0.94 * bar_width, abs(foot - top), COLOURS[i % len(COLOURS)], hint))
            if len(values) > 1:
                middle = left + 0.47 * bar_width
                drawing.add(*(Dot(middle, plane.y(y), AXIS, 2.5, hint=f"{name}: {figure(y)}") for y in values))
    return drawing


def _kept(title: str, series: Series, has_a_place: Callable[[float], bool]) -> Series:
    kept = {name: [(a, b) for a, b in points if isfinite(a) and has_a_place(b)] for name, points in series.items()}
    if not any(kept.values()):
        raise ValueError(f"{title}: no series has a point")
    return {name: points for name, points in kept.items() if points}


def _frame(
    title: str, note: str, x: Axis, series: Series, y_ticks: Sequence[float], *, pad: float, size: tuple[int, int],
    log: bool = False, last_values: bool,
) -> tuple[Drawing, "_Plane"]:  # fmt: skip
    """Everything but the series: title, note, legend, grid and axes."""
    drawing = Drawing(*size)
    right, bottom = drawing.width - RIGHT, drawing.height - BOTTOM
    drawing.add(Text(LEFT, TITLE_Y, title, size=14, bold=True))
    legend_y = TITLE_Y + UNDER_TITLE
    if note:
        drawing.add(Text(LEFT, TITLE_Y + ROW, note, colour=FAINT))
        legend_y += ROW
    top = legend_y + ROW * _draw_legend(drawing, legend_y, series, last_values)
    xs = [a for points in series.values() for a, _ in points]
    plane = _Plane(drawing, top, (min(xs), max(xs)), (y_ticks[0], y_ticks[-1]), log=log, pad=pad)
    for tick in y_ticks:
        y = plane.y(tick)
        drawing.add(Line([(LEFT, y), (right, y)], GRID), Text(LEFT - 7, y + 4, figure(tick), "end", FAINT))
    drawing.add(Line([(LEFT, bottom), (right, bottom)], AXIS))
    for value, label in (x.labels or _ticks_within(min(xs), max(xs), whole=x.whole)).items():
        drawing.add(Text(plane.x(value), bottom + 17, label, "middle", FAINT))
    drawing.add(Text((LEFT + right) / 2, drawing.height - 8, x.name, "middle", FAINT))
    return drawing, plane


class _Plane:
    """Maps values to pixels. The outermost values keep a distance of `pad` times the width from the edges."""

    def __init__(
        self, drawing: Drawing, top: float, xs: tuple[float, float], ys: tuple[float, float], *, log: bool, pad: float
    ) -> None:
        self._scale: Callable[[float], float] = log10 if log else float
        across = drawing.width - LEFT - RIGHT
        self._x0, self._x_span = xs[0], (xs[1] - xs[0]) or 1.0
        self.pad = pad * across
        self._left, self._width = LEFT + self.pad, across - 2 * self.pad
        self._y0 = self._scale(ys[0])
        self._y_span = (self._scale(ys[1]) - self._y0) or 1.0
        self._bottom, self._height = drawing.height - BOTTOM, drawing.height - top - BOTTOM

    def x(self, value: float) -> float:
        return self._left + (value - self._x0) / self._x_span * self._width

    def y(self, value: float) -> float:
        return self._bottom - (self._scale(value) - self._y0) / self._y_span * self._height


def _draw_line(drawing: Drawing, plane: _Plane, what: str, points: Sequence[tuple[float, float]], colour: str) -> None:
    """One dot per point. Where several points share their x value, the line goes through their mean."""
    means = {x: fmean(b for a, b in points if a == x) for x, _ in points}
    drawing.add(Line([(plane.x(a), plane.y(b)) for a, b in means.items()], colour, 2.0))
    if len(points) <= MOST_DOTS:
        radius = 3.0 if len(points) <= FEW_DOTS else 1.8
        drawing.add(*(Dot(plane.x(a), plane.y(b), colour, radius, hint=f"{what} {a:g}: {figure(b)}") for a, b in points))


def _draw_bar(
    drawing: Drawing, plane: _Plane, x_name: str, neighbours: Sequence[float], parts: Mapping[str, Mapping[float, float]]
) -> None:
    """Several neighbours are drawn as one bar, their mean."""
    left, right = plane.x(neighbours[0]) - 0.94 * plane.pad, plane.x(neighbours[-1]) + 0.94 * plane.pad
    where = " to ".join(f"{at:g}" for at in dict.fromkeys((neighbours[0], neighbours[-1])))
    below = 0.0
    for i, (name, part) in enumerate(parts.items()):
        if value := fmean(part.get(at, 0.0) for at in neighbours):
            top, bottom = plane.y(below + value), plane.y(below)
            hint = f"{name}, {x_name} {where}: {figure(value)}"
            drawing.add(Box(left, top, right - left, bottom - top, COLOURS[i % len(COLOURS)], hint))
            below += value


def _draw_legend(drawing: Drawing, y: float, series: Series, last_values: bool) -> int:
    """Draws the legend under the title and returns the number of rows that it needs."""
    at, row = float(LEFT), 0
    for i, (name, points) in enumerate(series.items()):
        words = f"{name} {figure(points[-1][1])}" if last_values else name
        needed = 19 + WIDER * text_width(words)
        if at > LEFT and at + needed > drawing.width - RIGHT:
            at, row = float(LEFT), row + 1
        row_y, colour = y + ROW * row, COLOURS[i % len(COLOURS)]
        drawing.add(Line([(at, row_y - 4), (at + 14, row_y - 4)], colour, 3.0), Text(at + 19, row_y, words, colour=colour))
        at += needed + 14
    return row + 1


def figure(value: float) -> str:
    """The value with three or four digits."""
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e7 else f"{value:.4g}" if abs(value) >= 100 else f"{value:.3g}"


def _ticks_within(low: float, high: float, *, whole: bool) -> dict[float, str]:
    found = [t for t in ticks(low, high) if low <= t <= high and not (whole and t % 1)]
    return {t: f"{t:g}" for t in found}


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Round numbers, the first at or below `low` and the last at or above `high`."""
    span = max(high - low, 1e-12, 1e-9 * abs(high))
    raw = span / count
    power = 10.0 ** floor(log10(raw))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= raw * (1 - 1e-9))
    first = floor(low / step + 1e-9)
    return [step * i for i in range(first, max(ceil(high / step - 1e-9), first + 1) + 1)]


def decades(low: float, high: float, count: int = 6) -> list[float]:
    """Powers of ten at equal distances, the first at or below `low` and the last at or above `high`."""
    first, last = floor(log10(low) + 1e-9), ceil(log10(high) - 1e-9)
    step = max(1, ceil((last - first) / count))
    return [10.0**power for power in range(first, max(last, first + 1) + step, step)]
