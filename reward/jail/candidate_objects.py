"""The candidate's side of an `asserts` job: loads the code, then does with its objects what the tests ask for.

It runs in the candidate's own jail, and nobody trusts it. Over the link to the tests' jail it first sends every name that the
code defines. Then it answers one request at a time:

    from the tests   {"do": operation, "args": [...], "kwargs": {...}}
    to them          {"ok": value, "back": [...]}     `back`: the mutable arguments as the call left them
                     {"raise": {...}}  {"exhausted": true}
                     each of these also {"printed": text}, for tests that look at what a call prints
    to them          {"callback": number, "do": operation, "args": [...], "kwargs": {...}}   on an object of theirs
    from them        {"answer": value}  {"exhausted": true}  {"failed": number, "kind": name, "text": message}

If it runs out of memory or stack, that is no exception that a test could expect: the process ends, and the judge sees it end.
"""

import builtins
import copy
import io
import operator
import sys
import types
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from reward.jail import harness, shared_objects, transfer
from reward.jail.limits import OUTPUT_BYTES

if TYPE_CHECKING:
    import asyncio

FATAL = (MemoryError, RecursionError, KeyboardInterrupt, GeneratorExit)
_STAY = (*FATAL, StopIteration, StopAsyncIteration, BaseExceptionGroup)
CROSSING_EXCEPTIONS = tuple(
    value
    for value in vars(builtins).values()
    if isinstance(value, type) and issubclass(value, Exception | SystemExit) and not issubclass(value, _STAY)
)
"""Python's own exceptions, which are the same in both jails."""
_printed = io.BytesIO()
_stdout = io.TextIOWrapper(_printed, "utf-8", "surrogateescape")
PLAIN_BASES = (int, float, str, bytes, tuple, list, dict, set, frozenset)


def run(program: dict[str, Any]) -> None:
    module = harness.new_module("solution")
    objects = CandidateObjects(module)
    names: dict[str, Any] = {}

    def load() -> None:
        harness.execute(program, module)
        names.update(objects.names())
        if (wanted := program["entry_point"]) and wanted not in module.__dict__:
            with suppress(NameError):  # the tests may do without it
                names[wanted] = objects.pack(harness.entry_point(module, wanted))

    sys.stdout = _stdout
    error = harness.guard(load)
    printed()  # the tests cannot have asked for it
    harness.write_frame({"error": error} if error else {"ok": None})
    if not error:
        write(names)
        objects.serve()


def write(message: dict[str, Any]) -> None:
    """Sends a message, and with it what was printed since the one before."""
    if text := printed():
        message["printed"] = text
    harness.write_frame(message, harness.LINK_FD)


def printed() -> str:
    with suppress(ValueError):  # the program has closed it
        _stdout.flush()
        if text := _printed.getvalue()[:OUTPUT_BYTES]:
            _printed.seek(0)
            _printed.truncate()
            return text.decode("utf-8", "replace")
    return ""


def read() -> Any:
    return harness.read_frame(harness.LINK_FD)


