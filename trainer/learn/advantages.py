"""The advantage of each trajectory over its group, the penalty for overlong completions, and each token's weight in the loss.

All three are computed before any minibatch is trained on, from whole trajectories, so the gradient does not depend on how a
batch is cut into microbatches. `algo.advantage` names one of ADVANTAGES, or a user's function with the same
signature (algorithm.py).
To add an advantage, write it here, add it to ADVANTAGES, and add its name to `algo.advantage` in conf/schema.py.
"""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from conf.schema import AlgoConfig
from rollout.ledger.records import F32, Group

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Advantage = Callable[[F64, Group, AlgoConfig], F64]
"""The rewards of one group [G], the group, and the settings -> advantages [G]."""


def grpo(rewards: F64, group: Group, algo: AlgoConfig) -> F64:
    """(r - mean) / (std + eps), with the std over the group without Bessel's correction (DeepSeekMath, arXiv 2402.03300)."""
    return _centred(rewards) / (rewards.std() + algo.advantage_eps)


def dr_grpo(rewards: F64, group: Group, algo: AlgoConfig) -> F64:
    """r - mean: dividing by the std would weigh easy and hard prompts unevenly (arXiv 2503.20783)."""
    return _centred(rewards)


def rloo(rewards: F64, group: Group, algo: AlgoConfig) -> F64:
    """r - mean of the others = G / (G - 1) (r - mean of all), an unbiased baseline (arXiv 2402.14740)."""
    return _centred(rewards) * (len(rewards) / (len(rewards) - 1))


ADVANTAGES: Mapping[str, Advantage] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}


def overlong_penalties(lengths: I64, limit: int, buffer_fraction: float, penalty: float) -> F32:
    """Completion lengths [n] -> what is subtracted from each reward: from 0 to `penalty` over the last part of `limit`.

    With buffer B = buffer_fraction x limit: penalty x clip((length - (limit - B)) / B, 0, 1). This is the soft overlong
    punishment of DAPO (arXiv 2503.14476).
    """
    if buffer_fraction == 0:
        return np.zeros(len(lengths), dtype=np.float32)
    buffer = buffer_fraction * limit
    return (penalty * np.clip((lengths - (limit - buffer)) / buffer, 0, 1)).astype(np.float32)


def loss_weights(sampled_tokens: I64, normalisation: str, longest: int) -> F32:
    """The numbers of sampled tokens of a minibatch's n trajectories -> the weight in the loss of each token of each, [n].

    token: 1 / sum of sampled_tokens, so all tokens count alike (DAPO). sequence: 1 / (n sampled_tokens), so all trajectories
    count alike (GRPO). constant: 1 / (n longest), where `longest` is the limit of a completion, so length plays no part
    (Dr. GRPO).
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


def _centred(rewards: F64) -> F64:
    """Rewards less their mean, and exactly 0 where all are equal: the rounding of a mean must not look like a difference."""
    return rewards - rewards.mean() if np.ptp(rewards) > 0 else np.zeros_like(rewards)
