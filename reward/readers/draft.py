"""The record that a reader makes of one problem, before its solution is run, and how a problem is refused."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from reward.grade import printable

ASK_FUNCTION = "Put the whole code in one ```python block."
ASK_PROGRAM = f"Write a Python program that reads from standard input and prints to standard output. {ASK_FUNCTION}"


class ReadError(ValueError):
    """A set that cannot be fetched or read."""


class RowRefused(ValueError):
    """A problem that cannot be used. Problems are counted by reason; the detail is about this problem alone."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A problem in this project's format. If a set leaves open what a test means there are several tasks, and the first one
    that a solution passes is right."""

    id: str
    messages: list[dict[str, str]] = field(default_factory=list)
    tasks: Sequence[dict[str, Any]]
    solutions: Sequence[str] = ()  # whole programs, of which one must pass
    prefill: str = ""
    fields: dict[str, Any] = field(default_factory=dict)  # other fields of the line

    def line(self, task: dict[str, Any], solution: str | None) -> dict[str, Any]:
        line: dict[str, Any] = {"id": self.id, **({"messages": self.messages} if self.messages else {}), **self.fields}
        if self.prefill:
            line["prefill"] = self.prefill
        line["task"] = task
        return line if solution is None else {**line, "solution": solution}


@dataclass(slots=True, kw_only=True)
class Summary:
    """What was kept of a set, and what was refused."""

    verified: int = 0  # kept, and a solution of theirs passed
    unverified: int = 0  # kept, without a solution or unchecked
    refused: dict[str, list[str]] = field(default_factory=dict)  # reason -> which problems, with details

    def refuse(self, which: str, error: RowRefused) -> None:
        detail = f" ({error.detail})" if error.detail else ""
        self.refused.setdefault(error.reason, []).append(printable(which + detail))

    @property
    def refused_count(self) -> int:
        return sum(map(len, self.refused.values()))

    def text(self, shown: int = 8) -> str:
        kept = self.verified + self.unverified
        lines = [f"{kept} problems ({self.verified} with a solution that passes), {self.refused_count} refused"]
        for reason, ids in sorted(self.refused.items(), key=lambda item: -len(item[1])):
            more = f" and {len(ids) - shown} more" if len(ids) > shown else ""
            lines.append(f"  {len(ids):>3}  {reason}: {', '.join(ids[:shown])}{more}")
        return "\n".join(lines)


def user(*parts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": "\n\n".join(part.strip("\n") for part in parts if part.strip())}]


def text_of(row: dict[str, Any], *keys: str, default: str | None = None) -> str:
    """The first of these fields that the row has. Raises RowRefused."""
    for key in keys:
        if (value := row.get(key)) is not None:
            if not isinstance(value, str | int):
                raise RowRefused(f"`{key}` is not text", repr(value)[:80])
            return str(value)
    if default is None:
        raise RowRefused(f"no `{'` or `'.join(keys)}`")
    return default


def as_json(value: Any, what: str) -> Any:
    """The value of a field that some editions of a set write as a string of JSON and others as an object."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RowRefused(f"`{what}` is not JSON", str(error)[:80]) from None
