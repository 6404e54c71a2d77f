"""The plan's figures as one HTML page of inline SVG: it opens anywhere and needs no plotting library."""

from collections.abc import Mapping, Sequence
from html import escape
from math import ceil, floor, log10

from launch.plan.lines import gb
from launch.plan.study import Study, longest_by_concurrency
from launch.plan.training import USABLE

WIDTH, HEIGHT = 620, 330
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 28, 46
COLOURS = ("#3b6fb6", "#d1702f", "#3f9a5b", "#a04a8f", "#7a7a7a", "#b59a1e")
CONCURRENCIES = (16, 24, 32, 48, 64, 96, 128, 192, 256)

Series = Mapping[str, Sequence[tuple[float, float]]]


def page(study: Study) -> str:
    """All figures, for both sets of assumptions."""
    parts = []
    for name, search in study.searches.items():
        best, splits = search.best, search.splits
        near = [p for p in splits if p.step_s <= 4 * best.step_s]
        split = {
            "step": [(p.training.layout.gpus, p.step_s) for p in near],
            "training": [(p.training.layout.gpus, p.training.step_s) for p in near],
            "generation": [(p.training.layout.gpus, p.generation.step_s) for p in near],
        }
        title = f"{name}: step time against split; best {best.training.layout.gpus} GPUs train, {best.step_s:.1f} s"
        parts.append(lines(title, "GPUs that train", "seconds", split))
        longest = {
            f"TP{tp}": [(n, p.generation.longest_s) for n, p in by.items()]
            for tp, by in longest_by_concurrency(search, CONCURRENCIES).items()
        }
        parts.append(lines(f"{name}: latency of the longest completion", "sequences in an engine", "seconds", longest))
        memory = {
            part: getattr(best.training.memory, part) for part in ("weights", "gradients", "optimizer", "activations", "logits")
        }
        tp = best.generation.fleet.tp
        weights = study.model.weight_bytes / tp
        cache = best.generation.kv_tokens * study.model.kv_bytes_per_token / tp
        used = best.generation.running * study.workload.context_tokens * study.model.kv_bytes_per_token / tp
        bars_of = {
            f"trainer, {best.training.layout}": memory,
            f"engine, TP{tp}": {"weights": weights, "KV cache in use": used, "KV cache free": max(0.0, cache - used)},
        }
        parts.append(bars(f"{name}: memory of a GPU", bars_of, study.cluster.gpu_bytes, USABLE))
    body = "\n".join(f"<figure>{svg}</figure>" for svg in parts)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8">'
        f"<title>{escape(study.model.name)}, {study.cluster.gpus} GPUs</title>"
        "<style>body{font:14px system-ui,sans-serif;margin:24px;display:grid;"
        "grid-template-columns:repeat(auto-fit,minmax(600px,1fr))}"
        f"figure{{margin:0 0 24px}}text{{font:12px system-ui,sans-serif}}</style>\n{body}\n</html>\n"
    )


def lines(title: str, x_name: str, y_name: str, series: Series) -> str:
    xs = [x for points in series.values() for x, _ in points]
    ys = [y for points in series.values() for _, y in points]
    x_ticks, y_ticks = _ticks(min(xs), max(xs)), _ticks(0.0, max(ys))
    x0, x1, y1 = min(xs), max(max(xs), min(xs) + 1), y_ticks[-1]

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - y / y1 * (HEIGHT - TOP - BOTTOM),
        )

    parts = [_text(LEFT, 16, f"{title} ({y_name})", weight="bold"), _text(WIDTH / 2, HEIGHT - 8, x_name, anchor="middle")]
    for tick in y_ticks:
        _, y = at(x0, tick)
        parts += [_line(LEFT, y, WIDTH - RIGHT, y), _text(LEFT - 6, y + 4, f"{tick:g}", anchor="end")]
    for tick in (t for t in x_ticks if x0 <= t <= x1):
        parts.append(_text(at(tick, 0)[0], HEIGHT - BOTTOM + 16, f"{tick:g}", anchor="middle"))
    for i, (name, points) in enumerate(series.items()):
        colour = COLOURS[i % len(COLOURS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in points))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for point in points:
            x, y = at(*point)
            said = f"{name}: {point[0]:g} → {point[1]:.1f}"
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"><title>{escape(said)}</title></circle>')
        parts.append(_text(WIDTH - RIGHT - 4, TOP + 14 + 15 * i, name, anchor="end", colour=colour))
    return _svg(parts)


def bars(title: str, stacks: Mapping[str, Mapping[str, float]], limit: float, usable: float) -> str:
    scale = (WIDTH - LEFT - RIGHT) / (limit * 1.02)
    parts = [_text(LEFT, 16, title, weight="bold")]
    for row, (name, stack) in enumerate(stacks.items()):
        y, x = TOP + 26 + row * 120, float(LEFT)
        parts.append(_text(LEFT, y - 6, name))
        for i, (part, size) in enumerate(stack.items()):
            colour = COLOURS[i % len(COLOURS)]
            said = escape(f"{part}: {gb(size)}")
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{size * scale:.1f}" height="30" fill="{colour}"><title>{said}</title></rect>'
            )
            parts.append(_text(LEFT + (i % 3) * 180, y + 48 + 16 * (i // 3), f"{part} {gb(size)}", colour=colour))
            x += size * scale
    for size, name in ((limit, "all"), (limit * usable, f"usable {usable:.0%}")):
        x = LEFT + size * scale
        parts.append(_line(x, TOP + 8, x, HEIGHT - BOTTOM, colour="#444"))
        parts.append(_text(x - 4, HEIGHT - BOTTOM + (16 if name == "all" else 32), f"{name}: {gb(size)}", anchor="end"))
    return _svg(parts)


def _ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Round numbers that reach from `low` or below to `high` or above."""
    span = max(high - low, 1e-9)
    raw = span / count
    power = 10.0 ** floor(log10(raw))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= raw)
    first = floor(low / step)
    return [step * i for i in range(first, ceil(high / step) + 1)]


def _svg(parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img">{"".join(parts)}</svg>'


def _line(x0: float, y0: float, x1: float, y1: float, colour: str = "#ddd") -> str:
    return f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="{colour}"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", colour: str = "#222", weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-weight="{weight}">{escape(text)}</text>'
