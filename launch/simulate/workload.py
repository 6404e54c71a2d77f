"""What a simulated run generates and grades. The work of a group depends on its index alone, so every system gets the same."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import exp, sqrt
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from conf.schema import ConfigError
from launch.plan.inputs import LengthDistribution

BLOCK_GROUPS = 512
BLOCKS_KEPT = 64
PROMPT_SIGMA = 0.5


class GroupWork(NamedTuple):
    prompt_tokens: int
    completion_tokens: Sequence[int]  # [G]
    grading_s: Sequence[float]  # [G]
    passes: Sequence[bool]  # [G]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Log-normal lengths, cut at their caps; means are those after the cut."""

    completions_per_group: int
    prompt_mean_tokens: float
    prompt_cap_tokens: int
    completion_mean_tokens: float
    completion_cap_tokens: int
    completion_sigma: float = 1.0  # sigma of the log-lengths; at 1 the 99th percentile is ten medians
    group_correlation: float = 0.5  # share of the variance of log-lengths that lies between prompts
    grading_mean_s: float = 8.0
    grading_sigma: float = 0.8
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.prompt_mean_tokens < self.prompt_cap_tokens:
            raise ConfigError(
                f"plan.prompt_tokens={self.prompt_mean_tokens:g}: must lie between 0 and data.max_prompt_tokens="
                f"{self.prompt_cap_tokens}, the longest prompt"
            )
        if not 0 <= self.group_correlation <= 1:
            raise ConfigError(f"simulate.group_correlation={self.group_correlation:g}: a share, so between 0 and 1")
        _median(self.completion_mean_tokens, self.completion_cap_tokens, self.completion_sigma)

    def stream(self) -> "Stream":
        return Stream(self)


class Stream(dict[int, GroupWork]):
    """The work of each group by its index, made when it is first asked for."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self._workload = workload

    def __missing__(self, index: int) -> GroupWork:
        number = index // BLOCK_GROUPS
        self.update(zip(_indices(number), _block(self._workload, number), strict=True))
        for forgotten in _indices(number - BLOCKS_KEPT):  # if one is asked for again, it is made again
            self.pop(forgotten, None)
        return self[index]


def _indices(number: int) -> range:
    return range(number * BLOCK_GROUPS, (number + 1) * BLOCK_GROUPS)


def _block(workload: Workload, number: int) -> list[GroupWork]:
    """Many groups at once, for speed."""
    shape = (BLOCK_GROUPS, workload.completions_per_group)
    rng = np.random.default_rng((workload.seed, number))
    between, within = rng.standard_normal((BLOCK_GROUPS, 1)), rng.standard_normal(shape)
    z = between * sqrt(workload.group_correlation) + within * sqrt(1 - workload.group_correlation)
    completions = _lengths(z, workload.completion_mean_tokens, workload.completion_cap_tokens, workload.completion_sigma)
    normal = rng.standard_normal(BLOCK_GROUPS)
    prompts = _lengths(normal, workload.prompt_mean_tokens, workload.prompt_cap_tokens, PROMPT_SIGMA)
    sigma = workload.grading_sigma
    grading_s = workload.grading_mean_s * np.exp(sigma * rng.standard_normal(shape) - sigma**2 / 2)
    passes = rng.random(shape) < rng.random((BLOCK_GROUPS, 1))
    columns = (prompts.tolist(), completions.tolist(), grading_s.tolist(), passes.tolist())
    return [GroupWork(*row) for row in zip(*columns, strict=True)]


def _lengths(z: npt.NDArray[np.float64], mean: float, cap: int, sigma: float) -> npt.NDArray[np.int64]:
    tokens = np.rint(_median(mean, cap, sigma) * np.exp(sigma * z)).astype(np.int64)
    return np.clip(tokens, 1, cap)


@cache
def _median(mean: float, cap: int, sigma: float) -> float:
    return exp(LengthDistribution(mean_tokens=mean, cap_tokens=cap, sigma=sigma).mu)
