"""What a check finds: how bad it is, what is wrong, and what to do."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, TypeVar


class Level(IntEnum):
    """Ordered from good to bad."""

    OK = 0
    SKIPPED = 1  # the check does not apply or cannot run here; the message says why
    WARNING = 2  # the run can start; it may be slow, or fail later
    FAILURE = 3  # the run would fail

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    level: Level
    message: str
    remedy: str = ""

    def __post_init__(self) -> None:
        if bool(self.remedy) != (self.level >= Level.WARNING):
            raise ValueError(f"a warning or a failure must have a remedy, other findings must not: {self}")


def ok(message: str) -> Finding:
    return Finding(level=Level.OK, message=message)


def skipped(why: str) -> Finding:
    return Finding(level=Level.SKIPPED, message=why)


def warning(message: str, remedy: str) -> Finding:
    return Finding(level=Level.WARNING, message=message, remedy=remedy)


def failure(message: str, remedy: str) -> Finding:
    return Finding(level=Level.FAILURE, message=message, remedy=remedy)


def worst(findings: Iterable[Finding], otherwise: Finding) -> Finding:
    """The first of the worst findings, with the number of the others; `otherwise` when nothing is wrong."""
    found = [f for f in findings if f.level >= Level.WARNING]
    if not found:
        return otherwise
    first = max(found, key=lambda f: f.level)
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return Finding(level=first.level, message=first.message + more, remedy=first.remedy)


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Check(Generic[T]):
    """A named check of a case. The fast checks run at every launch and take well under two seconds together."""

    name: str
    run: Callable[[T], Finding]
    fast: bool = True
