"""The loss per token: the policy loss, the weights that correct for the behaviour policy, KL and entropy.

There are three policies: *behaviour* sampled the token, *old* is the trainer's policy when the step began, *current* is being
trained. The trust region (current against old) and the correction for staleness and engine mismatch (old against behaviour) are
kept apart, as in Hilton et al., "Batch size-invariance for policy optimization" (arXiv 2110.00641) and AReaL (arXiv 2505.24298):

    loss per token = behaviour weight x policy loss(current, old, advantage) + kl_coef x KL - entropy_coef x entropy

A minibatch's loss is the sum of these times the weights of `advantages.loss_weights`; nothing else normalises it. All tensors
are f32 [m], one value for each sampled token of a microbatch.
"""

import torch
from torch import Tensor

from conf.schema import AlgoConfig
from trainer.learn.losses import LARGEST_LOG, LossInputs, PolicyLoss, bounded_exp
from trainer.learn.sequences import Sequences


def token_losses(
    policy_loss: PolicyLoss, algo: AlgoConfig, *, current: Tensor, entropies: Tensor, inputs: LossInputs
) -> tuple[Tensor, dict[str, Tensor]]:
    """Current log-probs and entropies [m] -> losses [m], with gradient by both, and figures per token [m]."""
    losses, figures = policy_loss(current, inputs, algo)
    losses = inputs.behaviour_weights * losses
    figures |= {"entropy/mean": entropies.detach(), "loss/policy": losses.detach()}
    if inputs.reference is not None:
        divergence = kl(current, inputs.reference, algo.kl_estimator)
        losses = losses + algo.kl_coef * divergence
        figures["kl/reference"] = divergence.detach()
    if algo.entropy_coef > 0:
        losses = losses - algo.entropy_coef * entropies
    figures["loss/total"] = losses.detach()
    return losses, figures


def taught(advantages: Tensor, old: Tensor, teacher: Tensor, weight: float, baseline: Tensor | float) -> Tensor:
    """advantage - weight x (old - teacher - baseline) per token [m], from the log-probs of the policy and of its teacher.

    The mean of old - teacher over tokens that the policy sampled is KL(policy || teacher), so this is on-policy distillation as
    a policy gradient (MiniLLM, arXiv 2306.08543; Lu et al., "On-Policy Distillation", Thinking Machines Lab 2025). A baseline
    changes no expected gradient. With 0, a policy far from its teacher is pushed away from nearly every token that it sampled,
    and the variance of that hides what it should learn. The mean of old - teacher takes most of this variance away.
    """
    return advantages - weight * (old - teacher - baseline)


def behaviour_weights(old: Tensor, behaviour: Tensor, sequences: Sequences, algo: AlgoConfig) -> tuple[Tensor, Tensor]:
    """The weights that correct for the behaviour policy, and the raw weights that they come from; [m] each, without gradient.

    raw = exp(x) with d = old - behaviour, where `behaviour_level` chooses x. token: d. sequence: the sum of d over the sequence,
    its exact importance weight. geometric: the mean of d over the sequence, which does not grow with its length.
    `behaviour_correction` chooses the weight. none: 1. truncate: min(raw, cap) (V-trace, arXiv 1802.01561; for engine mismatch:
    Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"). mask: raw where floor <= raw <= cap,
    else 0 (IcePop, arXiv 2510.18855).
    """
    log_weights = (old - behaviour).detach()
    if algo.behaviour_level == "sequence":
        log_weights = sequences.sum(log_weights)
    elif algo.behaviour_level == "geometric":
        log_weights = sequences.mean(log_weights)
    raw = bounded_exp(log_weights)
    match algo.behaviour_correction:
        case "none":
            return torch.ones_like(raw), raw
        case "truncate":
            return raw.clamp(max=algo.behaviour_cap), raw
        case _:
            return torch.where((raw >= algo.behaviour_floor) & (raw <= algo.behaviour_cap), raw, 0.0), raw


def kl(current: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """An estimate of KL(current || reference) per token [m] (Schulman, "Approximating KL divergence").

    With d = reference - current: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d.
    """
    d = reference - current
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d.square() / 2
    d = d.clamp(max=LARGEST_LOG)  # in both terms: beyond the bound, the second term alone would push the token further away
    return torch.expm1(d) - d
