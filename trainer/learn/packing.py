"""Packs trajectories into microbatches, in pure numpy, with the same result on every rank.

A step's trajectories are divided into minibatches; `balance` decides which rank trains on which of them, in which
microbatch. A rank builds its own microbatches only. The token shift (position t predicts token t + 1) happens only here.

With context parallelism, a sequence of length L = 2 cp c is cut into 2 cp chunks of c tokens. Rank r holds chunks r and
2 cp - 1 - r, an early and a late one, so that all ranks have equal work in attention. A `Microbatch` is the part of one rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rollout.ledger.records import F32, I32, Trajectory
from trainer.learn.balance import I64, Balance, Capacity, CostModel, balance


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """One forward/backward: T packed tokens, T / cp of them on this rank, m of which predict a sampled token."""

    tokens: I64  # [T / cp]
    positions: I64  # [T / cp], counted from 0 in each sequence
    boundaries: I32  # [k + 1], 0 = first < … < last = T: starts of the whole sequences; the last may be padding
    rows: I64  # [m], indices into `tokens` of those whose next token was sampled
    targets: I64  # [m], that next token
    sequences: I64  # [m], the sequence of each row, from 0
    trajectories: I64  # [sequences without padding], index in the batch of each sequence's trajectory
    behaviour_logprobs: F32  # [m]
    teacher_logprobs: F32  # [m], as the teacher's server reported them; zeros if no teacher was asked
    versions: I32  # [m]
    weights: F32  # [m], the weight of each token in the minibatch's loss

    def on_context_rank(self, cp: int, rank: int) -> "Microbatch":
        """The part of context-parallel rank `rank` of `cp`. The length of every sequence is a multiple of 2 cp."""
        if cp == 1:
            return self
        held = held_positions(self.boundaries, cp, rank)
        place = np.full(len(self.tokens), -1, dtype=np.int64)
        place[held] = np.arange(len(held))
        mine = place[self.rows] >= 0
        return replace(
            self,
            tokens=self.tokens[held],
            positions=self.positions[held],
            rows=place[self.rows[mine]],
            targets=self.targets[mine],
            sequences=self.sequences[mine],
            behaviour_logprobs=self.behaviour_logprobs[mine],
            teacher_logprobs=self.teacher_logprobs[mine],
            versions=self.versions[mine],
            weights=self.weights[mine],
        )


def held_positions(boundaries: npt.NDArray[np.integer], cp: int, rank: int) -> I64:
    """[T / cp], the positions in the whole microbatch that context-parallel rank `rank` holds, in the order of that rank."""
    chunks = [
        start + number * chunk + np.arange(chunk)
        for start, chunk in zip(boundaries[:-1].astype(np.int64), np.diff(boundaries) // (2 * cp), strict=True)
        for number in (rank, 2 * cp - 1 - rank)
    ]
    return np.concatenate(chunks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Minibatch:
    """The trajectories of one optimizer step, divided over the data-parallel ranks. All have equally many microbatches."""

    trajectories: Sequence[Trajectory]
    weights: F32  # [trajectories], weight in the loss of each sampled token of the trajectory
    numbers: I64  # [trajectories], index in the batch
    balance: Balance
    sequence_multiple: int

    def microbatches(self, dp_rank: int, *, cp: int = 1, cp_rank: int = 0) -> list[Microbatch]:
        """The microbatches of one rank."""
        tokens = self.balance.tokens[dp_rank].tolist()
        return [
            self._pack(members, size).on_context_rank(cp, cp_rank)
            for members, size in zip(self.balance.members[dp_rank], tokens, strict=True)
        ]

    def _pack(self, members: Sequence[int], size: int) -> Microbatch:
        """Lays the sequences one after another, each padded to its multiple, then a padding sequence up to `size` tokens."""
        tokens, positions = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
        boundaries = [0]
        for i in members:
            length = len(self.trajectories[i].tokens)
            start, end = boundaries[-1], boundaries[-1] + -(-length // self.sequence_multiple) * self.sequence_multiple
            tokens[start : start + length] = self.trajectories[i].tokens
            positions[start:end] = np.arange(end - start)
            boundaries.append(end)
        sampled = [np.flatnonzero(self.trajectories[i].sampled) for i in members]
        counts = [len(chosen) for chosen in sampled]
        if (used := boundaries[-1]) < size:
            positions[used:] = np.arange(size - used)
            boundaries.append(size)
        return Microbatch(
            tokens=tokens,
            positions=positions,
            boundaries=np.array(boundaries, dtype=np.int32),
            rows=_join([start + chosen - 1 for start, chosen in zip(boundaries, sampled, strict=False)], np.int64),
            targets=_join([self.trajectories[i].tokens[chosen] for i, chosen in zip(members, sampled, strict=True)], np.int64),
            sequences=np.repeat(np.arange(len(members)), counts),
            trajectories=self.numbers[list(members)].astype(np.int64),
            behaviour_logprobs=_join(
                [self.trajectories[i].logprobs[chosen] for i, chosen in zip(members, sampled, strict=True)], np.float32
            ),
            teacher_logprobs=_join(
                [_of_teacher(self.trajectories[i])[chosen] for i, chosen in zip(members, sampled, strict=True)], np.float32
            ),
            versions=_join([self.trajectories[i].versions[chosen] for i, chosen in zip(members, sampled, strict=True)], np.int32),
            weights=np.repeat(self.weights[list(members)], counts).astype(np.float32),
        )


def deal(count: int, minibatches: int, seed: int) -> list[npt.NDArray[np.int64]]:
    """A random permutation of `count` trajectories in `minibatches` equal parts."""
    return np.array_split(np.random.default_rng(seed).permutation(count), minibatches)


def pack_minibatch(
    trajectories: Sequence[Trajectory], weights: F32, numbers: I64, *, capacity: Capacity, dp: int, cost: CostModel
) -> Minibatch:
    """trajectories [n] -> microbatches for `dp` ranks. Raises PackingError when one is too long.

    weights [n]: the weight in the loss of each sampled token of a trajectory. numbers [n]: the trajectory's index in the batch.
    """
    lengths = np.array([len(t.tokens) for t in trajectories], dtype=np.int64)
    return Minibatch(
        trajectories=trajectories,
        weights=weights,
        numbers=numbers,
        balance=balance(lengths, capacity=capacity, dp=dp, cost=cost),
        sequence_multiple=capacity.sequence_multiple,
    )


def _of_teacher(trajectory: Trajectory) -> F32:
    return trajectory.teacher if len(trajectory.teacher) else np.zeros_like(trajectory.logprobs)


def _join(parts: Sequence[npt.NDArray], dtype: type[np.generic]) -> npt.NDArray:
    return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype=dtype)
