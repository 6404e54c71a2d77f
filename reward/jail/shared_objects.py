"""Objects of the tests that the candidate may use: functions, iterators, and others.

The first half runs in the candidate's jail: the stand-ins that it holds, which send every operation back to the tests. The second
half runs in the tests' jail: what kind an object is, and which operations the candidate may ask for. A candidate can read no
attribute that begins with an underscore, and no attribute at all of a function, generator or module: those lead to the tests'
variables, and so to the expected values.
"""

import builtins
import io
import operator
import sys
import types
from array import array
from collections import UserDict, UserList
from collections.abc import Callable, Iterator
from typing import Any, Protocol


class TestsLike(Protocol):
    """The way back to the tests."""

    def ask(self, number: int, operation: str, args: tuple[object, ...], kwargs: dict[str, object]) -> Any: ...


class Failed(Exception):
    """An exception of the tests that passes through the candidate. It comes back to them as the same object."""

    kestrel_number: int


def failure(number: int, kind: str, text: str) -> Exception:
    """An exception that the candidate can catch by Python's name for its kind."""
    base = vars(builtins).get(kind, Exception)
    error: Failed = type(kind, (Failed,) if base is Exception else (Failed, base), {})(text)
    error.kestrel_number = number
    return error


class Shared:
    """A function of the tests, or another object that can only be called."""

    kestrel_tests: TestsLike
    kestrel_number: int

    def __init__(self, tests: TestsLike, number: int, name: str = "", doc: str | None = None) -> None:
        self.__dict__.update(kestrel_tests=tests, kestrel_number=number)
        if name:  # a function has these, and `functools.wraps` copies them
            self.__dict__.update(__name__=name, __qualname__=name, __doc__=doc)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self.kestrel_tests.ask(self.kestrel_number, "call", args, kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shared) and other.kestrel_number == self.kestrel_number

    def __hash__(self) -> int:
        return hash(self.kestrel_number)


class SharedIterator(Shared):
    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self.kestrel_tests.ask(self.kestrel_number, "next", (), {})


class SharedObject(Shared):
    """Any other object of the tests, with its attributes and the operations below."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self.kestrel_tests.ask(self.kestrel_number, "getattr", (name,), {})

    def __setattr__(self, name: str, value: object) -> None:
        self.kestrel_tests.ask(self.kestrel_number, "setattr", (name, value), {})

    def __eq__(self, other: object) -> bool:
        same = Shared.__eq__(self, other)
        return same or self.kestrel_tests.ask(self.kestrel_number, "eq", (other,), {}) is True

    __hash__ = Shared.__hash__

    def __enter__(self) -> Any:
        return self.kestrel_tests.ask(self.kestrel_number, "enter", (), {})

    def __exit__(self, *_: object) -> None:
        self.kestrel_tests.ask(self.kestrel_number, "exit", (), {})


class SharedFile(SharedObject):
    """An open file or a buffer in memory."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self.kestrel_tests.ask(self.kestrel_number, "next", (), {})

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SharedCoroutine(Shared):
    def __await__(self) -> Iterator[Any]:
        yield from ()
        return self.kestrel_tests.ask(self.kestrel_number, "await", (), {})


def _forward(operation: str) -> Callable[..., Any]:
    return lambda self, *args: self.kestrel_tests.ask(self.kestrel_number, operation, args, {})


_FORWARDED = ("iter", "len", "bool", "str", "repr", "getitem", "setitem", "contains", "lt", "le", "gt", "ge", "add", "sub", "mul")
for _name in (*_FORWARDED, "radd"):
    setattr(SharedObject, f"__{_name}__", _forward(_name))

_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, type)
_CLOSED = (*_FUNCTIONS, types.FrameType, types.CodeType, types.TracebackType, types.ModuleType, types.CoroutineType,
           types.AsyncGeneratorType)  # fmt: skip

KINDS: dict[str, type[Shared]] = {
    "function": Shared,
    "iterator": SharedIterator,
    "file": SharedFile,
    "coroutine": SharedCoroutine,
    "object": SharedObject,
}


# The half that runs in the tests' jail


def _is_mock(value: object) -> bool:
    mock = sys.modules.get("unittest.mock")
    return mock is not None and isinstance(value, mock.NonCallableMock)


def kind_of(value: object) -> str:
    if _is_mock(value):
        return "object"
    if isinstance(value, io.IOBase):
        return "file"
    if isinstance(value, types.CoroutineType):
        return "coroutine"
    if hasattr(type(value), "__next__"):
        return "iterator"
    return "function" if isinstance(value, _FUNCTIONS) else "object"


CONTAINERS = (list, dict, set, array)  # those that are not copied: arrays, and instances of subclasses


def container_of(value: object) -> Any:
    """What a call of this object, or an operation with it, may change; None where that is no container."""
    owner = getattr(value, "__self__", value) if isinstance(value, types.MethodType | types.BuiltinFunctionType) else value
    owner = owner.data if isinstance(owner, UserList | UserDict) else owner
    return owner if isinstance(owner, CONTAINERS) else None


def refill(container: Any, old: Any) -> None:
    """Gives a container back what it held."""
    if isinstance(container, list):
        list.__setitem__(container, slice(None), old)
    elif isinstance(container, array):
        container[:] = old
    else:
        kind: Any = dict if isinstance(container, dict) else set
        kind.clear(container)
        kind.update(container, old)


def described(value: object) -> list[object]:
    """Its kind, and of a function the name and the docstring."""
    about = [getattr(value, "__name__", None), getattr(value, "__doc__", None)] if isinstance(value, types.FunctionType) else []
    return [kind_of(value), *about]


def _getattr(value: object, name: str) -> object:
    if not (_is_mock(value) and name in ("called", "call_count")):  # what code may look at, and may not set
        _check_attribute(value, name)
    return getattr(value, name)


def _setattr(value: object, name: str, new: object) -> None:
    _check_attribute(value, name)
    if callable(getattr(type(value), name, None)):
        raise AttributeError(f"{name} is a method")
    setattr(value, name, new)


def _check_attribute(value: object, name: str) -> None:
    is_iterator = hasattr(type(value), "__next__") and not isinstance(value, io.IOBase)
    is_record = _is_mock(value) and hasattr(type(value), name)  # what tells the tests how the mock was used
    if name.startswith("_") or isinstance(value, _CLOSED) or (is_iterator and not _is_mock(value)) or is_record:
        raise AttributeError(name)


def _run_coroutine(value: object) -> object:
    """The result of a coroutine of the tests, in a thread of its own: theirs may be inside of an event loop now."""
    if not isinstance(value, types.CoroutineType):
        raise TypeError("not a coroutine")
    import asyncio  # here, because most tests need none
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as threads:
        return threads.submit(asyncio.run, value).result()


OPERATIONS: dict[str, Callable[..., object]] = {
    "call": lambda function, *args, **kwargs: function(*args, **kwargs),
    "next": next,
    "await": _run_coroutine,
    "getattr": _getattr,
    "setattr": _setattr,
    "eq": operator.eq,
    "radd": lambda value, other: other + value,  # as in `sum`
    "enter": lambda manager: type(manager).__enter__(manager),
    "exit": lambda manager: type(manager).__exit__(manager, None, None, None),
    **{name: getattr(builtins, name, None) or getattr(operator, name) for name in _FORWARDED},
}
