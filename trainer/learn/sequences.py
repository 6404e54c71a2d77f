"""Sums and means over whole sequences, whose tokens may lie on several context-parallel ranks."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn.functional import all_reduce


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """Which sequence each of m tokens belongs to."""

    index: Tensor  # i64 [m], the number of each token's sequence
    count: int  # number of sequences
    group: dist.ProcessGroup | None = None  # the context-parallel ranks, which hold the other tokens of the same sequences

    def sum(self, values: Tensor) -> Tensor:
        """[m] -> [m]: at each token the sum over its sequence. Gradients pass through; the sum is taken in float64."""
        sums = values.new_zeros(self.count, dtype=torch.float64).index_add(0, self.index, values.double())
        if self.group is not None and self.group.size() > 1:
            sums = all_reduce(sums, group=self.group)
        return sums.index_select(0, self.index).to(values.dtype)

    def mean(self, values: Tensor) -> Tensor:
        """[m] -> [m]: at each token the mean over its sequence's sampled tokens."""
        return self.sum(values) / self.sum(torch.ones_like(values))
