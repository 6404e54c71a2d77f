"""The kinds of task, and the reading of a problem's `task` object."""

from collections.abc import Callable, Mapping
from typing import Any

from reward.kinds.asserts import read_asserts_task
from reward.kinds.calls import read_calls_task
from reward.kinds.kind import Defaults, Task, TaskError
from reward.kinds.stdio import read_stdio_task

__all__ = ["KINDS", "Defaults", "Task", "TaskError", "parse_task"]

KINDS: dict[str, Callable[[Mapping[str, Any], Defaults], Task]] = {
    "calls": read_calls_task,
    "stdio": read_stdio_task,
    "asserts": read_asserts_task,
}

DEFAULTS = Defaults()


def parse_task(data: Mapping[str, Any], *, defaults: Defaults = DEFAULTS) -> Task:
    """The task that `data` describes. Raises TaskError."""
    if not isinstance(data, Mapping):
        raise TaskError(f"task: must be an object, got {type(data).__name__}")
    kind = data.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise TaskError(f"task.kind: {kind!r} is not known: use one of {', '.join(KINDS)}")
    return KINDS[kind](data, defaults)