class CandidateObjects:
    """The candidate's objects by number, and what the tests may do with them."""

    def __init__(self, module: types.ModuleType) -> None:
        self.module = module
        self.objects: list[object] = []
        self.numbers: dict[int, int] = {}
        self.shared: dict[int, shared_objects.Shared] = {}  # the tests' objects by their numbers: `is` must see the same one

    def names(self) -> dict[str, Any]:
        """What the module defines, as the tests will see it."""
        return {
            name: self.pack(value)
            for name, value in self.module.__dict__.items()
            if not name.startswith("__") and not isinstance(value, types.ModuleType)
        }

    def serve(self) -> None:
        while True:
            self.answer(read())

    def answer(self, request: dict[str, Any]) -> None:
        try:
            args = [self.unpack(item) for item in request["args"]]
            kwargs = {name: self.unpack(item) for name, item in request.get("kwargs", {}).items()}
            if request["do"] == "await":
                result = self.event_loop.run_until_complete(*args)
            else:
                result = OPERATIONS[request["do"]](*args, **kwargs)
            changed = (*args, *kwargs.values())
            back = [self.pack(item) if type(item) in transfer.MUTABLE else None for item in changed]
            reply = {"ok": self.pack(result), "back": back}
        except harness.ChannelClosed:
            raise
        except FATAL:
            harness.leave(1)
        except StopIteration as error:
            reply = (
                {"exhausted": True, "value": self.pack(error.value)}
                if request["do"] == "next"
                else self.failure(RuntimeError(f"StopIteration: {error.value!r}"))
            )
        except StopAsyncIteration:
            reply = {"exhausted": True}
        except BaseException as error:  # noqa: BLE001 - whatever the candidate raises is an answer
            reply = self.failure(error)
        write(reply)

    def failure(self, error: BaseException) -> dict[str, Any]:
        if isinstance(error, shared_objects.Failed):
            return {"raise": {"callback": error.kestrel_number}}
        classes = self.exception_classes(type(error))
        try:
            args = self.pack(error.args)
        except (TypeError, ValueError):
            args = self.pack((harness.describe(error),))
        return {"raise": {"classes": classes, "args": args, "object": self.number(error)}}

    @cached_property
    def event_loop(self) -> "asyncio.AbstractEventLoop":
        """The loop for every coroutine that the tests await: one, so that locks and tasks survive from one to the next."""
        import asyncio  # here, because most tests await nothing

        return asyncio.new_event_loop()

    def number(self, value: object) -> int:
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        return self.numbers[id(value)]

    def pack(self, value: object) -> Any:
        return transfer.pack(value, self.wrap)

    def wrap(self, value: object) -> dict[str, Any]:
        if isinstance(value, shared_objects.Shared | shared_objects.Failed):
            return {"__fn__": value.kestrel_number}
        classes = [self.number(cls) for cls in type(value).__mro__ if cls is not object]
        body: dict[str, Any] = {"n": self.number(value), "classes": classes}
        if type(value).__name__ in transfer.PYTHON_KINDS:
            body["kind"] = type(value).__name__
        if isinstance(value, type):
            body["kind"] = "type"
            body["name"] = value.__name__
            if issubclass(value, CROSSING_EXCEPTIONS):
                body["exception"] = self.exception_classes(value)
        elif isinstance(value, PLAIN_BASES):
            body.update(name=type(value).__name__, data=self.pack(_plain_data(value)))
        elif isinstance(value, types.CoroutineType):
            body["coroutine"] = True
        return {"__ref__": body}

    def exception_classes(self, kind: type) -> list[list[Any]]:
        """An exception's class and its bases, up to one of Python's own. A class of the library is named once more, with its
        module: the tests may know it."""
        classes: list[list[Any]] = []
        for cls in kind.__mro__:
            if cls in CROSSING_EXCEPTIONS:
                return [*classes, [-1, cls.__name__]]
            classes.append([self.number(cls), cls.__name__])
            if getattr(sys.modules.get(cls.__module__), cls.__name__, None) is cls:
                classes.append([-1, f"{cls.__module__}.{cls.__name__}"])
        return classes

    def unpack(self, data: Any) -> Any:
        return transfer.unpack(data, self.resolve)

    def resolve(self, tag: str, body: Any) -> object:
        if tag == "__ref__":
            return self.objects[body]
        number, kind, *rest = body
        if kind == "exception":
            return shared_objects.failure(number, *rest)
        if number not in self.shared:
            self.shared[number] = shared_objects.KINDS[kind](self, number, *rest)
        return self.shared[number]

    def ask(self, number: int, operation: str, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        """What an operation with an object of the tests' gives there."""
        packed = {name: self.pack(value) for name, value in kwargs.items()}
        write({"callback": number, "do": operation, "args": [self.pack(value) for value in args], "kwargs": packed})
        while True:
            message = read()
            if "answer" in message:
                return self.unpack(message["answer"])
            if "exhausted" in message:
                raise StopIteration
            if "failed" in message:
                raise shared_objects.failure(message["failed"], message["kind"], message["text"])
            self.answer(message)


def _plain_data(value: Any) -> object:
    """The real contents of an instance of a subclass, whatever its methods say."""
    if isinstance(value, dict):
        return dict(dict.items(value))
    if isinstance(value, int):
        return int.__index__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bytes):
        return bytes.__getitem__(value, slice(None)) + b""
    for base in (tuple, list, set, frozenset):
        if isinstance(value, base):
            return base(base.__iter__(value))  # type: ignore[arg-type]
    raise TypeError("not a plain value")


def _enter(manager: Any) -> object:
    return type(manager).__enter__(manager)


def _exit(manager: Any, error: BaseException | None) -> object:
    return type(manager).__exit__(manager, None if error is None else type(error), error, None)


async def _aenter(manager: Any) -> object:
    return await type(manager).__aenter__(manager)


async def _aexit(manager: Any, error: BaseException | None) -> object:
    return await type(manager).__aexit__(manager, None if error is None else type(error), error, None)


OPERATIONS: dict[str, Callable[..., object]] = {
    "call": lambda function, *args, **kwargs: function(*args, **kwargs),
    "getattr": getattr, "setattr": setattr, "delattr": delattr, "dir": dir, "plain": _plain_data,
    "repr": repr, "str": str, "format": format, "hash": hash, "bool": bool, "len": len, "iter": iter, "next": next,
    "reversed": reversed, "isinstance": isinstance, "issubclass": issubclass, "round": round, "divmod": divmod, "int": int,
    "float": float, "complex": complex, "index": operator.index, "enter": _enter, "exit": _exit, "pow": pow,
    "type": type, "callable": callable, "copy": copy.copy, "deepcopy": copy.deepcopy,
    "aiter": aiter, "anext": anext, "aenter": _aenter, "aexit": _aexit,
    "getitem": operator.getitem, "setitem": operator.setitem, "delitem": operator.delitem, "contains": operator.contains,
    **{name: getattr(operator, name) for name in (
        "add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "lshift", "rshift", "and_", "or_", "xor", "neg", "pos",
        "abs", "invert", "eq", "ne", "lt", "le", "gt", "ge", "iadd", "isub", "imul", "imatmul", "itruediv",
        "ifloordiv", "imod", "ipow", "ilshift", "irshift", "iand", "ior", "ixor",
    )},
}  # fmt: skip
