"""What a run has to say for itself when it is over: the number that a sweep compares, a few lines, and where its things are."""

import json
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from statistics import fmean, median
from typing import Any

from launch.metrics import METRICS_FILE, Metrics, read_metrics

SUMMARY_FILE = "summary.json"
LAST_STEPS = 5


def outcome(lines: Sequence[Metrics]) -> float:
    """One number for a sweep: the last pass rate on the held-out problems, or the mean reward of the last steps.

    What is no number is left out; NaN when nothing is left.
    """
    if passed := [value for value in _values(lines, "eval/pass_rate") if isfinite(value)]:
        return passed[-1]
    rewards = [value for value in _values(lines, "reward/mean") if isfinite(value)]
    return fmean(rewards[-LAST_STEPS:]) if rewards else float("nan")


def summary(run_dir: Path, elapsed_s: float) -> str:
    """What a finished run has to say for itself, and where its things are."""
    lines = read_metrics(run_dir)
    facts = [f"done: {max((int(line['step']) for line in lines), default=0)} steps in {elapsed_s:.0f} s"]
    if passed := _values(lines, "eval/pass_rate"):
        facts.append(f"held-out pass rate  {passed[0]:.3f} -> {passed[-1]:.3f}")
    if rewards := _values(lines, "reward/mean"):
        facts.append(f"reward              {fmean(rewards[:LAST_STEPS]):.3f} -> {fmean(rewards[-LAST_STEPS:]):.3f}")
    if step_s := _values(lines, "time/step_s"):
        facts.append(f"step                {median(step_s):.1f} s (median)")
    if lags := _values(lines, "lag/max_versions"):
        facts.append(f"largest lag         {max(lags):.0f} versions")
    if mismatch := _values(lines, "mismatch/same_version_abs_logprob"):
        facts.append(f"log-prob mismatch   {fmean(mismatch):.1e} (same version, mean)")
    facts += _accounting(run_dir / SUMMARY_FILE)
    facts += places(run_dir)
    return "\n".join(facts)


def _accounting(path: Path) -> list[str]:
    """Where every generated token went, as the queue counted."""
    try:
        counts = _with_key(json.loads(path.read_text()), "trained_tokens")
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        return [f"tokens              not known: {path} cannot be read ({error})"]
    if counts is None:
        return []
    parts = []
    for kind in ("trained", "waiting", "dropped", "lost", "eval"):
        count = counts.get(f"{kind}_tokens", 0)
        parts.append(f"{kind} {sum(count.values()) if isinstance(count, dict) else count:,}")
    return [f"tokens              {', '.join(parts)}"]


def _with_key(value: object, key: str) -> dict[str, Any] | None:
    """The first mapping, however deep, that holds the key."""
    if not isinstance(value, dict):
        return None
    if key in value:
        return value
    return next((found for inner in value.values() if (found := _with_key(inner, key))), None)


def places(run_dir: Path) -> list[str]:
    what = {
        "report.html": "charts of the run",
        "trace.json": "timeline, for ui.perfetto.dev",
        METRICS_FILE: "a line a step",
        SUMMARY_FILE: "token accounting",
        "recoveries.jsonl": "what the run stood still for, and how long",
        "logs": "of every process",
        "checkpoints": "to resume from",
        "hf": "the last weights, Hugging Face format",
        "tensorboard": f"tensorboard --logdir {run_dir / 'tensorboard'}",
    }
    return [f"{run_dir / name!s:<60} {why}" for name, why in what.items() if (run_dir / name).exists()]


def _values(lines: Sequence[Metrics], key: str) -> list[float]:
    return [float(line[key]) for line in lines if line.get(key) is not None]
