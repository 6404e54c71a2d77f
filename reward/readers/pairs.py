"""Makes tests of the inputs and outputs that most sets carry."""

import re
from collections.abc import Sequence
from typing import Any

from reward.jail import codec
from reward.readers.draft import RowRefused

TOLERANCE = 1e-6  # where floats are expected
_DECIMAL = re.compile(r"(?<![\w.])[+-]?\d+\.\d+(?![\w.])")


def stdio_task(inputs: Sequence[Any], outputs: Sequence[Any], at_most: int) -> dict[str, Any]:
    _check_pairs(inputs, outputs)
    tests = [{"input": _text(i), "output": _text(o)} for i, o in zip(inputs, outputs, strict=True)][:at_most]
    task: dict[str, Any] = {"kind": "stdio", "tests": tests}
    if any(_DECIMAL.search(test["output"]) for test in tests):
        task["tolerance"] = TOLERANCE
    return task


def calls_tasks(function: str, inputs: Sequence[Any], outputs: Sequence[Any], at_most: int) -> list[dict[str, Any]]:
    """The values are JSON, so results are compared as JSON would have them. Some sets wrap each output into a list of one: where
    all are such lists there are two readings."""
    _check_pairs(inputs, outputs)
    if not all(isinstance(arguments, list) for arguments in inputs):
        raise RowRefused("the arguments of a call are not a list")
    inputs, outputs = inputs[:at_most], outputs[:at_most]
    readings = [[output[0] for output in outputs]] if all(isinstance(o, list) and len(o) == 1 for o in outputs) else []
    return [_calls_task(function, inputs, reading) for reading in (*readings, list(outputs))]


def _calls_task(function: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> dict[str, Any]:
    tests = [{"args": codec.encode(i), "expected": codec.encode(o)} for i, o in zip(inputs, outputs, strict=True)]
    task = {"kind": "calls", "entry_point": function, "match": "json", "tests": tests}
    return {**task, "tolerance": TOLERANCE} if any(_holds_float(output) for output in outputs) else task


def _check_pairs(inputs: Any, outputs: Any) -> None:
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise RowRefused("inputs and outputs are not lists")
    if not inputs:
        raise RowRefused("no tests")
    if len(inputs) != len(outputs):
        raise RowRefused("not as many outputs as inputs", f"{len(inputs)} and {len(outputs)}")


def _text(value: Any) -> str:
    """Some sets write an input as a list of its lines."""
    if isinstance(value, list):
        return "\n".join(_text(item) for item in value)
    if not isinstance(value, str | int | float):
        raise RowRefused("an input or output is not text", repr(value)[:80])
    return str(value)


def _holds_float(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_float, value.values()))
    return any(map(_holds_float, value)) if isinstance(value, list) else isinstance(value, float)
