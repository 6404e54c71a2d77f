"""What each microbatch's loss is computed from: advantages and behaviour weights, once old and reference log-probs are known.

Both are complete before the first update, because a group's completions may lie in several microbatches, minibatches and ranks.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from conf.schema import AlgoConfig, RunConfig
from rollout.ledger.records import F32, Batch
from trainer.learn.advantages import Advantage, overlong_penalties
from trainer.learn.losses import LossInputs
from trainer.learn.objective import behaviour_weights, kl, taught
from trainer.learn.packing import Microbatch
from trainer.learn.sequences import Sequences
from trainer.learn.token_figures import TokenFigures
from trainer.process_groups import Mesh


def make_loss_inputs(
    batch: Batch,
    microbatches: Sequence[Microbatch],
    old: Sequence[Tensor],
    reference: Sequence[Tensor],
    teacher: Sequence[Tensor],
    config: RunConfig,
    advantage: Advantage,
    mesh: Mesh,
    figures: TokenFigures,
) -> list[LossInputs]:
    """One for each of this rank's microbatches; [] on the earlier pipeline stages, which have no log-probs.

    old, reference, teacher: the log-probs of each microbatch; reference is [] without a KL, teacher is [] without a teacher.
    Collective over the ranks of a stage.
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
    advantages = algo.reward_weight * batch_advantages(batch, rewards, advantage, algo)
    in_loss = list(reference) if algo.kl_in == "loss" and algo.kl_coef > 0 else [None] * len(microbatches)
    teachers: list[Tensor | None] = [*teacher] if teacher else [None] * len(microbatches)
    baseline = mean_gap(old, teacher, mesh) if algo.teacher else 0.0
    made = []
    for microbatch, old_logprobs, reference_logprobs, teacher_logprobs in zip(microbatches, old, in_loss, teachers, strict=True):
        sequences = sequences_of(microbatch, mesh)
        behaviour = torch.from_numpy(microbatch.behaviour_logprobs).to(mesh.device)
        weights, raw = behaviour_weights(old_logprobs, behaviour, sequences, algo)
        figures.add("behaviour/weight_mean", weights)
        figures.add_weights(raw)
        token_advantages = torch.from_numpy(advantages[microbatch.trajectories][microbatch.sequences]).to(mesh.device)
        if teacher_logprobs is not None:
            figures.add("kl/teacher", old_logprobs - teacher_logprobs)
            token_advantages = taught(token_advantages, old_logprobs, teacher_logprobs, algo.teacher_weight, baseline)
        inputs = LossInputs(
            old=old_logprobs,
            behaviour=behaviour,
            behaviour_weights=weights,
            advantages=token_advantages,
            reference=reference_logprobs,
            sequences=sequences,
        )
        made.append(inputs)
    return made


def mean_gap(old: Sequence[Tensor], teacher: Sequence[Tensor], mesh: Mesh) -> Tensor:
    """The mean of old - teacher over all tokens of the batch."""
    total = torch.zeros(2, dtype=torch.float64, device=mesh.device)  # the sum, and the tokens
    for old_logprobs, teacher_logprobs in zip(old, teacher, strict=True):
        total[0] += (old_logprobs - teacher_logprobs).sum()
        total[1] += len(old_logprobs)
    dist.all_reduce(total, group=mesh.dp_cp_group)
    return (total[0] / total[1]).float()


def shaped_rewards(batch: Batch, config: RunConfig) -> F32:
    """The rewards of the batch's trajectories [n], less the penalties for overlong ones."""
    trajectories = batch.trajectories
    lengths = np.array([t.completion_tokens for t in trajectories])
    algo, longest = config.algo, config.rollout.max_completion_tokens
    penalties = overlong_penalties(lengths, longest, algo.overlong_buffer_fraction, algo.overlong_penalty)
    return np.array([t.reward for t in trajectories], dtype=np.float32) - penalties


def batch_advantages(batch: Batch, rewards: F32, advantage: Advantage, algo: AlgoConfig) -> F32:
    """The rewards of the batch's trajectories [n] -> their advantages [n], each group by itself."""
    ends = np.cumsum([len(group.trajectories) for group in batch.groups])[:-1]
    parts = zip(np.split(rewards.astype(np.float64), ends), batch.groups, strict=True)
    return np.concatenate([advantage(part, group, algo) for part, group in parts]).astype(np.float32)


def trajectory_sums(microbatches: Sequence[Microbatch], values: Sequence[Tensor], count: int, mesh: Mesh) -> F32:
    """One value per token [m] of each microbatch -> its sum over each of the batch's `count` trajectories, on all ranks."""
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
