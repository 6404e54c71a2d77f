"""The kinds of task, and the reading of a problem's `task`: one kind, or a list of weighted parts.

"task": {"kind": "calls", ...}
"task": [{"kind": "calls", ...}, {"kind": "length", "name": "short", "weight": 0.1, ...}]
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from conf.schema import ConfigError, RunConfig
from conf.user_code import named
from reward.grade import Part, Reward
from reward.kinds.asserts import read_asserts_task
from reward.kinds.calls import read_calls_task
from reward.kinds.environment import read_environment_task
from reward.kinds.format import read_format_task
from reward.kinds.http import read_http_task
from reward.kinds.interpreter import read_interpreter_task
from reward.kinds.judge_model import read_judge_task
from reward.kinds.kind import Defaults, Task, TaskError
from reward.kinds.length import read_length_task
from reward.kinds.math import read_math_task
from reward.kinds.overlong import read_overlong_task
from reward.kinds.python import read_python_task
from reward.kinds.repair import read_repair_task
from reward.kinds.stdio import read_stdio_task
from reward.kinds.thoughts import Tags, read_tags

__all__ = ["KINDS", "Defaults", "Task", "TaskError", "defaults_of", "parse_task", "read_reward"]

KINDS: dict[str, Callable[[Mapping[str, Any], Defaults], Task]] = {
    "calls": read_calls_task,
    "stdio": read_stdio_task,
    "asserts": read_asserts_task,
    "math": read_math_task,
    "http": read_http_task,
    "judge": read_judge_task,
    "python": read_python_task,
    "environment": read_environment_task,
    "repair": read_repair_task,
    "interpreter": read_interpreter_task,
    "format": read_format_task,
    "length": read_length_task,
    "overlong": read_overlong_task,
}

DEFAULTS = Defaults()
PART_FIELDS = ("name", "weight", "reasoning")  # any kind may have them; kinds themselves do not see them
PART_NAME = re.compile(r"[A-Za-z_][\w-]*", re.ASCII)
MOST_WEIGHT = 1e6
RESERVED = "truncated"  # a figure of every verdict


def defaults_of(config: RunConfig) -> Defaults:
    """What the tasks of a run get where they say nothing themselves. Raises ConfigError."""
    reward = config.reward
    try:
        tags = read_tags(reward.reasoning)
    except ValueError as error:
        raise ConfigError(f"reward.reasoning={error}") from None
    defaults = Defaults(
        cpu_limit_s=reward.cpu_limit_s,
        memory_limit_mb=reward.memory_limit_mb,
        credit=reward.credit,
        truncated_reward=reward.truncated_reward,
        max_completion_tokens=config.rollout.max_completion_tokens,
        penalises_overlong=config.algo.overlong_buffer_fraction > 0,
        judge_model=bool(reward.judge_model),
        functions=frozenset(one.name for one in named(config) if one.role == "judge"),
        reasoning=tags,
        parts=reward.parts,
    )
    try:
        _parts_of_the_run(defaults)
    except TaskError as error:
        raise ConfigError(str(error)) from None
    return defaults


def read_reward(data: Any, *, defaults: Defaults = DEFAULTS) -> Reward:
    """The reward that a problem's `task` describes, with the parts that every reward of the run has. Raises TaskError."""
    parts = [*_read_parts(data, defaults), *_parts_of_the_run(defaults)]
    parts.sort(key=lambda part: not part.task.is_environment)  # an environment decides whether the others are asked at all
    if sum(part.task.is_environment for part in parts) > 1:
        raise TaskError("task: two parts are environments: an episode has one")
    seen: set[str] = {RESERVED}
    for part in parts:
        if part.name in seen:
            raise TaskError(f"task: the part name {part.name!r} is taken: give each part a `name` of its own")
        seen.add(part.name)
    if not any(part.weight for part in parts):
        raise TaskError("task: every part has the weight 0, so every reward would be 0")
    return Reward(parts=parts, truncated_reward=defaults.truncated_reward)


def parse_task(data: Any, *, defaults: Defaults = DEFAULTS) -> Task:
    """The task that `data`, one kind, describes. Raises TaskError."""
    if not isinstance(data, Mapping):
        raise TaskError(f"task: must be an object, got {type(data).__name__}")
    kind = data.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise TaskError(f"task.kind: {kind!r} is not known: use one of {', '.join(KINDS)}")
    return KINDS[kind](data, defaults)


def _parts_of_the_run(defaults: Defaults) -> list[Part]:
    return [_read_part(part, f"reward.parts.{name}", defaults, name=name) for name, part in defaults.parts.items()]


def _read_parts(data: Any, defaults: Defaults) -> Iterator[Part]:
    if isinstance(data, Mapping) and data.keys() == {"parts"}:  # how messages carry a list
        data = data["parts"]
    if not isinstance(data, list | tuple):
        yield _read_part(data, "task", defaults)
        return
    if not data:
        raise TaskError("task: the list is empty: give at least one part")
    for index, part in enumerate(data):
        yield _read_part(part, f"task[{index}]", defaults)


def _read_part(data: Any, where: str, defaults: Defaults, name: str = "") -> Part:
    try:
        if not isinstance(data, Mapping):
            raise TaskError(f"task: must be an object, got {type(data).__name__}")
        if "reasoning" in data:
            defaults = replace(defaults, reasoning=_read_reasoning(data["reasoning"]))
        task = parse_task({key: value for key, value in data.items() if key not in PART_FIELDS}, defaults=defaults)
        return Part(
            name=_read_name(data.get("name", name or data["kind"])), weight=_read_weight(data.get("weight", 1.0)), task=task
        )
    except TaskError as error:
        raise TaskError(f"{where}{str(error).removeprefix('task')}") from None


def _read_name(name: object) -> str:
    if not isinstance(name, str) or not PART_NAME.fullmatch(name):
        raise TaskError(f"task.name: {name!r:.80} must be a word of letters, digits, - and _, because a figure gets this name")
    return name


def _read_reasoning(rule: object) -> tuple[Tags, ...]:
    try:
        return read_tags(str(rule))
    except ValueError as error:
        raise TaskError(f"task.reasoning: {error}") from None


def _read_weight(weight: object) -> float:
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not abs(weight) <= MOST_WEIGHT or math.isnan(weight):
        raise TaskError(f"task.weight: must be a number from {-MOST_WEIGHT:g} to {MOST_WEIGHT:g}, got {weight!r:.80}")
    return float(weight)
