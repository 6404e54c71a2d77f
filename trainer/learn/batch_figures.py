"""Figures of a batch that are known before training on it: rewards, verdicts, lengths and staleness."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from rollout.ledger.records import Batch, Trajectory

COMMONEST = 5
LONGEST_REASON = 100
DETAIL = re.compile(r"'[^']*'|\"[^\"]*\"|\d+(?:\.\d+)?")


def batch_figures(batch: Batch) -> dict[str, float]:
    trajectories = batch.trajectories
    lengths = np.array([t.completion_tokens for t in trajectories])
    lags = np.concatenate([batch.step - t.versions[t.sampled] for t in trajectories])
    rewards = np.array([t.reward for t in trajectories])
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/groups_with_signal_fraction": float(np.mean([np.ptp(g.rewards) > 0 for g in batch.groups])),
        **dict(_part_figures(trajectories)),
        "lag/max_versions": float(lags.max()),
        "lag/mean_versions": float(lags.mean()),
        "tokens/trained": float(lengths.sum()),
        "completion/mean_tokens": float(lengths.mean()),
        "completion/max_tokens": float(lengths.max()),
        "completion/length_capped_fraction": float(np.mean([t.finish == "length" for t in trajectories])),
        "trajectories/multi_version": float(sum(np.ptp(t.versions[t.sampled]) > 0 for t in trajectories)),
        "trajectories/resumed": float(sum(t.segments > t.turns for t in trajectories)),
        **dict(_episode_figures(trajectories)),
    }


def commonest_reasons(batch: Batch) -> dict[str, int]:
    """Why completions did not get the full reward -> how many completions, the commonest first.

    Numbers and quoted words are left out of a reason, so that the same failure of two tests or two problems counts as one.
    """
    reasons = (DETAIL.sub("…", t.reason)[:LONGEST_REASON] for t in batch.trajectories if t.reason)
    return dict(Counter(reasons).most_common(COMMONEST))


def _episode_figures(trajectories: Sequence[Trajectory]) -> Iterator[tuple[str, float]]:
    """Turns, and what they were worth; nothing where no completion had a second one."""
    turns = np.array([t.turns for t in trajectories])
    if turns.max() == 1:
        return
    yield "episode/mean_turns", float(turns.mean())
    yield "episode/max_turns", float(turns.max())
    yield "episode/environment_mean_s", float(np.mean([t.environment_s for t in trajectories]))
    rewards = np.array([t.reward for t in trajectories])
    for count in np.unique(turns):
        yield f"episode/turns/{count}/reward_mean", float(rewards[turns == count].mean())
        yield f"episode/turns/{count}/fraction", float(np.mean(turns == count))


def _part_figures(trajectories: Sequence[Trajectory]) -> Iterator[tuple[str, float]]:
    """Mean, least and largest value of each part of the verdicts, over the completions whose verdict has that part."""
    for part in sorted({part for t in trajectories for part in t.reward_parts}):
        values = [t.reward_parts[part] for t in trajectories if part in t.reward_parts]
        yield f"reward/part/{part}/mean", float(np.mean(values))
        yield f"reward/part/{part}/min", min(values)
        yield f"reward/part/{part}/max", max(values)
