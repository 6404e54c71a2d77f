"""From the rewards of a group to the advantage of each of its trajectories."""

import numpy as np

from rollout.types import F32


def group_advantages(rewards: F32, kind: str, eps: float) -> F32:
    """rewards [G] -> advantages [G], each group on its own.

    grpo: (r - mean) / (std + eps), std over the group without Bessel's correction (DeepSeekMath, arXiv 2402.03300).
    dr_grpo: r - mean, since dividing by the std weighs easy and hard prompts unevenly (arXiv 2503.20783).
    """
    centred = rewards - rewards.mean()
    if kind == "dr_grpo":
        return centred.astype(np.float32)
    return (centred / (rewards.std() + eps)).astype(np.float32)
