"""What a check says: how bad it is, what is the case, and what to do."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, TypeVar


class Level(IntEnum):
    """From good to bad."""

    OK = 0
    SKIPPED = 1  # does not apply, or cannot be known here; the finding says why
    WARNING = 2  # the run can start; it may be slow, or fail later
    FAILURE = 3  # the run would fail

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    level: Level
    said: str
    remedy: str = ""

    def __post_init__(self) -> None:
        if bool(self.remedy) != (self.level >= Level.WARNING):
            raise ValueError(f"a warning or failure has a remedy, and nothing else has: {self}")


def ok(said: str) -> Finding:
    return Finding(level=Level.OK, said=said)


def skipped(why: str) -> Finding:
    return Finding(level=Level.SKIPPED, said=why)


def warning(said: str, remedy: str) -> Finding:
    return Finding(level=Level.WARNING, said=said, remedy=remedy)


def failure(said: str, remedy: str) -> Finding:
    return Finding(level=Level.FAILURE, said=said, remedy=remedy)


def worst(findings: Iterable[Finding], otherwise: Finding) -> Finding:
    """The first of the worst, and how many others there are; `otherwise` when there is none."""
    found = [f for f in findings if f.level >= Level.WARNING]
    if not found:
        return otherwise
    first = max(found, key=lambda f: f.level)
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return Finding(level=first.level, said=first.said + more, remedy=first.remedy)


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Check(Generic[T]):
    """A named question about a case. The fast ones run at every launch and take well under two seconds together."""

    name: str
    ask: Callable[[T], Finding]
    fast: bool = True
