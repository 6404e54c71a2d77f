"""The loss of one token: pure functions over tensors.

Three policies: *behaviour* sampled the token, *old* is the trainer's when the step began, *current* is being trained. The trust
region (current against old) and the correction for staleness and engine mismatch (old against behaviour) are kept apart, as in
Hilton et al., "Batch size-invariance for policy optimization" (arXiv 2110.00641) and AReaL (arXiv 2505.24298):

    loss of a token = behaviour weight x policy loss(ratio, advantage) + kl_coef x KL - entropy_coef x entropy

A minibatch's loss is the sum of these times the weights of `advantages.loss_weights`, and nothing normalises again. All tensors
are f32 [m], a value for each sampled token of a microbatch.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn.functional import all_reduce

LARGEST_LOG = 20.0
"""Ratios and weights lie between e^-20 and e^20: an infinite one times a gradient of zero would be NaN."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """The settings of the loss; see conf/schema.py, AlgoConfig."""

    policy_loss: str = "ppo"  # ppo | gspo | cispo
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0  # 0: off
    kl_coef: float = 0.0  # of the KL in the loss
    kl_estimator: str = "k3"  # k2 | k3
    entropy_coef: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """How the behaviour policy's part is corrected; see conf/schema.py, AlgoConfig."""

    kind: str = "truncate"  # none | truncate | mask
    level: str = "token"  # token | sequence | geometric
    cap: float = 2.0
    floor: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """Which sequence each token belongs to: the one place where something is reduced over a sequence."""

    index: Tensor  # i64 [m], the sequence of each token
    count: int  # of sequences
    group: dist.ProcessGroup | None = None  # the context-parallel ranks, which hold the other tokens of the same sequences

    def sum(self, values: Tensor) -> Tensor:
        """[m] -> [m], at each token the sum over its sequence; with gradient, added up in float64."""
        sums = values.new_zeros(self.count, dtype=torch.float64).index_add(0, self.index, values.double())
        if self.group is not None and self.group.size() > 1:
            sums = all_reduce(sums, group=self.group)
        return sums.index_select(0, self.index).to(values.dtype)

    def mean(self, values: Tensor) -> Tensor:
        """[m] -> [m], at each token the mean over its sequence's sampled tokens."""
        return self.sum(values) / self.sum(torch.ones_like(values))


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLoss:
    """The policy's part of the loss, and where clipping holds."""

    losses: Tensor  # [m], with gradient
    low: Tensor  # bool [m], the ratio is clipped from below
    high: Tensor  # bool [m], and from above
    dual: Tensor  # bool [m], the second bound of dual clipping holds


def behaviour_weights(old: Tensor, behaviour: Tensor, sequences: Sequences, correction: Correction) -> tuple[Tensor, Tensor]:
    """The weights that correct for the behaviour policy, and the raw ones they come from; [m] each, without gradient.

    raw = exp(x) with d = old - behaviour and x by level: token d; sequence the sum of d over the sequence, its exact importance
    weight; geometric the mean of d over the sequence, which long sequences do not blow up.
    kind none: 1; truncate: min(raw, cap) (V-trace, arXiv 1802.01561; for engine mismatch: Yao et al., "Your Efficient RL
    Framework Secretly Brings You Off-Policy RL Training"); mask: raw where floor <= raw <= cap, else 0 (IcePop, 2510.18855).
    """
    log_weights = (old - behaviour).detach()
    if correction.level == "sequence":
        log_weights = sequences.sum(log_weights)
    elif correction.level == "geometric":
        log_weights = sequences.mean(log_weights)
    raw = _exp(log_weights)
    if correction.kind == "none":
        return torch.ones_like(raw), raw
    if correction.kind == "truncate":
        return raw.clamp(max=correction.cap), raw
    return torch.where((raw >= correction.floor) & (raw <= correction.cap), raw, 0.0), raw


