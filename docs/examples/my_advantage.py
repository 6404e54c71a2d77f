"""An advantage of your own: among completions with the full reward, shorter ones get more."""

import numpy as np

from conf.schema import AlgoConfig
from rollout.ledger.records import Group

SHARE = 0.1  # the part of the reward that the longest right completion loses


def shorter_is_better(rewards: np.ndarray, group: Group, algo: AlgoConfig) -> np.ndarray:
    lengths = np.array([t.completion_tokens for t in group.trajectories])
    shaped = rewards - SHARE * (rewards >= 1) * lengths / lengths.max()
    return shaped - shaped.mean()
