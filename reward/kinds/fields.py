"""Reading the fields of a task. Each function raises TaskError with the place of what is wrong."""

from collections.abc import Mapping
from typing import Any

from reward.kinds.kind import TaskError


def refuse_unknown(data: Mapping[str, Any], *known: str) -> None:
    fields = {"kind", *known}
    if unknown := sorted(set(data) - fields):
        raise TaskError(f"task.{unknown[0]}: no such field in a {data['kind']!r} task: it has {', '.join(sorted(fields))}")


def read_text(value: object, where: str) -> str:
    """A string that a program can read or print."""
    if not isinstance(value, str):
        raise TaskError(f"{where}: must be a string, got {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = f"half of a surrogate pair at position {error.start}"
        raise TaskError(f"{where}: holds {half}, which is no character: mend the text") from None
    return value


MOST = 1e9  # for any limit: no run takes so many seconds, and no host has so many MiB


def read_positive(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MOST:
        raise TaskError(f"task.{name}: must be a number above 0, got {value!r:.50} (at most {MOST:g})")
    return float(value)


def read_count(value: object, name: str, *, at_least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise TaskError(f"task.{name}: must be a whole number of at least {at_least}, got {value!r:.80}")
    return value


def read_flag(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise TaskError(f"task.{name}: must be true or false, got {value!r:.80}")
    return value
