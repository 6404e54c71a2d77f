"""What a sweep found: a table, and charts of reward, throughput, lag, mismatch and idle fractions over what was varied.

    python -m launch.report.sweep multirun/DATE [--x rollout.max_staleness]

It writes `sweep.png` and `sweep.html` into the sweep's folder. The table shows failed jobs with the reason. The report of a sweep
that still runs holds the jobs so far.
"""

import argparse
import html
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launch.report.charts import Axis, chart, grouped_bars
from launch.report.drawing import Drawing, write_sheet
from launch.report.page import html_page
from launch.report.sweep_jobs import State
from launch.report.sweep_rows import (
    KILLED,
    NoSweep,
    SweepRow,
    choose_x,
    is_numeric,
    lines_of,
    number,
    read_sweep,
    short,
    varied_keys,
)

PNG, HTML = "sweep.png", "sweep.html"
SMOOTHED = 5  # steps of a running mean
ASKED_WRONGLY = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    title: str
    note: str
    of: Mapping[str, Callable[[SweepRow], float]]  # name of the line -> its value
    log: bool = False


PANELS = (
    Panel(
        title="Reward", note="mean of the last steps; pass rate on held-out problems",
        of={"reward": lambda r: r.reward, "held out, after": lambda r: r.pass_after, "before": lambda r: r.pass_before},
    ),
    Panel(title="Throughput", note="trained tokens per second", of={"trained tokens": lambda r: r.trained_per_s}),
    Panel(title="Lag", note="versions", of={"largest": lambda r: r.lag_max, "mean": lambda r: r.lag_mean}),
    Panel(
        title="Log-prob mismatch", note="mean absolute difference between engine and trainer", log=True,
        of={"all tokens": lambda r: r.mismatch_all, "same version": lambda r: r.mismatch_same},
    ),
    Panel(
        title="Idle", note="fraction of the time", of={"trainer": lambda r: r.idle_trainer, "engines": lambda r: r.idle_rollout}
    ),
    Panel(title="Seconds per step", note="median", of={"step": lambda r: r.step_s}),
)  # fmt: skip

COLUMNS: tuple[tuple[str, str, Callable[[SweepRow], float]], ...] = (
    ("reward", ".3f", lambda r: r.reward),
    ("before", ".3f", lambda r: r.pass_before),
    ("after", ".3f", lambda r: r.pass_after),
    ("tok/s", ",.0f", lambda r: r.trained_per_s),
    ("lag", ".2f", lambda r: r.lag_mean),
    ("max", ".0f", lambda r: r.lag_max),
    ("mismatch", ".1e", lambda r: r.mismatch_all),
    ("same v.", ".1e", lambda r: r.mismatch_same),
    ("idle tr.", ".0%", lambda r: r.idle_trainer),
    ("idle eng.", ".0%", lambda r: r.idle_rollout),
    ("step s", ".1f", lambda r: r.step_s),
)


def head(rows: Sequence[SweepRow]) -> list[str]:
    return [*(short(key) for key in varied_keys(rows)), "state", "steps", *(title for title, _, _ in COLUMNS)]


def cells(one: SweepRow, rows: Sequence[SweepRow]) -> list[str]:
    said = [one.job.said.get(key, "") for key in varied_keys(rows)]
    steps = f"{one.steps}/{one.wanted_steps}" if one.wanted_steps else "-"
    values = [f"{value:{form}}" if isfinite(value := of(one)) else "-" for _, form, of in COLUMNS]
    return [*said, str(one.job.state), steps, *values]


def why(one: SweepRow) -> str:
    return one.job.failure if one.job.state is State.FAILED else KILLED if one.job.state is State.RUNNING else ""


def table(rows: Sequence[SweepRow]) -> Table:
    shown = Table(box=None, pad_edge=False, header_style="bold")
    titles = head(rows)
    for title in titles:
        shown.add_column(title, justify="left" if title == "state" else "right", no_wrap=True)
    for one in rows:
        shown.add_row(*map(Text, cells(one, rows)), style="" if one.complete else "red")
    return shown


