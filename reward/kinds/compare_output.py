"""Is the printed output the expected one? Pure, and linear in the size of both.

Without a tolerance, the lines must be the same, apart from trailing white space and trailing empty lines. With one, the tokens of
each line must be the same (a bracket or a comma is a token of its own), but where a decimal number is expected, another number
may differ from it by the tolerance. An expected integer, such as 1000000007, must be printed exactly.
"""

import re

from reward.kinds.compare_data import is_close

_INTEGER = re.compile(r"[+-]?\d+", re.ASCII)
_SEPARATOR = re.compile(r"[\[\](){},;:=]")
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)


def same_output(got: str, expected: str, tolerance: float | None = None) -> bool:
    got_lines, expected_lines = normalise(got), normalise(expected)
    if got_lines == expected_lines:
        return True
    if tolerance is None or len(got_lines) != len(expected_lines):
        return False
    return all(_close_line(a, b, tolerance) for a, b in zip(got_lines, expected_lines, strict=True))


def normalise(output: str) -> list[str]:
    lines = [line.rstrip() for line in output.replace("\r\n", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _close_line(got: str, expected: str, tolerance: float) -> bool:
    got_tokens, expected_tokens = _SEPARATOR.sub(r" \g<0> ", got).split(), _SEPARATOR.sub(r" \g<0> ", expected).split()
    return len(got_tokens) == len(expected_tokens) and all(
        _close_token(a, b, tolerance) for a, b in zip(got_tokens, expected_tokens, strict=True)
    )


def _close_token(got: str, expected: str, tolerance: float) -> bool:
    if got == expected:
        return True
    if _INTEGER.fullmatch(expected) or not (_NUMBER.fullmatch(got) and _NUMBER.fullmatch(expected)):
        return False
    return is_close(float(got), float(expected), tolerance)
