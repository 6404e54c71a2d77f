"""What each microbatch learns from: its behaviour weights and advantages, made once the old and reference log-probs are known.

Both are whole before the first update: a group's completions may lie in several microbatches, minibatches and ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from conf.schema import RunConfig
from rollout.ledger.records import F32, Batch
from trainer.learn.advantages import group_advantages, overlong_penalties
from trainer.learn.metrics import TokenFigures
from trainer.learn.objective import Correction, Sequences, behaviour_weights, kl
from trainer.learn.packing import Microbatch
from trainer.process_groups import Mesh


@dataclass(frozen=True, kw_only=True, slots=True)
class Signal:
    """What the loss of a microbatch needs beside the current log-probs: [m] each, on the device of a last stage."""

    old: Tensor
    reference: Tensor | None  # where a KL is part of the loss
    behaviour_weights: Tensor
    advantages: Tensor
    sequences: Sequences


def make_signals(
    batch: Batch,
    microbatches: Sequence[Microbatch],
    old: Sequence[Tensor],
    reference: Sequence[Tensor],
    config: RunConfig,
    mesh: Mesh,
    figures: TokenFigures,
) -> list[Signal]:
    """A signal for each of this rank's microbatches; [] on the earlier pipeline stages, which have no log-probs.

    old, reference: log-probs of each microbatch; reference is [] where no KL is asked for. Collective over the ranks of a stage.
    """
    if not mesh.is_last_stage:
        return []
    algo = config.algo
    rewards = shaped_rewards(batch, config)
    if algo.kl_in == "reward":
        divergences = [kl(o, r, algo.kl_estimator) for o, r in zip(old, reference, strict=True)]
        for divergence in divergences:
            figures.add("kl/reference", divergence)
        rewards = rewards - algo.kl_coef * trajectory_sums(microbatches, divergences, len(rewards), mesh)
    advantages = batch_advantages(batch, rewards.astype(np.float32), algo.advantage, algo.advantage_eps)
    in_loss = list(reference) if algo.kl_in == "loss" and reference else [None] * len(microbatches)
    correction = Correction(
        kind=algo.behaviour_correction, level=algo.behaviour_level, cap=algo.behaviour_cap, floor=algo.behaviour_floor
    )
    signals = []
    for microbatch, old_logprobs, reference_logprobs in zip(microbatches, old, in_loss, strict=True):
        sequences = sequences_of(microbatch, mesh)
        behaviour = torch.from_numpy(microbatch.behaviour_logprobs).to(mesh.device)
        weights, raw = behaviour_weights(old_logprobs, behaviour, sequences, correction)
        figures.add("behaviour/weight_mean", weights)
        figures.add_weights(raw)
        signals.append(
            Signal(
                old=old_logprobs,
                reference=reference_logprobs,
                behaviour_weights=weights,
                advantages=torch.from_numpy(advantages[microbatch.trajectories][microbatch.sequences]).to(mesh.device),
                sequences=sequences,
            )
        )
    return signals


def shaped_rewards(batch: Batch, config: RunConfig) -> F32:
    """The rewards of the batch's trajectories [n], less what is taken off overlong ones."""
    trajectories = batch.trajectories
    lengths = np.array([t.completion_tokens for t in trajectories])
    algo, longest = config.algo, config.rollout.max_completion_tokens
    penalties = overlong_penalties(lengths, longest, algo.overlong_buffer_fraction, algo.overlong_penalty)
    return np.array([t.reward for t in trajectories], dtype=np.float32) - penalties


def batch_advantages(batch: Batch, rewards: F32, kind: str, eps: float) -> F32:
    """rewards [n] of the batch's trajectories -> advantages [n], each group on its own."""
    ends = np.cumsum([len(group.trajectories) for group in batch.groups])[:-1]
    return np.concatenate([group_advantages(part, kind, eps) for part in np.split(rewards, ends)])


def trajectory_sums(microbatches: Sequence[Microbatch], values: Sequence[Tensor], count: int, mesh: Mesh) -> F32:
    """A value a token [m] in each microbatch -> its sum over each of the batch's `count` trajectories, over all ranks' tokens."""
    sums = torch.zeros(count, dtype=torch.float64, device=mesh.device)
    for microbatch, of_tokens in zip(microbatches, values, strict=True):
        numbers = torch.from_numpy(microbatch.trajectories[microbatch.sequences]).to(mesh.device)
        sums.index_add_(0, numbers, of_tokens.double())
    dist.all_reduce(sums, group=mesh.dp_cp_group)
    return sums.cpu().numpy().astype(np.float32)


def sequences_of(microbatch: Microbatch, mesh: Mesh) -> Sequences:
    return Sequences(
        index=torch.from_numpy(microbatch.sequences).to(mesh.device), count=len(microbatch.trajectories), group=mesh.cp_group
    )
