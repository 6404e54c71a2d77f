"""What each trajectory counts for: its advantage, from the rewards of its group, and the weight of its tokens in the loss.

Both are fixed before a batch is cut into microbatches, so the gradient does not depend on the cut.
"""

import numpy as np
import numpy.typing as npt

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


def loss_weights(sampled_tokens: npt.NDArray[np.int64], normalisation: str) -> F32:
    """The weight in a minibatch's loss of one sampled token of each of its trajectories, [n].

    token: 1 / sum of sampled_tokens, all tokens alike; sequence: 1 / (n sampled_tokens), all trajectories alike.
    """
    if normalisation == "token":
        weights = np.full(len(sampled_tokens), 1 / sampled_tokens.sum())
    else:
        weights = 1 / (len(sampled_tokens) * sampled_tokens)
    return weights.astype(np.float32)
