"""What a reward function may return: a finite number, or a number and a dict of further figures."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import isfinite, nan
from numbers import Real
from typing import Any

MOST_PARTS = 32
LONGEST_NAME = 64


class BadReward(ValueError):
    """A function returned what is no reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """What came of one call: a reward, or why there is none."""

    reward: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    cpu_s: float = 0.0
    error: str = ""


def read_returned(returned: Any) -> Returned:
    """Raises BadReward."""
    reward, parts = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    if not isinstance(parts, Mapping) or len(parts) > MOST_PARTS:
        raise BadReward(f"returned parts that are no dict of at most {MOST_PARTS} numbers: {parts!r:.80}")
    for name in parts:
        if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
            raise BadReward(f"returned a part with the name {name!r:.80}")
    return Returned(
        reward=_number(reward, "the reward"), parts={name: _number(value, f"the part {name}") for name, value in parts.items()}
    )


def _number(value: Any, what: str) -> float:
    number = nan
    if isinstance(value, Real) and not isinstance(value, bool):
        with suppress(OverflowError):  # an integer that no float can hold
            number = float(value)
    if not isfinite(number):
        raise BadReward(f"returned {value!r:.80} as {what}, which must be a finite number and no bool")
    return number
