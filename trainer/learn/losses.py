"""The policy losses. `algo.policy_loss` names one of LOSSES, or a user's function with the same signature (algorithm.py).

A loss is a pure function of the tokens of one microbatch and of the algorithm's settings. It returns the loss per token, with
gradient, and figures per token, whose means over all tokens are logged. To add a loss, write it here, add it to LOSSES, and add
its name to `algo.policy_loss` in conf/schema.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from conf.schema import AlgoConfig
from trainer.learn.sequences import Sequences

LARGEST_LOG = 20.0
"""Ratios and weights are kept between e^-20 and e^20: an infinite ratio times a gradient of zero would be NaN."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossInputs:
    """What the loss of a microbatch is computed from, beside the current log-probs: f32 [m], one value per sampled token."""

    old: Tensor  # log-probs under the policy as it was when the step began
    behaviour: Tensor  # log-probs under the policy that sampled the token, as the engine reported them
    behaviour_weights: Tensor  # the policy loss is multiplied by these; they correct for old != behaviour
    advantages: Tensor
    reference: Tensor | None  # log-probs under the reference policy, if the loss has a KL term
    sequences: Sequences


Loss = tuple[Tensor, dict[str, Tensor]]  # losses [m] with gradient, and figures [m] by name
PolicyLoss = Callable[[Tensor, LossInputs, AlgoConfig], Loss]  # current log-probs [m], inputs, settings -> loss


def ppo(current: Tensor, inputs: LossInputs, algo: AlgoConfig) -> Loss:
    """PPO's clipped surrogate with one ratio per token."""
    return clipped_surrogate(bounded_exp(current - inputs.old), inputs.advantages, algo)


def gspo(current: Tensor, inputs: LossInputs, algo: AlgoConfig) -> Loss:
    """GSPO (arXiv 2507.18071): the clipped surrogate with one ratio per sequence, the geometric mean of its tokens' ratios."""
    return clipped_surrogate(bounded_exp(inputs.sequences.mean(current - inputs.old)), inputs.advantages, algo)


def cispo(current: Tensor, inputs: LossInputs, algo: AlgoConfig) -> Loss:
    """-sg(clip(r, 1 - low, 1 + high)) A log p with r = exp(current - old), sg: without gradient. MiniMax-M1 (arXiv 2506.13585).

    The weight is clipped, not the update: a clipped token keeps its gradient, -sg(clip(r)) A. With clip_low = 1 there is no
    lower bound.
    """
    ratios = bounded_exp(current - inputs.old).detach()
    losses = -ratios.clamp(1 - algo.clip_low, 1 + algo.clip_high) * inputs.advantages * current
    return losses, _clip_figures(low=ratios < 1 - algo.clip_low, high=ratios > 1 + algo.clip_high)


LOSSES: Mapping[str, PolicyLoss] = {"ppo": ppo, "gspo": gspo, "cispo": cispo}


def clipped_surrogate(ratios: Tensor, advantages: Tensor, algo: AlgoConfig) -> Loss:
    """-min(r A, clip(r, 1 - low, 1 + high) A), and where A < 0, with a dual clip c > 1, at most -c A."""
    plain = ratios * advantages
    clipped = ratios.clamp(1 - algo.clip_low, 1 + algo.clip_high) * advantages
    losses = -torch.minimum(plain, clipped)
    is_clipped = clipped < plain
    figures = _clip_figures(low=is_clipped & (advantages < 0), high=is_clipped & (advantages > 0))
    if algo.dual_clip > 0:
        bound = -algo.dual_clip * advantages
        dual = (advantages < 0) & (losses > bound)
        losses = torch.where(dual, bound, losses)
        figures["clip/dual_fraction"] = dual.float()
    return losses, figures


def bounded_exp(logs: Tensor) -> Tensor:
    return logs.clamp(-LARGEST_LOG, LARGEST_LOG).exp()


def _clip_figures(*, low: Tensor, high: Tensor) -> dict[str, Tensor]:
    return {
        "clip/fraction": (low | high).float(),
        "clip/low_fraction": low.float(),
        "clip/high_fraction": high.float(),
    }
