"""The ledger's records without their contents: arrays of the right length, which cost nothing."""

from collections.abc import Sequence
from functools import cache, lru_cache

import numpy as np

from launch.simulate.engine import Run
from rollout.ledger import F32, I32, Finish, Prompt, Segment

LONGEST_TOKENS = 1 << 17
_INTS: I32 = np.zeros(LONGEST_TOKENS, np.int32)
_FLOATS: F32 = np.zeros(LONGEST_TOKENS, np.float32)


class SimulatedSegment(Segment):
    """Its arrays are valid by construction and not looked at again: the check costs more than all else that is simulated.
    So it is not made by its constructor, but field by field."""

    __slots__ = ("runs",)
    runs: Sequence[Run]


_new = object.__new__
_set_tokens, _set_logprobs, _set_versions, _set_finish, _set_engine, _set_runs = (
    getattr(SimulatedSegment, name).__set__ for name in ("tokens", "logprobs", "versions", "finish", "engine", "runs")
)


def segment(runs: Sequence[Run], finish: Finish, engine: str) -> SimulatedSegment:
    if len(runs) == 1:
        version, n = runs[0]
        versions = _of_version(version)[:n]
    else:
        versions = _of_versions(runs)
        n = len(versions)
    tokens, logprobs = _contents(n)
    made = _new(SimulatedSegment)
    _set_tokens(made, tokens)
    _set_logprobs(made, logprobs)
    _set_versions(made, versions)
    _set_finish(made, finish)
    _set_engine(made, engine)
    _set_runs(made, runs)
    return made


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
