"""The plan's figures: an HTML page of inline SVG, or one PNG."""

from collections.abc import Mapping
from pathlib import Path

from conf.schema import ConfigError
from launch.plan.answer import answer
from launch.plan.cost_lines import gb
from launch.plan.model_costs import kv_bytes_per_token, weight_bytes
from launch.plan.search import Search
from launch.plan.study import Study, longest_by_concurrency
from launch.plan.training import USABLE
from launch.report.charts import COLOURS, FAINT, Axis, chart
from launch.report.drawing import Box, Drawing, Line, Text, write_sheet
from launch.report.page import html_page, pre

HTML, PNG = KINDS = ".html", ".png"
WIDTH, HEIGHT = 620, 330
LEFT, RIGHT, TOP, BOTTOM = 62, 24, 44, 40
BAR, ROW = 30, 112  # pixels of a bar's height, and from one to the next
CONCURRENCIES = (16, 24, 32, 48, 64, 96, 128, 192, 256)


def check_figures(where: str) -> None:
    """Raises ConfigError for what is neither of both."""
    if where and Path(where).suffix.lower() not in KINDS:
        raise ConfigError(f"plan.figures={where}: give a file that ends in {' or '.join(KINDS)}")


def write_figures(study: Study, path: Path) -> None:
    title, drawn = f"{study.model.name} on {study.cluster.gpus} GPUs", drawings(study)
    if path.suffix.lower() == PNG:
        write_sheet(drawn, len(study.searches), path, title=title)
    else:
        path.write_text(html_page(title, [pre(answer(study))], drawn))


def drawings(study: Study) -> list[Drawing]:
    """Each figure for both sets of assumptions, side by side."""
    return [draw(name, search, study) for draw in (_split, _latency, _memory) for name, search in study.searches.items()]


def _split(name: str, search: Search, study: Study) -> Drawing:
    best = search.best
    near = [p for p in search.splits if p.step_s <= 4 * best.step_s]
    series = {
        "training": [(p.training.setup.gpus, p.training.step_s) for p in near],
        "generation": [(p.training.setup.gpus, p.generation.step_s) for p in near],
        "step": [(p.training.setup.gpus, p.step_s) for p in near],  # last, so that it lies on what limits it
    }
    note = f"seconds; best: {best.step_s:.1f} with {best.training.setup.gpus} GPUs that train"
    x = Axis(name=f"GPUs that train; the rest of {study.cluster.gpus} generate")
    return chart(f"Step time against split, {name}", x, series, note=note, width=WIDTH, height=HEIGHT)


def _latency(name: str, search: Search, study: Study) -> Drawing:
    series = {
        f"TP{tp}": [(n, p.generation.longest_s) for n, p in by.items()]
        for tp, by in longest_by_concurrency(search, CONCURRENCIES).items()
    }
    title = f"Latency of the longest completion, {name}"
    note = f"seconds to {study.workload.lengths.cap_tokens:,} tokens, waits for pushes and resumptions included"
    return chart(title, Axis(name="sequences in an engine"), series, note=note, width=WIDTH, height=HEIGHT)


def _memory(name: str, search: Search, study: Study) -> Drawing:
    best = search.best
    parts = ("weights", "gradients", "optimizer", "activations", "logits")
    tp = best.generation.fleet.tp
    token_bytes = kv_bytes_per_token(study.model, tp)
    cache = best.generation.kv_tokens * token_bytes / tp
    used = best.generation.running * study.workload.context_tokens * token_bytes / tp
    engine = {"weights": weight_bytes(study.model) / tp, "KV cache in use": used, "KV cache free": max(0.0, cache - used)}
    stacks = {
        f"trainer, {best.training.setup}": {part: getattr(best.training.memory, part) for part in parts},
        f"engine, TP{tp}": engine,
    }
    return bars(f"Memory of a GPU, {name}", stacks, study.cluster.gpu_bytes, USABLE)


def bars(title: str, stacks: Mapping[str, Mapping[str, float]], limit: float, usable: float) -> Drawing:
    scale = (WIDTH - LEFT - RIGHT) / limit
    drawing = Drawing(WIDTH, HEIGHT)
    drawing.add(Text(LEFT, 18, title, size=14, bold=True))
    bottom = TOP + len(stacks) * ROW
    for size, said in ((limit * usable, f"{usable:.0%} is usable: {gb(limit * usable)}"), (limit, f"all: {gb(limit)}")):
        drawing.add(Line([(LEFT + size * scale, TOP + 8), (LEFT + size * scale, bottom)], FAINT))
        at_end = size == limit
        drawing.add(Text(LEFT + size * scale, bottom + (16 if at_end else 34), said, "end", FAINT))
    for row, (name, stack) in enumerate(stacks.items()):
        _draw_stack(drawing, TOP + row * ROW, name, stack, scale)
    return drawing


def _draw_stack(drawing: Drawing, top: float, name: str, stack: Mapping[str, float], scale: float) -> None:
    drawing.add(Text(LEFT, top + 20, f"{name}: {gb(sum(stack.values()))}"))
    x = float(LEFT)
    for i, (part, size) in enumerate(stack.items()):
        colour, said = COLOURS[i % len(COLOURS)], f"{part} {gb(size)}"
        drawing.add(Box(x, top + 28, size * scale, BAR, colour, said))
        drawing.add(Text(LEFT + (i % 3) * 165, top + 76 + 16 * (i // 3), said, colour=colour))
        x += size * scale
