"""What a run left for people: `report.html` (what came of it, and charts) and `trace.json` (a timeline for ui.perfetto.dev).

    python -m launch.report outputs/<run>

Both are made from `metrics.jsonl`, with the queue's account of tokens beside it, at the end of every run and whenever asked, so
also of a run that failed.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from launch.report.charts import Axis, chart, stack
from launch.report.drawing import Drawing
from launch.report.metrics_file import Metrics, read_metrics
from launch.report.page import html_page, pre
from launch.report.summary import facts

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
WIDTH, HEIGHT = 460, 280


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    title: str
    series: Mapping[str, str]  # what a line is called -> its key
    note: str
    log: bool = False
    stacked: bool = False


CHARTS = (
    Chart(
        title="Reward", note="of the batch; and on the held-out problems",
        series={"reward, mean": "reward/mean", "held-out pass rate": "eval/pass_rate"},
    ),
    Chart(
        title="Seconds of a step", note="waiting should be the smallest part", stacked=True,
        series={
            "train": "time/train_s", "old log-probs": "time/old_logprob_s", "reference log-probs": "time/ref_logprob_s",
            "push": "time/push_s", "pack": "time/pack_s", "wait for a batch": "time/wait_batch_s",
        },
    ),
    Chart(
        title="Idle", note="share of a step; after the last prompt engines have nothing to do",
        series={"trainer": "idle/trainer_fraction", "engines": "idle/rollout_fraction"},
    ),
    Chart(
        title="Tokens a second", note="of all engines; of the trainer, over the whole step",
        series={"generated": "tokens/generated_per_s", "trained": "tokens/trained_per_s"},
    ),
    Chart(
        title="Lag", note="versions; rollout.max_staleness is its bound",
        series={"largest": "lag/max_versions", "mean over tokens": "lag/mean_versions"},
    ),
    Chart(
        title="Queue", note="when the step ended",
        series={"groups ready": "queue/ready_groups", "completions to grade": "queue/to_grade"},
    ),
    Chart(
        title="Completion tokens", note="of the completions that were trained on",
        series={"mean": "completion/mean_tokens", "longest": "completion/max_tokens"},
    ),
    Chart(
        title="Log-prob mismatch", note="engine against trainer, mean absolute difference, nats", log=True,
        series={"same version": "mismatch/same_version_abs_logprob", "all tokens": "mismatch/abs_logprob"},
    ),
    Chart(title="KL to the reference", note="nats a token", series={"KL": "kl/reference"}),
    Chart(title="Entropy", note="nats a token", series={"entropy": "entropy/mean"}),
    Chart(
        title="Gradient norm", note="before clipping; of a step's optimizer steps",
        series={"mean": "grad_norm", "largest": "grad_norm_max"},
    ),
    Chart(
        title="Clipped tokens", note="share whose gradient the trust region cuts",
        series={"above": "clip/high_fraction", "below": "clip/low_fraction"},
    ),
    Chart(
        title="Behaviour weights", note="exp(old - behaviour), which correct for staleness",
        series={"mean": "behaviour/weight_mean", "99th percentile": "behaviour/weight_p99"},
    ),
    Chart(
        title="Effective sample size", note="of the behaviour weights; near 0 the run learns noise",
        series={"share of the tokens": "behaviour/ess_fraction"},
    ),
)  # fmt: skip


def write_report(run_dir: Path) -> bool:
    """Makes both files; False if the run has no step to show."""
    lines = read_metrics(run_dir)
    if not any(line["step"] > 0 for line in lines):
        return False
    (run_dir / REPORT_FILE).write_text(page(run_dir.name, facts(run_dir), lines))
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


def page(name: str, facts: Sequence[str], lines: Sequence[Metrics]) -> str:
    title = f"{name}: {max(line['step'] for line in lines)} steps"
    told = "Beside the name of a line stands its last value; a point tells its own when the pointer is on it."
    figures = [drawn for wanted in CHARTS if (drawn := draw(wanted, lines))]
    return html_page(title, [pre("\n".join(facts)), f"<p>{told}</p>"], figures)


def draw(wanted: Chart, lines: Sequence[Metrics]) -> Drawing | None:
    """None when no key has a value."""
    series = {
        name: [(line["step"], float(line[key])) for line in lines if line.get(key) is not None]
        for name, key in wanted.series.items()
    }
    if not any(isfinite(value) and (value > 0 or not wanted.log) for points in series.values() for _, value in points):
        return None
    x = Axis(name="step", whole=True)
    if wanted.stacked:
        return stack(wanted.title, x, series, note=wanted.note, last_values=True, width=WIDTH, height=HEIGHT)
    return chart(wanted.title, x, series, note=wanted.note, log=wanted.log, last_values=True, width=WIDTH, height=HEIGHT)
