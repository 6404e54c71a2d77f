"""What a run left for people: `report.html` (charts, self-contained) and `trace.json` (a timeline for ui.perfetto.dev).

    python -m launch.report outputs/<run>

Both are made from `metrics.jsonl` alone, at the end of every run and whenever asked, so also of a run that failed.
"""

import argparse
import html
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from launch.charts import Axis, chart
from launch.metrics import METRICS_FILE, Metrics, read_metrics

REPORT_FILE, TRACE_FILE = "report.html", "trace.json"
PHASES = (
    "time/wait_batch_s",
    "time/pack_s",
    "time/old_logprob_s",
    "time/ref_logprob_s",
    "time/train_s",
    "time/push_s",
    "time/eval_s",
)
"""What the trainer does in a step, in this order, one after the other."""
COUNTERS = ("queue/ready_groups", "lag/mean_versions", "idle/rollout_fraction", "tokens/generated_per_s")
WIDTH, HEIGHT = 460, 250


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    title: str
    keys: tuple[str, ...]
    note: str


CHARTS = (
    Chart(title="Reward", keys=("reward/mean", "eval/pass_rate"), note="of the batch; and on the held-out problems"),
    Chart(title="Seconds of a step", keys=PHASES[:6], note="waiting should be the smallest part"),
    Chart(title="Lag, versions", keys=("lag/max_versions", "lag/mean_versions"), note="bounded by rollout.max_staleness"),
    Chart(title="Idle fractions", keys=("idle/trainer_fraction", "idle/rollout_fraction"), note="of trainer and engines"),
    Chart(title="Queue", keys=("queue/ready_groups", "queue/to_grade"), note="groups ready; completions to grade"),
    Chart(title="Tokens a second", keys=("tokens/generated_per_s", "tokens/trained_per_s"), note=""),
    Chart(title="Completion tokens", keys=("completion/mean_tokens", "completion/max_tokens"), note=""),
    Chart(
        title="Log-prob mismatch",
        keys=("mismatch/same_version_abs_logprob", "mismatch/abs_logprob"),
        note="engine against trainer",
    ),
    Chart(title="KL to the reference", keys=("kl/reference",), note=""),
    Chart(title="Entropy", keys=("entropy/mean",), note="nats a token"),
    Chart(title="Gradient norm", keys=("grad_norm",), note="before clipping"),
    Chart(title="Clipped, and behaviour weight", keys=("clip/fraction", "behaviour/weight_mean"), note=""),
    Chart(
        title="Effective sample size",
        keys=("behaviour/ess_fraction",),
        note="of the behaviour weights; near 0 the run learns noise",
    ),
)


def write_report(run_dir: Path) -> bool:
    """Makes both files; False if the run has no step to show."""
    lines = read_metrics(run_dir)
    if not any(line["step"] > 0 for line in lines):
        return False
    (run_dir / REPORT_FILE).write_text(page(run_dir.name, lines))
    (run_dir / TRACE_FILE).write_text(json.dumps({"traceEvents": list(trace_events(lines)), "displayTimeUnit": "ms"}))
    return True


def trace_events(lines: Sequence[Metrics]) -> Iterator[dict[str, Any]]:
    """Chrome's trace events: a span a phase, a counter a figure; microseconds since the first line."""
    yield {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "trainer"}}
    yield {"ph": "M", "pid": 2, "name": "process_name", "args": {"name": "queue and fleet"}}
    start_s = float(lines[0]["time"]) - sum(float(lines[0].get(phase, 0.0)) for phase in PHASES)
    for line in lines:
        at_s = float(line["time"]) - start_s - sum(float(line.get(phase, 0.0)) for phase in PHASES)
        for phase in PHASES:
            seconds = float(line.get(phase, 0.0))
            if seconds:
                name = phase.removeprefix("time/").removesuffix("_s")
                span = {"name": name, "cat": "trainer", "ph": "X", "pid": 1, "tid": 1, "args": {"step": line["step"]}}
                yield span | {"ts": round(1e6 * at_s), "dur": round(1e6 * seconds)}
            at_s += seconds
        for name in COUNTERS:
            if name in line:
                yield {"name": name, "ph": "C", "pid": 2, "ts": round(1e6 * at_s), "args": {"value": line[name]}}


def page(name: str, lines: Sequence[Metrics]) -> str:
    """The report as one HTML file that needs nothing from anywhere."""
    charts = "\n".join(drawn for wanted in CHARTS if (drawn := draw(wanted, lines)))
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{html.escape(name)}</title>
<style>
body {{ font: 14px system-ui, sans-serif; margin: 2rem; color: #1e293b; background: #fff }}
h1 {{ font-size: 1.3rem }} main {{ display: flex; flex-wrap: wrap; gap: 1.2rem }}
figure {{ margin: 0; border: 1px solid #e2e8f0; border-radius: 8px; padding: .7rem }}
</style>
<h1>{html.escape(name)}: {max(line["step"] for line in lines)} steps</h1>
<main>
{charts}
</main></html>
"""


def draw(wanted: Chart, lines: Sequence[Metrics]) -> str:
    """One figure with a line a key; "" when no key has a value."""
    series = {
        _label(key): [(line["step"], float(line[key])) for line in lines if line.get(key) is not None] for key in wanted.keys
    }
    if not any(isfinite(value) for points in series.values() for _, value in points):
        return ""
    drawing = chart(
        wanted.title, Axis(name="step", whole=True), series, note=wanted.note, last_values=True, width=WIDTH, height=HEIGHT
    )
    return f"<figure>{drawing.svg()}</figure>"


def _label(key: str) -> str:
    return key.split("/")[-1].removesuffix("_s").removesuffix("_per").replace("_", " ")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="launch.report", description="Makes report.html and trace.json of a run.")
    parser.add_argument("run", type=Path, help="the run's folder")
    run_dir = parser.parse_args(arguments).run
    if not (run_dir / METRICS_FILE).is_file():
        print(f"launch.report: {run_dir} is no run's folder: it holds no {METRICS_FILE}", file=sys.stderr)
        return 2
    if not write_report(run_dir):
        print(f"launch.report: {run_dir} has no finished step yet", file=sys.stderr)
        return 1
    print(f"{run_dir / REPORT_FILE}\n{run_dir / TRACE_FILE}   (open it in ui.perfetto.dev)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
