"""Whether a run learns from its rewards. It learns nothing while all completions of each prompt get the same reward."""

from collections import Counter
from collections.abc import Sequence

from launch.report.metrics_file import Metrics

MOST_REASONS = 3
STEPS_WITHOUT_SIGNAL = "reward/steps_without_signal"


def without_signal(lines: Sequence[Metrics]) -> bool:
    """Whether no step of these learned from rewards, although the run should. False when no step says."""
    counts = [line[STEPS_WITHOUT_SIGNAL] for line in lines if line.get(STEPS_WITHOUT_SIGNAL) is not None]
    return bool(counts) and all(counts)


def why_nothing_is_learned(lines: Sequence[Metrics]) -> str:
    """Says what the rewards of these steps were, and the most frequent reasons of the judges."""
    reasons: Counter[str] = Counter()
    for line in lines:
        counts = line.get("verdict_reasons")
        reasons.update(counts if isinstance(counts, dict) else {})
    rewards = [line["reward/mean"] for line in lines if isinstance(line.get("reward/mean"), int | float)]
    mean = f" (mean {min(rewards):.3g} to {max(rewards):.3g})" if rewards else ""
    most = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common(MOST_REASONS))
    return (
        f"in {len(lines)} steps all completions of each prompt got the same reward{mean}, so nothing was learned from them"
        + (f". The most frequent reasons: {most}" if most else "")
    )  # fmt: skip
