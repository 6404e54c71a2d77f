"""Figures over the sampled tokens of a step: means, and the distribution of the behaviour weights, over all ranks."""

import math

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trainer.learn.packing import Microbatch
from trainer.process_groups import Mesh, gather_texts


class TokenFigures:
    """Adds up values per token on the ranks that compute log-probs; `reduce` returns the same figures on every rank."""

    BINS, WIDEST_LOG = 4000, 20.0  # the weights' histogram goes from e^-20 to e^20, with bins 1% wide

    def __init__(self, mesh: Mesh) -> None:
        self._is_counted = mesh.tp_rank == 0  # the tensor-parallel ranks see the same tokens
        self._device = mesh.device
        self._sums: dict[str, Tensor] = {}  # name -> sum and count of its values
        self._weights = self._zeros(3)  # count, sum, sum of squares
        self._histogram = self._zeros(self.BINS)
        self._largest = self._zeros()

    def add(self, name: str, values: Tensor) -> None:
        """values [m], one per token; their mean over all ranks becomes the figure. Does not wait for the device."""
        if self._is_counted:
            row = self._sums.setdefault(name, self._zeros(2))
            row[0] += values.sum(dtype=torch.float64)
            row[1] += values.numel()

    def add_weights(self, weights: Tensor) -> None:
        """weights [m]: the raw behaviour weight of each token, between e^-20 and e^20."""
        if self._is_counted and len(weights):
            exact = weights.double()
            self._weights += torch.stack([torch.ones_like(exact).sum(), exact.sum(), exact.square().sum()])
            places = ((exact.log() / self.WIDEST_LOG + 1) / 2 * self.BINS).long().clamp(0, self.BINS - 1)
            self._histogram.index_add_(0, places, torch.ones_like(exact))
            self._largest = torch.maximum(self._largest, exact.max())

    def reduce(self) -> dict[str, float]:
        """A figure without any token is left out. Collective over all ranks."""
        # Ranks know different names: earlier pipeline stages none, and a lag may occur on one rank alone.
        told = gather_texts("\n".join(self._sums), device=self._device)
        names = sorted({name for text in told for name in text.split("\n") if name})
        sums = torch.stack([self._sums.get(name, self._zeros(2)) for name in names]) if names else self._zeros(0, 2)
        for tensor in (sums, self._weights, self._histogram):
            dist.all_reduce(tensor)
        dist.all_reduce(self._largest, op=dist.ReduceOp.MAX)
        means = {name: total / count for name, (total, count) in zip(names, sums.tolist(), strict=True) if count}
        return means | self._weight_figures()

    def _weight_figures(self) -> dict[str, float]:
        """behaviour/ess_fraction = (sum w)^2 / (n sum w^2); behaviour/weight_p99, to 1%; behaviour/weight_max."""
        count, total, squares = self._weights.tolist()
        if not count:
            return {}
        place = int((self._histogram.cumsum(0) < 0.99 * count).sum())
        upper_edge = math.exp(((place + 1) / self.BINS * 2 - 1) * self.WIDEST_LOG)
        largest = self._largest.item()
        return {
            "behaviour/ess_fraction": total**2 / (count * squares),
            "behaviour/weight_p99": min(largest, upper_edge),
            "behaviour/weight_max": largest,
        }

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=self._device)


def add_mismatch(figures: TokenFigures, microbatch: Microbatch, old: Tensor, version: int) -> None:
    """|old - behaviour| per token, of all tokens and by lag. At lag 0 it is the mismatch of engine and trainer alone."""
    difference = (old - torch.from_numpy(microbatch.behaviour_logprobs).to(old.device)).abs()
    figures.add("mismatch/abs_logprob", difference)
    lags = version - microbatch.versions
    for lag in np.unique(lags).tolist():
        name = "mismatch/same_version_abs_logprob" if lag == 0 else f"mismatch/lag_{lag}_abs_logprob"
        figures.add(name, difference[torch.from_numpy(lags == lag).to(difference.device)])
