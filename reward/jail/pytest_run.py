"""Runs the tests of a unit as pytest would: functions named `test…`, and methods so named of classes named `Test…`, once for each
case of their parameters, with fixtures, and with the set-up and tear-down methods that pytest knows by name."""

import inspect
import io
import itertools
import sys
import types
import unittest
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

from reward.jail.pytest_stand_in import FIXTURE, LEFT_OUT, PARAMETERS, Skipped

REQUEST, CAPTURED = "request", "capsys"


class Printed(NamedTuple):
    out: str
    err: str


class Captured:
    """The fixture `capsys`: what is printed, by the tests and by the candidate."""

    def __init__(self, stack: ExitStack) -> None:
        stack.callback(setattr, sys, "stdout", sys.stdout)
        self._begin()

    def readouterr(self) -> Printed:
        text = self._text.getvalue()
        self._begin()
        return Printed(out=text, err="")

    def _begin(self) -> None:
        self._text = sys.stdout = io.StringIO()


@dataclass(frozen=True, slots=True, kw_only=True)
class Test:
    function: Callable[..., Any]
    owner: type | None = None  # the class of a method

    @property
    def is_left_out(self) -> bool:
        return any(hasattr(one, LEFT_OUT) for one in (self.function, self.owner))

    def parameters(self) -> Iterator[dict[str, Any]]:
        """The arguments of each case."""
        marked = [*getattr(self.owner, PARAMETERS, []), *getattr(self.function, PARAMETERS, [])]
        for rows in itertools.product(*marked):
            yield {name: value for row in rows for name, value in row.items()}


def find(defined: Mapping[str, Any]) -> Iterator[Test]:
    for name, value in defined.items():
        if name.startswith("test") and isinstance(value, types.FunctionType):
            yield Test(function=value)
        elif name.startswith("Test") and issubclass(type(value), type) and not issubclass(value, unittest.TestCase):
            methods = (method for cls in reversed(value.__mro__) for method in vars(cls) if method.startswith("test"))
            yield from (Test(function=getattr(value, method), owner=value) for method in dict.fromkeys(methods))


def run(defined: Mapping[str, Any], names: Mapping[str, Any], finish: Callable[[object], None]) -> int:
    """How many tests ran; raises what the first failing one raises. `finish` gets what a test returns."""
    tests = [test for test in find(defined) if not test.is_left_out]
    ran = 0
    with ExitStack() as module, ExitStack() as classes:
        owner: type | None = None
        if tests:
            _hook(names.get("setup_module"), None)
            module.callback(_hook, names.get("teardown_module"), None)
        for test in tests:
            if test.owner is not owner:
                classes.close()
                owner = test.owner
                _hook(getattr(owner, "setup_class", None), owner)
                classes.callback(_hook, getattr(owner, "teardown_class", None), owner)
            ran += sum(_Case(test, names, case, finish).run() for case in test.parameters())
    return ran


class _Case:
    """One case of a test, on an instance of its own."""

    def __init__(self, test: Test, names: Mapping[str, Any], given: dict[str, Any], finish: Callable[[object], None]) -> None:
        self._test, self._given, self._finish = test, given, finish
        self._fixtures = {name: value for name, value in names.items() if hasattr(value, FIXTURE)}
        if test.owner is not None:
            inherited = {name: value for cls in reversed(test.owner.__mro__) for name, value in vars(cls).items()}
            self._fixtures |= {name: value for name, value in inherited.items() if hasattr(value, FIXTURE)}

    def run(self) -> int:
        """How many times it ran: once for each combination of the parameters of its fixtures."""
        needed = dict.fromkeys(name for name, value in self._fixtures.items() if getattr(value, FIXTURE).autouse)
        for name in (*needed, *inspect.signature(self._test.function).parameters):
            self._need(name, needed)
        varied = {name: params for name in needed if (params := getattr(self._fixtures[name], FIXTURE).params)}
        return sum(self._once(dict(zip(varied, row, strict=True))) for row in itertools.product(*varied.values()))

    def _need(self, name: str, needed: dict[str, None]) -> None:
        if name in self._fixtures and name not in self._given:
            needed[name] = None
            for other in inspect.signature(self._fixtures[name]).parameters:
                if other not in needed:
                    self._need(other, needed)

    def _once(self, params: dict[str, Any]) -> int:
        instance = self._test.owner() if self._test.owner is not None else None
        function = self._test.function if instance is None else getattr(instance, self._test.function.__name__)
        kind = "function" if instance is None else "method"
        where = function.__globals__ if instance is None else instance
        values = dict(self._given)
        try:
            with ExitStack() as stack:
                _hook(_named(where, f"setup_{kind}"), function)
                stack.callback(_hook, _named(where, f"teardown_{kind}"), function)
                for name, value in self._fixtures.items():
                    if getattr(value, FIXTURE).autouse:
                        self._value(name, instance, params, values, stack)
                self._finish(self._call(function, instance, params, values, stack))
        except Skipped:
            return 0
        return 1

    def _call(self, function: Any, instance: Any, params: dict[str, Any], values: dict[str, Any], stack: ExitStack) -> Any:
        wanted = inspect.signature(function).parameters
        known = {name: self._value(name, instance, params, values, stack) for name in wanted if self._is_known(name, values)}
        return function(**known)

    def _is_known(self, name: str, values: dict[str, Any]) -> bool:
        return name in values or name in self._fixtures or name == CAPTURED

    def _value(self, name: str, instance: Any, params: dict[str, Any], values: dict[str, Any], stack: ExitStack) -> Any:
        """An argument of the case, or the value of a fixture, made once and ended by `stack`."""
        if name not in values:
            if name == CAPTURED:
                values[name] = Captured(stack)
            else:
                made = self._fixtures[name]
                bound = made.__get__(instance) if instance is not None and name in dir(instance) else made
                own = {**values, REQUEST: types.SimpleNamespace(param=params.get(name), node=self._test.function)}
                value = self._call(bound, instance, params, own, stack)
                if isinstance(value, types.GeneratorType):
                    stack.callback(next, value, None)
                    value = next(value)
                values[name] = value
        return values[name]


def _named(where: Any, name: str) -> Any:
    return where.get(name) if isinstance(where, dict) else getattr(where, name, None)


def _hook(function: Any, argument: object) -> None:
    """A set-up or tear-down function, which may or may not want to know what it is for."""
    if function is not None:
        function(*[argument] * bool(inspect.signature(function).parameters))
