"""From trajectories to microbatches: pure numpy, the same result on every rank.

The trajectories of a step are dealt into minibatches, and those of a minibatch packed, whole, into microbatches of exactly
`tokens_per_microbatch` tokens. The token shift (position t predicts token t + 1) happens here and nowhere else.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollout.types import F32, I32, Trajectory

I64 = npt.NDArray[np.int64]


class PackingError(ValueError):
    """Trajectories that no packing can hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """One forward/backward: T packed tokens, m of whose positions predict a sampled token."""

    tokens: I64  # [T]
    positions: I64  # [T], from 0 in each sequence
    boundaries: (
        I32  # [k + 1], 0 = first < … < last = T: sequence i is tokens[boundaries[i]:boundaries[i + 1]], the last may be padding
    )
    rows: I64  # [m], the positions whose next token was sampled
    targets: I64  # [m], that next token
    sequences: I64  # [m], the sequence of each row, counted from 0
    trajectories: I64  # [sequences without padding], the number in the batch of the trajectory that each is
    behaviour_logprobs: F32  # [m]
    versions: I32  # [m]
    weights: F32  # [m], share of each token in the minibatch's loss
    padding: int  # tokens at the end that belong to no trajectory

    @property
    def sampled_tokens(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class Minibatch:
    """What one optimizer step trains on, dealt over the data-parallel ranks: each has as many microbatches as the others."""

    microbatches: Sequence[Sequence[Microbatch]]  # [dp][n]
    trajectories: int
    sampled_tokens: int


def deal(count: int, minibatches: int, seed: int) -> list[npt.NDArray[np.int64]]:
    """A permutation of `count` trajectories in `minibatches` equal parts."""
    return np.array_split(np.random.default_rng(seed).permutation(count), minibatches)


def pack_minibatch(
    trajectories: Sequence[Trajectory],
    weights: F32,
    numbers: I64,
    *,
    tokens_per_microbatch: int,
    dp: int,
    pad_token: int = 0,
) -> Minibatch:
    """trajectories [n] -> microbatches for `dp` ranks. Raises PackingError when one is too long.

    weights [n]: the weight in the loss of each sampled token of a trajectory. numbers [n]: a trajectory's place in the batch.
    """
    lengths = np.array([len(t.tokens) for t in trajectories])
    if lengths.max() > tokens_per_microbatch:
        raise PackingError(f"a trajectory of {lengths.max()} tokens does not fit tokens_per_microbatch={tokens_per_microbatch}")
    sampled = np.array([t.completion_tokens for t in trajectories])
    bins = balanced_bins(lengths, capacity=tokens_per_microbatch, multiple_of=dp)
    packed = [
        _pack([(trajectories[i], float(weights[i]), int(numbers[i])) for i in members], tokens_per_microbatch, pad_token)
        for members in bins
    ]
    return Minibatch(
        microbatches=[packed[rank::dp] for rank in range(dp)], trajectories=len(trajectories), sampled_tokens=int(sampled.sum())
    )


def balanced_bins(lengths: npt.NDArray[np.int64], *, capacity: int, multiple_of: int) -> list[list[int]]:
    """Indices of `lengths` in as few bins of `capacity` as fit, a multiple of `multiple_of`; none is left out.

    Longest first into the emptiest bin, which balances; where that fails, one more round of bins is opened.
    """
    order = np.argsort(-lengths, kind="stable")
    count = -(-int(lengths.sum()) // capacity)
    count = max(1, -(-count // multiple_of)) * multiple_of
    while True:
        bins: list[list[int]] = [[] for _ in range(count)]
        loads = np.zeros(count, dtype=np.int64)
        for i in order:
            emptiest = int(loads.argmin())
            if loads[emptiest] + lengths[i] > capacity:
                break
            bins[emptiest].append(int(i))
            loads[emptiest] += lengths[i]
        else:
            return bins
        count += multiple_of


def _pack(members: Sequence[tuple[Trajectory, float, int]], capacity: int, pad_token: int) -> Microbatch:
    lengths = [len(t.tokens) for t, _, _ in members]
    used = sum(lengths)
    starts = np.cumsum([0, *lengths])
    padding = capacity - used
    tokens = np.full(capacity, pad_token, dtype=np.int64)
    positions = np.zeros(capacity, dtype=np.int64)
    positions[used:] = np.arange(padding)
    rows, targets, sequences, logprobs, versions, weights = [], [], [], [], [], []
    for sequence, ((trajectory, weight, _), start, length) in enumerate(zip(members, starts, lengths, strict=False)):
        tokens[start : start + length] = trajectory.tokens
        positions[start : start + length] = np.arange(length)
        chosen = np.flatnonzero(trajectory.sampled)
        rows.append(start + chosen - 1)
        targets.append(trajectory.tokens[chosen])
        sequences.append(np.full(len(chosen), sequence))
        logprobs.append(trajectory.logprobs[chosen])
        versions.append(trajectory.versions[chosen])
        weights.append(np.full(len(chosen), weight))
    boundaries = [*starts, capacity] if padding else list(starts)
    return Microbatch(
        tokens=tokens,
        positions=positions,
        boundaries=np.array(boundaries, dtype=np.int32),
        rows=_join(rows, np.int64),
        targets=_join(targets, np.int64),
        sequences=_join(sequences, np.int64),
        trajectories=np.array([number for _, _, number in members], dtype=np.int64),
        behaviour_logprobs=_join(logprobs, np.float32),
        versions=_join(versions, np.int32),
        weights=_join(weights, np.float32),
        padding=padding,
    )


def _join(parts: Sequence[npt.NDArray], dtype: type[np.generic]) -> npt.NDArray:
    return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype=dtype)
