"""The plan's figures as one HTML page of inline SVG: it opens anywhere and needs no plotting library."""

from collections.abc import Mapping
from html import escape

from launch.charts import COLOURS, Axis, chart
from launch.drawing import Box, Drawing, Line, Text
from launch.plan.lines import gb
from launch.plan.study import Study, longest_by_concurrency
from launch.plan.training import USABLE

WIDTH, HEIGHT = 620, 330
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 28, 46
CONCURRENCIES = (16, 24, 32, 48, 64, 96, 128, 192, 256)


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
        title = f"{name}: step time against split"
        note = f"seconds; best {best.training.layout.gpus} GPUs train, {best.step_s:.1f} s"
        parts.append(chart(title, Axis(name="GPUs that train"), split, note=note, width=WIDTH, height=HEIGHT))
        longest = {
            f"TP{tp}": [(n, p.generation.longest_s) for n, p in by.items()]
            for tp, by in longest_by_concurrency(search, CONCURRENCIES).items()
        }
        title = f"{name}: latency of the longest completion"
        parts.append(chart(title, Axis(name="sequences in an engine"), longest, note="seconds", width=WIDTH, height=HEIGHT))
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
    body = "\n".join(f"<figure>{drawing.svg()}</figure>" for drawing in parts)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8">'
        f"<title>{escape(study.model.name)}, {study.cluster.gpus} GPUs</title>"
        "<style>body{font:14px system-ui,sans-serif;margin:24px;display:grid;"
        "grid-template-columns:repeat(auto-fit,minmax(600px,1fr))}"
        f"figure{{margin:0 0 24px}}</style>\n{body}\n</html>\n"
    )


def bars(title: str, stacks: Mapping[str, Mapping[str, float]], limit: float, usable: float) -> Drawing:
    scale = (WIDTH - LEFT - RIGHT) / (limit * 1.02)
    drawing = Drawing(WIDTH, HEIGHT)
    drawing.add(Text(LEFT, 16, title, size=14, bold=True))
    for row, (name, stack) in enumerate(stacks.items()):
        y, x = TOP + 26 + row * 120, float(LEFT)
        drawing.add(Text(LEFT, y - 6, name))
        for i, (part, size) in enumerate(stack.items()):
            colour, said = COLOURS[i % len(COLOURS)], f"{part} {gb(size)}"
            drawing.add(Box(x, y, size * scale, 30, colour, said))
            drawing.add(Text(LEFT + (i % 3) * 180, y + 48 + 16 * (i // 3), said, colour=colour))
            x += size * scale
    for size, name in ((limit, "all"), (limit * usable, f"usable {usable:.0%}")):
        x = LEFT + size * scale
        drawing.add(Line([(x, TOP + 8), (x, HEIGHT - BOTTOM)], "#444444"))
        drawing.add(Text(x - 4, HEIGHT - BOTTOM + (16 if name == "all" else 32), f"{name}: {gb(size)}", "end"))
    return drawing
