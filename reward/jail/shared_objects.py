"""Objects of the tests' that the candidate has been given: functions, iterators, and others.

The first half is the candidate's: what it holds in their place, and how an operation goes back to the tests. The second half is
the tests': what kind an object is, and which operations a candidate may ask for. It gets no attribute with an underscore, and
none at all of what leads to the tests' own variables (a function, a generator, a module), and so to what they expect.
"""

import builtins
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any, Protocol


class ServerLike(Protocol):
    def ask(self, number: int, operation: str, args: tuple[object, ...], kwargs: dict[str, object]) -> Any: ...


class Failed(Exception):
    """An exception of the tests' own that passes through the candidate; it comes back as the same object."""

    kestrel_number: int


def failure(number: int, kind: str) -> Exception:
    """An exception that the candidate can catch by Python's name for its kind."""
    base = vars(builtins).get(kind, Exception)
    error: Failed = type(kind, (Failed,) if base is Exception else (Failed, base), {})()
    error.kestrel_number = number
    return error


class Lent:
    """A function, or something else that can only be called."""

    kestrel_server: ServerLike
    kestrel_number: int

    def __init__(self, server: ServerLike, number: int) -> None:
        self.__dict__.update(kestrel_server=server, kestrel_number=number)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self.kestrel_server.ask(self.kestrel_number, "call", args, kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lent) and other.kestrel_number == self.kestrel_number

    def __hash__(self) -> int:
        return hash(self.kestrel_number)


class LentIterator(Lent):
    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self.kestrel_server.ask(self.kestrel_number, "next", (), {})


class LentObject(Lent):
    """Anything else, with the operations below and its attributes."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self.kestrel_server.ask(self.kestrel_number, "getattr", (name,), {})

    def __setattr__(self, name: str, value: object) -> None:
        self.kestrel_server.ask(self.kestrel_number, "setattr", (name, value), {})

    def __eq__(self, other: object) -> bool:
        same = Lent.__eq__(self, other)
        return same or self.kestrel_server.ask(self.kestrel_number, "eq", (other,), {}) is True

    __hash__ = Lent.__hash__


def _forward(operation: str) -> Callable[..., Any]:
    return lambda self, *args: self.kestrel_server.ask(self.kestrel_number, operation, args, {})


_FORWARDED = ("iter", "len", "bool", "str", "repr", "getitem", "setitem", "contains", "lt", "le", "gt", "ge", "add", "sub", "mul")
for _name in _FORWARDED:
    setattr(LentObject, f"__{_name}__", _forward(_name))

_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, type)
_CLOSED = (*_FUNCTIONS, types.FrameType, types.CodeType, types.TracebackType, types.ModuleType, types.CoroutineType,
           types.AsyncGeneratorType)  # fmt: skip

KINDS: dict[str, type[Lent]] = {"function": Lent, "iterator": LentIterator, "object": LentObject}


# The tests' half


def kind_of(value: object) -> str:
    if hasattr(type(value), "__next__"):
        return "iterator"
    return "function" if isinstance(value, _FUNCTIONS) else "object"


def _getattr(value: object, name: str) -> object:
    _check_attribute(value, name)
    return getattr(value, name)


def _setattr(value: object, name: str, new: object) -> None:
    _check_attribute(value, name)
    setattr(value, name, new)


def _check_attribute(value: object, name: str) -> None:
    if name.startswith("_") or isinstance(value, _CLOSED) or hasattr(type(value), "__next__"):
        raise AttributeError(name)


OPERATIONS: dict[str, Callable[..., object]] = {
    "call": lambda function, *args, **kwargs: function(*args, **kwargs),
    "next": next,
    "getattr": _getattr,
    "setattr": _setattr,
    "eq": operator.eq,
    **{name: getattr(builtins, name, None) or getattr(operator, name) for name in _FORWARDED},
}
