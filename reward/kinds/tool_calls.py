"""Tool calls in a model's text, in the form that Hermes, Qwen and many other models write. Pure, and never raises.

    <tool_call>
    {"name": "python", "arguments": {"code": "print(6 * 7)"}}
    </tool_call>

A call that cannot be read has an `error`, which the model is told.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MOST_CALLS = 16  # in one turn; the others are not run
CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


def read_calls(text: str) -> Sequence[ToolCall]:
    """The calls of one turn, in their order."""
    return [_read_call(found[1]) for found, _ in zip(CALL.finditer(text), range(MOST_CALLS), strict=False)]


def tool_message(name: str, content: str) -> Message:
    """What a tool answers, as the chat templates of models expect it. A call may hold half of a surrogate pair, which has no
    tokens, so an answer that repeats it is mended."""
    return {"role": "tool", "name": name, "content": content.encode("utf-8", "replace").decode()}


def _read_call(text: str) -> ToolCall:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError) as error:
        return ToolCall(error=f"the tool call is no JSON: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not isinstance(call.get("arguments"), dict):
        return ToolCall(error='a tool call is {"name": "...", "arguments": {...}}')
    return ToolCall(name=call["name"], arguments=call["arguments"])
