"""The record that a reader makes of one row, and how a row is refused."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reward.kinds.kind import Defaults

ASK_FUNCTION = "Put the whole code in one ```python block."
ASK_PROGRAM = f"Write a Python program that reads from standard input and prints to standard output. {ASK_FUNCTION}"
Row = dict[str, Any]


class RowRefused(ValueError):
    """A row that cannot be used. Rows are counted by reason; the detail concerns this row alone."""

    def __init__(self, reason: str, detail: str = "", *, message: str = "") -> None:
        super().__init__(message or (f"{reason}: {detail}" if detail else reason))
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How rows become problems, where a format leaves a choice."""

    defaults: Defaults = field(default_factory=Defaults)  # what tasks get where they say nothing themselves
    task: Any = None  # grades the answers to rows that have no `task` of their own (data.task)
    at_most: int = 64  # tests per problem, the first ones
    prefill: bool = False  # HumanEval and MBPP: the answer is begun for the model
    as_asserts: bool = False  # HumanEval: the tests stay code


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A problem in this project's format. If a set leaves open what a test means there are several tasks, and the first one
    that a solution passes is right."""

    tasks: Sequence[Any]
    id: Any = None  # None: the problem is named by the place of its row
    messages: list[dict[str, str]] = field(default_factory=list)
    solutions: Sequence[str] = ()  # whole answers, such as programs; one of them must pass
    prefill: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)  # other fields of the line

    def line(self, task: Any, solution: str | None = None) -> dict[str, Any]:
        optional = {"messages": self.messages, "prefill": self.prefill, "metadata": self.metadata}
        line = {"id": self.id, **{name: value for name, value in optional.items() if value}, **self.fields, "task": task}
        return line if solution is None else {**line, "solution": solution}


def user(*parts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": "\n\n".join(part.strip("\n") for part in parts if part.strip())}]


def text_of(row: Row, *keys: str, default: str | None = None) -> str:
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