def policy_loss(objective: Objective, current: Tensor, old: Tensor, advantages: Tensor, sequences: Sequences) -> PolicyLoss:
    """The chosen one of the losses below."""
    if objective.policy_loss == "cispo":
        return cispo_loss(current, old, advantages, objective.clip_low, objective.clip_high)
    log_ratios = current - old
    if objective.policy_loss == "gspo":
        log_ratios = sequences.mean(log_ratios)
    return ppo_loss(_exp(log_ratios), advantages, objective.clip_low, objective.clip_high, objective.dual_clip)


def ppo_loss(ratios: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float = 0.0) -> PolicyLoss:
    """-min(r A, clip(r, 1 - low, 1 + high) A), and where A < 0, with a dual clip c > 1, at most -c A.

    PPO (arXiv 1707.06347), the loss of GRPO (2402.03300), Dr. GRPO (2503.20783) and, with high above low, DAPO (2503.14476).
    Dual clip: "Mastering Complex Control in MOBA Games" (1912.09729). GSPO (2507.18071) gives it the sequence's ratio,
    r = exp(mean over the sequence of current - old): the geometric mean of the tokens' ratios, which its tokens share.
    """
    plain = ratios * advantages
    clipped = ratios.clamp(1 - clip_low, 1 + clip_high) * advantages
    losses = -torch.minimum(plain, clipped)
    held = clipped < plain
    dual = torch.zeros_like(held)
    if dual_clip > 0:
        bound = -dual_clip * advantages
        dual = (advantages < 0) & (losses > bound)
        losses = torch.where(dual, bound, losses)
    return PolicyLoss(losses=losses, low=held & (advantages < 0), high=held & (advantages > 0), dual=dual)


def cispo_loss(current: Tensor, old: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> PolicyLoss:
    """-sg(clip(r, 1 - low, 1 + high)) A log p with r = exp(current - old), sg: without gradient. MiniMax-M1 (arXiv 2506.13585).

    The weight is clipped, not the update: a clipped token keeps its gradient, -sg(clip(r)) A. clip_low = 1 is no lower bound.
    """
    ratios = _exp(current - old).detach()
    losses = -ratios.clamp(1 - clip_low, 1 + clip_high) * advantages * current
    return PolicyLoss(
        losses=losses, low=ratios < 1 - clip_low, high=ratios > 1 + clip_high, dual=torch.zeros_like(ratios, dtype=torch.bool)
    )


def kl(current: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """Estimate of KL(current || reference) a token [m] (Schulman, "Approximating KL divergence").

    With d = reference - current: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d.
    """
    d = reference - current
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d.square() / 2
    d = d.clamp(max=LARGEST_LOG)  # both terms: the second alone would drive a token that is so far off further away
    return torch.expm1(d) - d


def token_losses(
    objective: Objective,
    *,
    current: Tensor,
    entropies: Tensor,
    old: Tensor,
    weights: Tensor,
    advantages: Tensor,
    reference: Tensor | None,
    sequences: Sequences,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs, entropies, `behaviour_weights` and advantages [m] -> losses [m], with gradient by current and entropies,
    and per-token figures [m] for the metrics."""
    policy = policy_loss(objective, current, old, advantages, sequences)
    losses = weights * policy.losses
    figures = {
        "clip/fraction": (policy.low | policy.high).float(),
        "clip/low_fraction": policy.low.float(),
        "clip/high_fraction": policy.high.float(),
        "entropy/mean": entropies.detach(),
        "loss/policy": losses.detach(),
    }
    if objective.dual_clip > 0:
        figures["clip/dual_fraction"] = policy.dual.float()
    if reference is not None:
        divergence = kl(current, reference, objective.kl_estimator)
        losses = losses + objective.kl_coef * divergence
        figures["kl/reference"] = divergence.detach()
    if objective.entropy_coef > 0:
        losses = losses - objective.entropy_coef * entropies
    figures["loss/total"] = losses.detach()
    return losses, figures


def _exp(logs: Tensor) -> Tensor:
    return logs.clamp(-LARGEST_LOG, LARGEST_LOG).exp()
