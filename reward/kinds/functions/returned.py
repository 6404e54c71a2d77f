"""What a user's code may return. A reward function: a finite number, or a number and a dict of further figures. An environment
also text or messages, for another turn."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import isfinite, nan
from numbers import Real
from typing import Any

MOST_PARTS = 32
LONGEST_NAME = 64
MOST_CHARACTERS = 1 << 18  # an environment's messages after one turn are no longer than this together


class BadReward(ValueError):
    """A function returned what is no reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """What came of one call: a reward, or why there is none."""

    reward: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    cpu_s: float = 0.0
    error: str = ""
    messages: Sequence[Mapping[str, Any]] | None = None  # an environment's answer, after which the model takes another turn
    replayed: Sequence[Sequence[Mapping[str, Any]]] = ()  # its answers to earlier turns: to the last one, or to all if it is new
    lost: bool = False  # the state of an episode is not here and cannot be rebuilt


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


def read_answer(returned: Any) -> Returned:
    """An environment's answer: a reward, or messages; text is the message of a user. Raises BadReward."""
    said, parts = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    if isinstance(said, str):
        said = [{"role": "user", "content": said}]
    if not isinstance(said, list):
        return read_returned(returned)
    for message in said:
        if not isinstance(message, dict) or not all(isinstance(message.get(name), str) for name in ("role", "content")):
            raise BadReward(f"returned a message that is no dict with the strings role and content: {message!r:.80}")
    if not said or (characters := sum(len(message["content"]) for message in said)) > MOST_CHARACTERS:
        raise BadReward(
            f"returned messages of {characters} characters, more than {MOST_CHARACTERS}" if said else "returned no message"
        )
    return replace(read_returned((0.0, parts)), messages=said)


def _number(value: Any, what: str) -> float:
    number = nan
    if isinstance(value, Real) and not isinstance(value, bool):
        with suppress(OverflowError):  # an integer that no float can hold
            number = float(value)
    if not isfinite(number):
        raise BadReward(f"returned {value!r:.80} as {what}, which must be a finite number and no bool")
    return number
