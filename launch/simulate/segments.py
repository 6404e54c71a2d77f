"""The ledger's records without their contents: arrays of the right length, which cost nothing."""

from collections.abc import Sequence
from functools import cache, lru_cache

import numpy as np

from launch.simulate.simulated_engine import Run
from rollout.ledger.ledger import F32, I32, Finish, Prompt, Segment

LONGEST_TOKENS = 1 << 17
_INTS: I32 = np.zeros(LONGEST_TOKENS, np.int32)
_FLOATS: F32 = np.zeros(LONGEST_TOKENS, np.float32)


class SimulatedSegment(Segment):
    """Its arrays are valid by construction and not looked at again: the check costs more than all else that is simulated.
    So is what keeps it frozen while it is made, which it therefore is not."""

    __slots__ = ("runs",)
    __setattr__ = object.__setattr__

    def __init__(self, tokens: I32, logprobs: F32, versions: I32, finish: Finish, engine: str, runs: Sequence[Run]) -> None:
        self.tokens = tokens  # type: ignore[misc]
        self.logprobs = logprobs  # type: ignore[misc]
        self.versions = versions  # type: ignore[misc]
        self.finish = finish  # type: ignore[misc]
        self.engine = engine  # type: ignore[misc]
        self.runs = runs

    def digest(self, _offset: int) -> int:
        return 0  # a simulated segment is never reported twice


def segment(runs: Sequence[Run], finish: Finish, engine: str) -> SimulatedSegment:
    if len(runs) == 1:
        version, n = runs[0]
        versions = _of_version(version)[:n]
    else:
        versions = _of_versions(runs)
        n = len(versions)
    tokens, logprobs = _contents(n)
    return SimulatedSegment(tokens, logprobs, versions, finish, engine, runs)


def prompt(index: int, tokens: int) -> Prompt:
    return Prompt(id=str(index), tokens=_contents(tokens)[0], task={})


@cache
def _contents(n: int) -> tuple[I32, F32]:
    return _INTS[:n], _FLOATS[:n]


@lru_cache(maxsize=8)
def _of_version(version: int) -> I32:
    return np.full(LONGEST_TOKENS, version, np.int32)


def _of_versions(runs: Sequence[Run]) -> I32:
    if not runs:
        return _INTS[:0]
    return np.array([version for version, _ in runs], np.int32).repeat([tokens for _, tokens in runs])
