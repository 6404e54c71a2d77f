"""What each trajectory counts for: its reward as shaped, its advantage over its group, and the weight of its tokens in the loss.

All is fixed before a minibatch is trained on, whole trajectories at a time, so the gradient does not depend on how a batch is cut
into microbatches.
"""

import numpy as np
import numpy.typing as npt

from rollout.ledger.records import F32

I64 = npt.NDArray[np.int64]


def group_advantages(rewards: F32, kind: str, eps: float) -> F32:
    """rewards [G] -> advantages [G], each group on its own. A lone trajectory, and a group without differences, has none: 0.

    grpo: (r - mean) / (std + eps), std over the group without Bessel's correction (DeepSeekMath, arXiv 2402.03300).
    dr_grpo: r - mean, since dividing by the std weighs easy and hard prompts unevenly (arXiv 2503.20783).
    rloo: r - mean of the others = G / (G - 1) (r - mean of all), an unbiased baseline (arXiv 2402.14740).
    """
    if len(rewards) < 2 or np.ptp(rewards) == 0:  # the mean's rounding must not become a signal
        return np.zeros(len(rewards), dtype=np.float32)
    exact = rewards.astype(np.float64)
    centred = exact - exact.mean()
    match kind:
        case "grpo":
            centred /= exact.std() + eps
        case "rloo":
            centred *= len(rewards) / (len(rewards) - 1)
    return centred.astype(np.float32)


def overlong_penalties(lengths: I64, limit: int, buffer_fraction: float, penalty: float) -> F32:
    """completion lengths [n] -> what is taken off each reward: from 0 to `penalty` over the last `buffer_fraction` of `limit`.

    With buffer B = fraction x limit: penalty x clip((length - (limit - B)) / B, 0, 1). The soft overlong punishment of DAPO
    (arXiv 2503.14476).
    """
    if buffer_fraction == 0:
        return np.zeros(len(lengths), dtype=np.float32)
    buffer = buffer_fraction * limit
    return (penalty * np.clip((lengths - (limit - buffer)) / buffer, 0, 1)).astype(np.float32)


def loss_weights(sampled_tokens: I64, normalisation: str, longest: int) -> F32:
    """The weight in a minibatch's loss of one sampled token of each of its n trajectories, [n].

    token: 1 / sum of sampled_tokens, all tokens alike (DAPO). sequence: 1 / (n sampled_tokens), all trajectories alike (GRPO).
    constant: 1 / (n longest), with the limit of a completion's length, so that length has no say at all (Dr. GRPO).
    """
    count = len(sampled_tokens)
    match normalisation:
        case "token":
            weights = np.full(count, 1 / sampled_tokens.sum())
        case "sequence":
            weights = 1 / (count * sampled_tokens)
        case _:
            weights = np.full(count, 1 / (count * longest))
    return weights.astype(np.float32)
