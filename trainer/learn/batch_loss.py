"""From a batch's rewards and log-probs to the loss of each microbatch: advantages, behaviour weights, then the objective."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from conf.schema import AlgoConfig, RunConfig
from rollout.ledger.records import F32, Batch
from trainer.learn.advantages import Advantage, overlong_penalties
from trainer.learn.algorithm import Algorithm
from trainer.learn.losses import LossInputs
from trainer.learn.objective import behaviour_weights, kl, taught, token_losses
from trainer.learn.packing import Microbatch
from trainer.learn.sequences import Sequences
from trainer.learn.token_figures import TokenFigures, add_mismatch
from trainer.process_groups import Mesh


class BatchLoss:
    """The loss of each microbatch that a rank of the last stage has of a batch."""

    def __init__(
        self,
        batch: Batch,
        microbatches: Sequence[Microbatch],
        *,
        old: Sequence[Tensor | None],
        reference: Sequence[Tensor],
        teacher: Sequence[Tensor],
        config: RunConfig,
        algorithm: Algorithm,
        mesh: Mesh,
        figures: TokenFigures,
    ) -> None:
        """old, reference, teacher: log-probs f32 [m] of each microbatch. old: None if the forward pass of the update gives
        them; reference is [] without a KL, and teacher is [] without a teacher.

        Computes the advantages, because a group's completions may lie in several microbatches, minibatches and ranks. Collective
        over the ranks of the stage.
        """
        self._microbatches, self._old, self._reference, self._teacher = microbatches, old, reference, teacher
        self._version, self._algo, self._policy_loss = batch.step, config.algo, algorithm.policy_loss
        self._mesh, self._figures = mesh, figures
        algo, rewards = config.algo, shaped_rewards(batch, config)
        known = [logprobs for logprobs in old if logprobs is not None]
        if algo.kl_in == "reward":
            divergences = [kl(o, r, algo.kl_estimator) for o, r in zip(known, reference, strict=True)]
            for divergence in divergences:
                figures.add("kl/reference", divergence)
            rewards = rewards - algo.kl_coef * trajectory_sums(microbatches, divergences, len(rewards), mesh)
        self._advantages = algo.reward_weight * batch_advantages(batch, rewards, algorithm.advantage, algo)
        self._teacher_baseline = mean_gap(known, teacher, mesh) if algo.teacher else 0.0

    def __call__(self, number: int, current: Tensor, entropies: Tensor) -> Tensor:
        """Current log-probs and entropies [m] of a microbatch -> losses [m], with gradient by both. Adds to the figures."""
        given = self._old[number]
        old = current.detach() if given is None else given
        add_mismatch(self._figures, self._microbatches[number], old, self._version)
        inputs = self._inputs(number, old)
        losses, figures = token_losses(self._policy_loss, self._algo, current=current, entropies=entropies, inputs=inputs)
        for name, values in figures.items():
            self._figures.add(name, values)
        return losses

    def _inputs(self, number: int, old: Tensor) -> LossInputs:
        microbatch, algo, device = self._microbatches[number], self._algo, self._mesh.device
        sequences = sequences_of(microbatch, self._mesh)
        behaviour = torch.from_numpy(microbatch.behaviour_logprobs).to(device)
        weights, raw = behaviour_weights(old, behaviour, sequences, algo)
        self._figures.add("behaviour/weight_mean", weights)
        self._figures.add_weights(raw)
        advantages = torch.from_numpy(self._advantages[microbatch.trajectories][microbatch.sequences]).to(device)
        if self._teacher:
            teacher = self._teacher[number]
            self._figures.add("kl/teacher", old - teacher)
            advantages = taught(advantages, old, teacher, algo.teacher_weight, self._teacher_baseline)
        return LossInputs(
            old=old,
            behaviour=behaviour,
            behaviour_weights=weights,
            advantages=advantages,
            reference=self._reference[number] if algo.kl_in == "loss" and algo.kl_coef > 0 else None,
            sequences=sequences,
        )


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
