"""An environment whose tools are methods of your own: the base of your class. docs/episodes.md shows one.

    python -m reward.tools my_shop:Shop

prints the tools as JSON schemas, for `data.chat_template_kwargs.tools`.
"""

import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from conf.schema import ConfigError
from conf.user_code import load
from reward.kinds.functions.episodes import Action
from reward.kinds.tool_calls import ToolCall, read_calls, tool_message

Figures = dict[str, float]


class ToolError(Exception):
    """What a tool raises if the model is at fault. The model reads the message."""


class Tools:
    """The model may call the methods that `tools` names, until it says something without a call: its answer."""

    tools: ClassVar[Sequence[str]] = ()

    async def start(self, task: Mapping[str, Any]) -> None:
        """Gets the fields of the problem's task."""

    async def answer(self, action: Action) -> float:
        """The reward of a turn without a call."""
        raise NotImplementedError(f"{type(self).__name__} has no method `answer`, which gives the reward")

    async def step(self, action: Action) -> Any:
        calls = read_calls(action.answer)
        if not calls:
            return await self.answer(action)
        figures = {"tool_calls": float(len(calls)), "tool_errors": 0.0}
        if action.last:
            return 0.0, figures
        names = [call.name if call.name in self.tools else "" for call in calls]
        return [tool_message(name, await self._told(call, figures)) for name, call in zip(names, calls, strict=True)], figures

    async def _told(self, call: ToolCall, figures: Figures) -> str:
        try:
            found = await self._run(call)
        except ToolError as error:
            figures["tool_errors"] += 1
            return str(error)
        return found if isinstance(found, str) else json.dumps(found)

    async def _run(self, call: ToolCall) -> Any:
        """Raises ToolError where the model is at fault."""
        if call.error:
            raise ToolError(call.error)
        if call.name not in self.tools:
            raise ToolError(f"there is no tool {call.name!r:.80}: use one of {', '.join(self.tools)}")
        method = getattr(self, call.name)
        try:
            inspect.signature(method).bind(**call.arguments)
        except TypeError as error:
            raise ToolError(f"{call.name}: {error}") from error
        found = method(**call.arguments)
        return await found if inspect.isawaitable(found) else found


def schemas(kind: Callable[..., Any]) -> list[dict[str, Any]]:
    """The tools of a class as JSON schemas, from their type hints and docstrings. Raises ConfigError."""
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException, get_json_schema

    try:
        return [get_json_schema(getattr(kind, name)) for name in getattr(kind, "tools", ())]
    except (DocstringParsingException, TypeHintParsingException, AttributeError) as error:
        raise ConfigError(
            f"a tool needs type hints and a docstring that describes each argument under `Args:`: {error}"
        ) from error


if __name__ == "__main__":
    try:
        print(json.dumps(schemas(load(sys.argv[1], Path(), setting="reward.tools"))))
    except ConfigError as problem:
        sys.exit(str(problem))
