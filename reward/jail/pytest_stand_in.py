"""The part of pytest that test code of problems uses: `raises`, `approx`, `mark`, `param`, `fixture`, `fail`. Pytest itself stays
out of the jail: importing it costs more than most tests."""

import inspect
import math
import re
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Self

_PARAMETERS, _FIXTURE = "kestrel_parameters", "kestrel_fixture"


class raises:
    def __init__(self, expected: type[BaseException] | tuple[type[BaseException], ...], *, match: str | None = None) -> None:
        self.expected = expected
        self.match = match
        self.value: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if kind is None or error is None:
            raise AssertionError(f"did not raise {self.expected}")
        if not issubclass(kind, self.expected):
            return False
        if self.match is not None and not re.search(self.match, str(error)):
            raise AssertionError(f"{error} does not match {self.match!r}")
        self.value = error
        return True


class approx:
    """A number, or a list, tuple or dict of numbers, that equals what is near."""

    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None) -> None:
        self.expected, self.rel, self.abs = expected, rel, abs

    def __eq__(self, other: object) -> bool:
        if isinstance(self.expected, dict):
            same = isinstance(other, dict) and other.keys() == self.expected.keys()
            return same and all(self._near(other[key], value) for key, value in self.expected.items())  # type: ignore[index]
        if isinstance(self.expected, list | tuple):
            same = isinstance(other, list | tuple) and len(other) == len(self.expected)
            return same and all(map(self._near, other, self.expected))  # type: ignore[call-overload]
        return self._near(other, self.expected)

    __hash__ = None  # type: ignore[assignment]

    def _near(self, other: object, expected: Any) -> bool:
        if isinstance(other, bool) or not isinstance(other, int | float) or not isinstance(expected, int | float):
            return bool(other == expected)
        relative = (1e-6 if self.abs is None else 0.0) if self.rel is None else self.rel
        allowed = max(relative * abs(expected), 1e-12 if self.abs is None else self.abs)
        return other == expected or (abs(other - expected) <= allowed and math.isfinite(expected))


class Row(tuple[Any, ...]):
    """The values of one case, as `param` gives them."""


def param(*values: Any, **_: object) -> Row:
    return Row(values)


def parametrize(names: str | list[str], values: list[Any], **_: object) -> Callable[[Callable[..., None]], Callable[..., None]]:
    keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)

    def mark(function: Callable[..., None]) -> Callable[..., None]:
        rows = [dict(zip(keys, value if len(keys) > 1 or isinstance(value, Row) else (value,), strict=True)) for value in values]
        function.__dict__.setdefault(_PARAMETERS, []).append(rows)
        return function

    return mark


class Marks:
    """`pytest.mark`. Every mark but `parametrize` leaves a test as it is, so that it runs: `asyncio`, `slow` and others."""

    parametrize = staticmethod(parametrize)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **_: args[0] if len(args) == 1 and callable(args[0]) else lambda marked: marked


def fixture(function: Callable[..., Any] | None = None, **_: object) -> Callable[..., Any]:
    """With or without arguments: every test gets a value of its own."""
    if function is None:
        return fixture
    function.__dict__[_FIXTURE] = True
    return function


def with_fixtures(function: Callable[..., Any], names: dict[str, Any], case: dict[str, Any], stack: ExitStack) -> Any:
    """Calls a function with a case's arguments, and fixtures for its other parameters, which `stack` ends."""
    for name in inspect.signature(function).parameters:
        if name not in case and hasattr(names.get(name), _FIXTURE):
            value = with_fixtures(names[name], names, {}, stack)
            if isinstance(value, types.GeneratorType):
                stack.callback(next, value, None)
                value = next(value)
            case = {**case, name: value}
    return function(**case)


def cases(function: Callable[..., None]) -> Iterator[dict[str, Any]]:
    """The arguments of each call of a test function."""
    found: list[dict[str, Any]] = [{}]
    for rows in getattr(function, _PARAMETERS, []):
        found = [{**one, **row} for one in found for row in rows]
    yield from found


def fail(reason: str = "") -> None:
    raise AssertionError(reason)


def offer() -> None:
    """Makes `import pytest` find this."""
    module = types.ModuleType("pytest")
    module.__dict__.update(raises=raises, approx=approx, fail=fail, fixture=fixture, param=param, mark=Marks())
    sys.modules["pytest"] = module
