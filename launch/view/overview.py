"""The first page: how the run goes, from `metrics.jsonl` and `config.yaml`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from conf.compose.run_folder import CONFIG
from launch.report.metrics_file import Metrics
from launch.report.run_report import CHARTS, Chart, parts
from launch.report.summary import facts


@dataclass(frozen=True, kw_only=True, slots=True)
class ChartLine:
    name: str
    values: Sequence[float | None]  # one per step of the chart


@dataclass(frozen=True, kw_only=True, slots=True)
class ChartData:
    title: str
    note: str
    log: bool
    stacked: bool
    steps: Sequence[int]
    lines: Sequence[ChartLine]


@dataclass(frozen=True, kw_only=True, slots=True)
class Overview:
    name: str
    steps: int
    facts: Sequence[str]
    charts: Sequence[ChartData]
    configuration: str


def overview(run_dir: Path, lines: Sequence[Metrics]) -> Overview:
    config = run_dir / CONFIG
    wanted = (CHARTS[0], *parts(lines), *CHARTS[1:])
    return Overview(
        name=run_dir.name,
        steps=max((int(line["step"]) for line in lines), default=0),
        facts=facts(run_dir) if lines else ["no step is done yet"],
        charts=[data for chart in wanted if (data := _data(chart, lines))],
        configuration=config.read_text(errors="replace") if config.is_file() else "",
    )


def _data(chart: Chart, lines: Sequence[Metrics]) -> ChartData | None:
    """None when no line has a value."""
    drawn = [
        ChartLine(name=name, values=[line.get(key) for line in lines])
        for name, key in chart.series.items()
        if any(line.get(key) is not None for line in lines)
    ]
    if not drawn:
        return None
    steps = [int(line["step"]) for line in lines]
    return ChartData(title=chart.title, note=chart.note, log=chart.log, stacked=chart.stacked, steps=steps, lines=drawn)
