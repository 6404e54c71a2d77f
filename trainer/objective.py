"""The loss of one token: pure functions over tensors.

Three policies: *behaviour* sampled the token, *old* is the trainer's when the step began, *current* is being trained. The trust
region (current against old) and the correction for staleness and engine mismatch (old against behaviour) are kept apart, as in
Hilton et al., "Batch size-invariance for policy optimization" (arXiv 2110.00641) and AReaL (arXiv 2505.24298).
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """The settings of the loss; see conf/schema.py, AlgoConfig."""

    clip_low: float
    clip_high: float
    behaviour_correction: str  # none | truncate | mask
    behaviour_cap: float
    kl_coef: float
    kl_estimator: str  # k1 | k2 | k3


def behaviour_weights(old: Tensor, behaviour: Tensor, correction: str, cap: float) -> Tensor:
    """w = exp(old - behaviour) [m], without gradient; truncate: min(w, cap); mask: 0 where w > cap; none: 1."""
    weights = torch.exp(old - behaviour).detach()
    if correction == "truncate":
        return weights.clamp(max=cap)
    if correction == "mask":
        return torch.where(weights > cap, torch.zeros_like(weights), weights)
    return torch.ones_like(weights)


def clipped_surrogate(
    current: Tensor, old: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """-min(ratio A, clip(ratio, 1 - low, 1 + high) A) with ratio = exp(current - old), and where clipping holds, [m] each.

    PPO, arXiv 1707.06347; two bounds as in DAPO, arXiv 2503.14476.
    """
    ratio = torch.exp(current - old)
    plain = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return -torch.minimum(plain, clipped), clipped < plain


def kl(current: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """Estimate of KL(current || reference) a token [m] (Schulman, "Approximating KL divergence").

    With d = reference - current: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d.
    """
    d = reference - current
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d.square() / 2
    return torch.expm1(d) - d


def token_losses(
    objective: Objective,
    *,
    current: Tensor,
    old: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    reference: Tensor | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """All inputs f32 [m] log-probs and advantages -> losses [m], with gradient, and per-token figures [m] for the metrics."""
    weights = behaviour_weights(old, behaviour, objective.behaviour_correction, objective.behaviour_cap)
    surrogate, clipped = clipped_surrogate(current, old, advantages, objective.clip_low, objective.clip_high)
    losses = weights * surrogate
    figures = {"clip/fraction": clipped.float(), "behaviour/weight_mean": weights, "loss/policy": losses.detach()}
    if reference is not None:
        divergence = kl(current, reference, objective.kl_estimator)
        losses = losses + objective.kl_coef * divergence
        figures["kl/reference"] = divergence.detach()
    figures["loss/total"] = losses.detach()
    return losses, figures
