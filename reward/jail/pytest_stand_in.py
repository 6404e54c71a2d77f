"""The part of pytest that test code of problems uses: `raises`, `approx`, `mark`, `param`, `fixture`, `fail`, `skip`.

Pytest itself stays out of the jail: importing it costs more than most tests. `pytest_run.py` runs what is marked here.
"""

import math
import re
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Self

PARAMETERS, FIXTURE, LEFT_OUT = "kestrel_parameters", "kestrel_fixture", "kestrel_left_out"


class Skipped(Exception):
    """A test that says itself that it cannot run here. It does not count as one that ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixture:
    """What `fixture` notes on a function."""

    params: Sequence[Any] = ()
    autouse: bool = False


class Raises:
    """What `with raises(…) as info` gives."""

    def __init__(self, expected: type[BaseException] | tuple[type[BaseException], ...], match: str | None) -> None:
        self.expected, self.pattern = expected, match
        self.value: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if kind is None or error is None:
            raise AssertionError(f"did not raise {self.expected}")
        if not issubclass(kind, self.expected):
            return False
        self.value = error
        if self.pattern is not None:
            self.match(self.pattern)
        return True

    @property
    def type(self) -> type[BaseException] | None:
        return None if self.value is None else type(self.value)

    def match(self, pattern: str) -> bool:
        if not re.search(pattern, str(self.value)):
            raise AssertionError(f"{self.value} does not match {pattern!r}")
        return True


def raises(
    expected: type[BaseException] | tuple[type[BaseException], ...],
    function: Callable[..., object] | None = None,
    *args: object,
    match: str | None = None,
    **kwargs: object,
) -> Raises:
    """For `with`; or, with a function, a call that must raise."""
    found = Raises(expected, match)
    if function is not None:
        with found:
            function(*args, **kwargs)
    return found


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


def parametrize(names: str | list[str], values: list[Any], **_: object) -> Callable[[Any], Any]:
    keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)

    def mark(test: Any) -> Any:
        rows = [dict(zip(keys, value if len(keys) > 1 or isinstance(value, Row) else (value,), strict=True)) for value in values]
        setattr(test, PARAMETERS, [*vars(test).get(PARAMETERS, []), rows])
        return test

    return mark


def leave_out(test: Any) -> Any:
    setattr(test, LEFT_OUT, True)
    return test


class Marks:
    """`pytest.mark`. Tests that are skipped or expected to fail are left out; other marks, such as `asyncio` and `slow`, leave a
    test as it is, so that it runs."""

    parametrize = staticmethod(parametrize)

    @staticmethod
    def skip(test: Any = None, **_: object) -> Any:
        return leave_out(test) if callable(test) else leave_out

    xfail = skip

    @staticmethod
    def skipif(condition: object, **_: object) -> Callable[[Any], Any]:
        return leave_out if condition else lambda test: test

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **_: args[0] if len(args) == 1 and callable(args[0]) else lambda marked: marked


def fixture(
    function: Callable[..., Any] | None = None, *, params: Sequence[Any] = (), autouse: bool = False, **_: object
) -> Callable[..., Any]:
    """With or without arguments: every test gets a value of its own."""

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        setattr(function, FIXTURE, Fixture(params=tuple(params), autouse=autouse))
        return function

    return mark if function is None else mark(function)


def fail(reason: str = "", **_: object) -> NoReturn:
    raise AssertionError(reason)


def skip(reason: str = "", **_: object) -> NoReturn:
    raise Skipped(reason)


def offer() -> None:
    """Makes `import pytest` find this."""
    module = types.ModuleType("pytest")
    names = {"raises": raises, "approx": approx, "fail": fail, "fixture": fixture, "param": param, "skip": skip, "mark": Marks()}
    module.__dict__.update(names, main=lambda *_, **__: 0)  # tests run in any case
    sys.modules["pytest"] = module
