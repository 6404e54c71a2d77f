"""The summary of a run that is over: the number that a sweep compares, a few facts, and where its files are."""

import json
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from statistics import fmean, median
from typing import Any

from conf.compose.run_folder import CHECKPOINTS, HF, LOGS, METRICS, RECOVERIES, REPORT, SUMMARY, TENSORBOARD, TRACE
from launch.report.learning import STEPS_WITHOUT_SIGNAL, why_nothing_is_learned, without_signal
from launch.report.metrics_file import Metrics, read_metrics

LAST_STEPS = 5


def outcome(lines: Sequence[Metrics]) -> float:
    """One number for a sweep: the last pass rate on the held-out problems, or else the mean reward of the last steps.

    Values that are not finite are left out; NaN when no value is left.
    """
    if passed := [value for value in _values(lines, "eval/pass_rate") if isfinite(value)]:
        return passed[-1]
    rewards = [value for value in _values(lines, "reward/mean") if isfinite(value)]
    return fmean(rewards[-LAST_STEPS:]) if rewards else float("nan")


def summary(run_dir: Path, elapsed_s: float) -> str:
    """The facts about a finished run, and where its files are."""
    steps = max((int(line["step"]) for line in read_metrics(run_dir)), default=0)
    return "\n".join([f"done: {steps} steps in {elapsed_s:.0f} s", *facts(run_dir), *places(run_dir)])


def facts(run_dir: Path) -> list[str]:
    """The results of a run, finished or not: one line per fact."""
    lines = read_metrics(run_dir)
    found = []
    if without_signal(lines):
        found.append(("learned nothing", why_nothing_is_learned([line for line in lines if STEPS_WITHOUT_SIGNAL in line])))
    if passed := _values(lines, "eval/pass_rate"):
        found.append(("held-out pass rate", f"{passed[0]:.3f} -> {passed[-1]:.3f}"))
    if rewards := _values(lines, "reward/mean"):
        count = max(1, min(LAST_STEPS, len(rewards) // 2))  # no step belongs to both
        of = f"mean of the first and the last {count} steps" if count > 1 else "the first and the last step"
        found.append(("reward", f"{fmean(rewards[:count]):.3f} -> {fmean(rewards[-count:]):.3f} ({of})"))
    if step_s := _values(lines, "time/step_s"):
        found.append(("step", f"{median(step_s):.1f} s (median)"))
    rates = [f"{rate:,.0f} {what}" for what in ("generated", "trained") if isfinite(rate := _mean(lines, f"tokens/{what}_per_s"))]
    if rates:
        found.append(("tokens per second", ", ".join(rates)))
    sides = {"trainer": "trainer", "engines": "rollout"}
    idle = [f"{what} {idle:.0%}" for what, key in sides.items() if isfinite(idle := _mean(lines, f"idle/{key}_fraction"))]
    if idle:
        found.append(("idle", ", ".join(idle)))
    if lags := _values(lines, "lag/max_versions"):
        found.append(("largest lag", f"{max(lags):.0f} version{'s' * (max(lags) != 1)}"))
    if mismatch := _values(lines, "mismatch/same_version_abs_logprob"):
        found.append(("log-prob mismatch", f"{fmean(mismatch):.1e} (same version, mean)"))
    found += _accounting(run_dir / SUMMARY)
    return [f"{name:<19} {value}" for name, value in found]


def _accounting(path: Path) -> list[tuple[str, str]]:
    """What became of every generated token, by the counts of the queue."""
    try:
        counts = _with_key(json.loads(path.read_text()), "trained_tokens")
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        return [("tokens", f"not known: {path} cannot be read ({error})")]
    if counts is None:
        return []
    found = {kind: counts.get(f"{kind}_tokens", 0) for kind in ("trained", "waiting", "dropped", "lost", "eval")}
    went = {kind: sum(count.values()) if isinstance(count, dict) else count for kind, count in found.items()}
    return [("tokens", f"{sum(went.values()):,} generated: {', '.join(f'{kind} {count:,}' for kind, count in went.items())}")]


def _with_key(value: object, key: str) -> dict[str, Any] | None:
    """The first mapping at any depth that holds the key."""
    if not isinstance(value, dict):
        return None
    if key in value:
        return value
    return next((found for inner in value.values() if (found := _with_key(inner, key))), None)


def places(run_dir: Path) -> list[str]:
    what = {
        REPORT: "charts of the run",
        TRACE: "timeline, for ui.perfetto.dev",
        METRICS: "one line per step",
        SUMMARY: "token accounting",
        RECOVERIES: "each interruption of training, and how long it took",
        LOGS: "one per process",
        CHECKPOINTS: "resume= goes on from the newest",
        HF: "the last weights, Hugging Face format",
        TENSORBOARD: f"tensorboard --logdir {run_dir / 'tensorboard'}",
    }
    return [f"{run_dir / name!s:<60} {why}" for name, why in what.items() if (run_dir / name).exists()]


def _mean(lines: Sequence[Metrics], key: str) -> float:
    """The mean over the run's time, so that a long step counts for more. NaN when no step has the key."""
    pairs = [(float(line[key]), float(line["time/step_s"])) for line in lines if _values([line], key) and "time/step_s" in line]
    seconds = sum(step_s for _, step_s in pairs)
    return sum(value * step_s for value, step_s in pairs) / seconds if seconds else float("nan")


def _values(lines: Sequence[Metrics], key: str) -> list[float]:
    return [float(line[key]) for line in lines if line.get(key) is not None]
