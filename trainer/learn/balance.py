"""Assigns whole sequences to ranks and microbatches, in pure numpy, with the same result on every rank.

The ranks wait for one another once per minibatch, at its optimizer step. So the sequences are first divided over the ranks such
that all ranks have equal work (`CostModel`). Then each rank divides its sequences into microbatches: all ranks into the same
number, none above the capacity. A microbatch is as long as its sequences, rounded up to what the layout divides.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import numpy.typing as npt

from conf.shapes import Layout, ModelShape

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]


class PackingError(ValueError):
    """A sequence that does not fit into a microbatch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """The cost of a sequence, in units of the matrix products of one token: tokens + pair_cost * tokens^2."""

    pair_cost: float  # cost of one query-key pair, with the causal half counted and softmax left out

    @classmethod
    def of(cls, shape: ModelShape) -> "CostModel":
        """In multiply-adds of the forward pass, a token costs N (the weights of all matrix products), and the causal attention of
        a sequence costs layers x 2 x q_width x tokens^2 / 2 (scores and weighted values). The backward pass doubles both."""
        return cls(pair_cost=shape.layers * shape.q_width / shape.matmul_parameters)

    def __call__(self, lengths: I64) -> F64:
        return lengths + self.pair_cost * np.square(lengths, dtype=np.float64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """How many tokens a microbatch can hold, and which multiples the layout needs."""

    tokens: int  # upper bound, padding included
    sequence_multiple: int = 1  # divides the length of each sequence: context parallelism cuts it into 2 x cp parts
    multiple: int = 1  # divides the length of a microbatch: sequence parallelism cuts a rank's part into tp parts
    count_multiple: int = 1  # divides the number of microbatches: the interleaved schedule runs them in rounds of pp

    @classmethod
    def of(cls, layout: Layout, tokens: int) -> "Capacity":
        """The capacity is rounded down to what the layout divides."""
        multiple = layout.token_multiple
        return cls(
            tokens=tokens // multiple * multiple,
            sequence_multiple=2 * layout.cp if layout.cp > 1 else 1,
            multiple=multiple,
            count_multiple=layout.pp if layout.vpp > 1 else 1,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """The sequences of one minibatch, divided over ranks and microbatches."""

    members: Sequence[Sequence[Sequence[int]]]  # [dp][n] indices of the sequences in each microbatch; n is the same for all ranks
    tokens: I64  # [dp, n], padding included
    padding: I64  # [dp, n], padding among these tokens
    costs: F64  # [dp, n]


def balance(lengths: I64, *, capacity: Capacity, dp: int, cost: CostModel) -> Balance:
    """Divides sequences of `lengths` [n], n >= 1. Raises PackingError if one is longer than a microbatch may be."""
    padded = _rounded_up(lengths, capacity.sequence_multiple)
    if (longest := int(padded.max())) > capacity.tokens:
        raise PackingError(
            f"a trajectory of {int(lengths.max())} tokens ({longest} when padded for the layout) does not fit a microbatch of "
            f"{capacity.tokens} (trainer.tokens_per_microbatch, rounded down to what the layout divides)"
        )
    costs = cost(padded)
    ranks = _least_loaded(costs, dp)
    fullest = max(int(padded[share].sum()) for share in ranks)
    fewest = _rounded_up(max(1, -(-fullest // capacity.tokens)), capacity.count_multiple)
    for microbatches in count(fewest, capacity.count_multiple):
        dealt = [_filled(share, padded, costs, microbatches, capacity.tokens) for share in ranks]
        members = [bins for bins in dealt if bins is not None]
        if len(members) == dp:
            return _measured(members, lengths, padded, capacity, cost)
    raise AssertionError  # unreachable: with a microbatch for each sequence all fit


def _rounded_up(value, multiple: int):
    return -(-value // multiple) * multiple


def _least_loaded(costs: F64, ranks: int) -> list[list[int]]:
    """The most expensive first, each to the rank with the least cost so far (Graham's longest processing time)."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    heap = [(0.0, rank) for rank in range(ranks)]
    for i in np.argsort(-costs, kind="stable").tolist():
        load, rank = heap[0]
        shares[rank].append(i)
        heapq.heapreplace(heap, (load + float(costs[i]), rank))
    return shares


def _filled(share: Sequence[int], padded: I64, costs: F64, microbatches: int, capacity: int) -> list[list[int]] | None:
    """Puts each sequence of a rank, the most expensive first, into the cheapest microbatch with room; None if none has room."""
    bins: list[list[int]] = [[] for _ in range(microbatches)]
    room, loads = [capacity] * microbatches, [0.0] * microbatches
    for i in share:
        size = int(padded[i])
        fitting = [b for b in range(microbatches) if room[b] >= size]
        if not fitting:
            return None
        cheapest = min(fitting, key=loads.__getitem__)
        bins[cheapest].append(i)
        room[cheapest] -= size
        loads[cheapest] += float(costs[i])
    return bins


def _measured(members: list[list[list[int]]], lengths: I64, padded: I64, capacity: Capacity, cost: CostModel) -> Balance:
    """Padding after the last sequence of a microbatch is a sequence of its own. An empty microbatch holds only padding."""
    used = np.array([[padded[bin_].sum() for bin_ in rank] for rank in members], dtype=np.int64)
    real = np.array([[lengths[bin_].sum() for bin_ in rank] for rank in members], dtype=np.int64)
    tokens = np.maximum(_rounded_up(used, capacity.multiple), capacity.multiple)
    costs = np.array([[cost(padded[bin_]).sum() for bin_ in rank] for rank in members]) + cost(tokens - used)
    return Balance(members=members, tokens=tokens, padding=tokens - real, costs=costs)
