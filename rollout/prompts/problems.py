"""A problem is one row of a problem set. Each of its fields is checked.

    {"id": "sum-1", "prompt": "Write ...", "task": {"kind": "calls", "tests": [...]}}

A row may have `messages` instead of `prompt` for a conversation, `prefill` for the beginning of the answer, `"raw": true` for a
prompt without a chat template, and `metadata`. Only `reward/` knows the kinds of tasks.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MOST_NESTED = 100  # levels of lists and objects; messages that carry a task limit the depth
MOST_DIGITS = 4300  # neither Python nor the judge can read or print a longer integer
SHOWN_PATH = 80
PARTS = "parts"
BEYOND = 10**MOST_DIGITS
ID = re.compile(r'"id"\s*:\s*("(?:[^"\\]|\\.)*")')


HELD_OUT = -1  # the part of a problem that no training prompt is made of


class ProblemError(ValueError):
    """A problem cannot be used. The message names the file, the line and the problem."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    where: str  # file and line, for messages
    id: str
    messages: Sequence[Mapping[str, str]]
    raw: str | None  # the prompt, if no chat template is applied to it
    prefill: str
    task: Mapping[str, Any]  # one kind, or {PARTS: [one kind, …]} for a list
    metadata: Mapping[str, Any]

    @property
    def text(self) -> str:
        """What it asks. A conversation of several messages becomes one paragraph per message, which begins with the role."""
        if self.raw is not None:
            return self.raw
        if len(self.messages) == 1:
            return self.messages[0]["content"]
        return "\n\n".join(f"{message['role']}: {message['content']}" for message in self.messages)


def parse_line(line: str, where: str) -> Any:
    """The value in one line of JSON. Raises ProblemError."""
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise ProblemError(f"{where}: broken JSON at {at}: {error.msg}") from error
    except RecursionError:
        what = f"lists and objects are nested too deep; at most {MOST_NESTED} levels can be used"
    except ValueError:  # json raises no other error
        what = f"an integer has more than {MOST_DIGITS} digits, which Python does not read; write it as a string"
    found = ID.search(line)
    raise ProblemError(f"{where}: {f'problem {found[1]}: ' if found else ''}{what}")


def problem_of(row: Any, where: str) -> Problem:
    """The problem in a row of any source. Raises ProblemError."""
    if not isinstance(row, Mapping):
        raise ProblemError(f"{where}: a problem is a JSON object, got {type(row).__name__}")
    problem_id = row.get("id")
    if not isinstance(problem_id, str) or not problem_id:
        raise ProblemError(f"{where}: `id` must be a string that is not empty")
    where_it_is = f"{where}: problem {problem_id!r}"
    try:
        plain = _plain(row)
    except _NotPlain as error:
        path = error.path.removeprefix(".")[:SHOWN_PATH]
        raise ProblemError(f"{where_it_is}: {f'`{path}` ' if path else ''}{error}") from None
    if wrong := _what_is_wrong(plain):
        raise ProblemError(f"{where_it_is}: {wrong}")
    raw = plain.get("raw", False)
    return Problem(
        where=where,
        id=plain["id"],
        messages=plain["messages"] if "messages" in plain else [{"role": "user", "content": plain["prompt"]}],
        raw=plain["prompt"] if raw else None,
        prefill=plain.get("prefill", ""),
        task=plain["task"] if isinstance(plain["task"], dict) else {PARTS: plain["task"]},
        metadata=plain.get("metadata", {}),
    )


def _what_is_wrong(row: Mapping[str, Any]) -> str:
    task, messages = row.get("task"), row.get("messages")
    if ("prompt" in row) == ("messages" in row):
        return "a problem has either `prompt` or `messages`"
    if "prompt" in row and not (isinstance(row["prompt"], str) and row["prompt"]):
        return "`prompt` must be a string that is not empty"
    if "messages" in row and not (isinstance(messages, list) and messages and all(map(_is_message, messages))):
        return "`messages` must be a list of objects with the strings `role` and `content`"
    if "messages" in row and row.get("raw"):
        return "`raw` goes with `prompt`, not with `messages`"
    if not _is_task(task) and not (isinstance(task, list) and task and all(map(_is_task, task))):
        return "`task` must be an object with a `kind`, or a list of such objects"
    for name, kind, said in (("prefill", str, "a string"), ("raw", bool, "true or false"), ("metadata", dict, "an object")):
        if not isinstance(row.get(name, kind()), kind):
            return f"`{name}` must be {said}"
    return ""


def _is_task(task: Any) -> bool:
    return isinstance(task, dict) and isinstance(task.get("kind"), str)


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(name), str) for name in ("role", "content"))


class _NotPlain(ValueError):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.path = ""


def _plain(value: Any, depth: int = 0) -> Any:
    """The value with the types of JSON, from any source. Raises _NotPlain for a value that cannot be sent to the judge."""
    if depth > MOST_NESTED:
        raise _NotPlain(f"is nested too deep; at most {MOST_NESTED} levels can be used")
    if isinstance(value, Mapping):
        return {_key(key): _inside(f".{key}", inner, depth) for key, inner in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_inside(f"[{i}]", inner, depth) for i, inner in enumerate(value)]
    if isinstance(value, np.generic):
        return _plain(value.item(), depth)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int) and not -BEYOND < value < BEYOND:
        raise _NotPlain(f"is an integer of more than {MOST_DIGITS} digits; write it as a string")
    if value is None or isinstance(value, bool | int | float):
        return value
    raise _NotPlain(f"is of the type {type(value).__name__}, which JSON does not have")


def _inside(step: str, value: Any, depth: int) -> Any:
    try:
        return _plain(value, depth + 1)
    except _NotPlain as error:
        error.path = step + error.path
        raise


def _key(key: Any) -> str:
    if not isinstance(key, str):
        raise _NotPlain(f"has the key {key!r}, which is not a string")
    return _text(key)


def _text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        lone = value[error.start]
        raise _NotPlain(f"holds {lone!r}, one half of a surrogate pair, which no encoding can represent") from None
    return str(value)