def drawings(rows: Sequence[SweepRow], x: str) -> Iterator[Drawing]:
    """Learning curves of all jobs, then one chart per panel from the finished jobs. Panels without a value are left out.

    Numbers make lines. Categories have no order and no distance, so they make bars."""
    curves = dict(_curves([one for one in rows if one.rewards], x))
    if curves:
        by_step = {name: [(float(step), reward) for step, _, reward in points] for name, points in curves.items()}
        by_time = {name: [(at_s / 60, reward) for _, at_s, reward in points] for name, points in curves.items()}
        note = f"by {short(x)}, running mean of {SMOOTHED} steps" if x else f"running mean of {SMOOTHED} steps"
        yield chart("Reward by step", Axis(name="step", whole=True), by_step, note=note, from_zero=False)
        yield chart("Reward by time", Axis(name="minutes since the first step began"), by_time, note=note, from_zero=False)
    done = [one for one in rows if one.complete and one.steps]
    axis, place = _axis(done, x)
    for panel in PANELS:
        series = {
            ", ".join(filter(None, (name if len(panel.of) > 1 or not group else "", group))): sorted(
                (place(one), value) for one in members if isfinite(value := of(one))
            )
            for group, members in lines_of(done, x).items()
            for name, of in panel.of.items()
        }
        if any(value > 0 or not panel.log for points in series.values() for _, value in points):
            draw = chart if x and is_numeric(done, x) else grouped_bars
            yield draw(panel.title, axis, series, note=panel.note, log=panel.log)


def _curves(rows: Sequence[SweepRow], x: str) -> Iterator[tuple[str, list[tuple[int, float, float]]]]:
    """For each job, the name of its line and its points (step, seconds, running mean of the reward)."""
    others = [key for key in varied_keys(rows) if key != x]
    for one in rows:
        parts = [one.job.said.get(x, one.job.name), *(f"{short(key)}={one.job.said.get(key, '')}" for key in others)]
        ended = "" if one.complete else f" ({one.job.state})"
        rewards = [reward for _, _, reward in one.rewards]
        means = [fmean(rewards[max(0, i + 1 - SMOOTHED) : i + 1]) for i in range(len(rewards))]
        points = [(step, at_s, mean) for (step, at_s, _), mean in zip(one.rewards, means, strict=True)]
        yield ", ".join(parts) + ended, points


def _axis(rows: Sequence[SweepRow], x: str) -> tuple[Axis, Callable[[SweepRow], float]]:
    """The x axis and each job's position on it: a number at its value, categories side by side."""
    values = list(dict.fromkeys(one.job.said.get(x, one.job.name) for one in rows))
    if x and is_numeric(rows, x):
        return Axis(name=x, labels={float(value): value for value in values}), lambda one: number(one.job.said[x]) or 0.0
    places = {value: float(i) for i, value in enumerate(values)}
    labels = {place: value for value, place in places.items()}
    return Axis(name=x or "run", labels=labels), lambda one: places[one.job.said.get(x, one.job.name)]


def page(name: str, rows: Sequence[SweepRow], figures: Sequence[Drawing]) -> str:
    def tr(tag: str, texts: Sequence[str], kind: str = "") -> str:
        return f"<tr{kind}>" + "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts) + "</tr>"

    body = "".join(tr("td", cells(one, rows), "" if one.complete else ' class="bad"') for one in rows)
    reasons = "".join(f"<li>{html.escape(f'{one.job.name}: {why(one)}')}</li>" for one in rows if why(one))
    title = f"Sweep {name}: {sum(one.complete for one in rows)} of {len(rows)} jobs are done"
    return html_page(
        title, [f"<table>{tr('th', head(rows))}{body}</table>", reasons and f'<ul class="bad">{reasons}</ul>'], figures
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="launch.report.sweep", description="Writes a table and charts of a sweep.")
    parser.add_argument("sweep", type=Path, help="the sweep's folder, multirun/DATE")
    parser.add_argument("--x", default="", metavar="KEY", help="the setting on the x axis; default: the first varied number")
    options = parser.parse_args(arguments)
    try:
        rows = read_sweep(options.sweep)
        figures = list(drawings(rows, choose_x(rows, options.x)))
    except NoSweep as error:
        print(f"sweep_report: {error}", file=sys.stderr)
        return ASKED_WRONGLY
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(table(rows))
    for one in rows:
        if reason := why(one):
            console.print(f"{one.job.name}: {reason}", style="red", markup=False)
    (options.sweep / HTML).write_text(page(options.sweep.name, rows, figures))
    written = [options.sweep / HTML]
    if figures:
        done = f"{sum(one.complete for one in rows)} of {len(rows)} jobs are done"
        write_sheet(figures, 2, options.sweep / PNG, title=f"Sweep {options.sweep.name}: {done}")
        written.append(options.sweep / PNG)
    console.print("\n".join(map(str, written)), markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
