"""The tests' side of an `asserts` job: runs test code in a jail of its own, where the candidate is a set of proxies.

The test code is the problem's and is trusted; what comes from the candidate is not. It can only become plain data, a `Proxy`, or
an exception of a known kind. What a candidate could otherwise fake is refused here:

- a name that it defines is bound only where the tests can mean nothing else by it (`reward.kinds.interface`);
- an object of its own equals no plain data and is neither ordered nor added to it, unless the problem declares its class;
- a call that returns a value changes nothing that the tests have passed to it, for they may compute from it what they expect;
  only what they visibly look at afterwards is changed (`reward.kinds.in_place`);
- StopIteration of a call arrives as RuntimeError, so that it cannot end an `all(map(...))` early;
- a context manager of its own swallows no failed assertion, nor any exception that its values cause;
- its death is no exception: it ends this side too.

For each unit of tests the judge sends {"run": code, "names": [...], ...} and gets {"done": {"passed", "error", "lost"}}. In
between, this side asks the candidate (`candidate_objects.py`) over the link. `lost` means that the candidate is gone, or can be
asked nothing more. At least one test has to run for a unit to pass.
"""

import ast
import builtins
import copy
import importlib
import io
import itertools
import sys
import threading
import types
import unittest
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, NoReturn

from reward.jail import codec, harness, proxy, pytest_run, pytest_stand_in, shared_objects, transfer
from reward.jail.candidate_objects import CROSSING_EXCEPTIONS, PLAIN_BASES

MAX_REPLY_BYTES = 64 << 20  # the memory limit of this jail holds before that
MAX_MESSAGES = 1_000_000  # with one candidate
_ASKED = {"type": 1, "callable": 1, "isinstance": 2}  # functions that ask a proxy itself, with their number of arguments
_PREFIX = "kestrel_"  # the tests call them by their names with this in front
_INNER = ("<lambda>", "<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
_STEERING = (
    StopIteration,
    StopAsyncIteration,
    unittest.SkipTest,
    KeyboardInterrupt,
)  # could end a loop of the tests
_CHANGES = ("call", "setattr", "delattr", "setitem", "delitem")
_BUILTIN = {cls.__name__: cls for cls in CROSSING_EXCEPTIONS}


def run(program: dict[str, Any]) -> None:
    module = harness.new_module("tests")
    pytest_stand_in.offer()
    link = Link()
    _offer_solution(link)
    entry_point = program["entry_point"]
    module.__dict__.update(link.bind(program))
    error = harness.guard(lambda: exec(compile(program["setup"], "setup.py", "exec"), module.__dict__))
    harness.write_frame({"error": f"setup: {error}"} if error else {"ok": None})
    for _ in range(0 if error else program["units"]):
        order = harness.read_frame()
        names = {**link.bind(order), **module.__dict__}
        names |= {f"{_PREFIX}{name}": getattr(link, f"ask_{name}") for name in _ASKED}
        failure = harness.guard(lambda order=order, names=names: run_unit(order, names, entry_point))  # type: ignore[misc]
        failure = failure or ("" if link.was_asked(order["names"]) else "the tests asked nothing of the code")
        harness.write_frame({"done": {"passed": not failure, "error": failure}})


def _offer_solution(link: "Link") -> None:
    """Makes `from solution import f` find the candidate's names."""

    def find(name: str) -> Any:
        if name.startswith("_") or name not in link.defined:
            raise AttributeError(name)
        return link.value(name)

    module = types.ModuleType("solution")
    module.__dict__["__getattr__"] = find
    sys.modules["solution"] = module


def run_unit(order: dict[str, Any], names: dict[str, Any], entry_point: str) -> None:
    """Raises what the first failing test raises."""
    names["__name__"] = "__main__"  # code under this condition is part of the tests
    before = dict(names)
    main, unittest.main = unittest.main, lambda *_, **__: None  # type: ignore[assignment]  # it would end the process
    try:
        exec(compile(_asking(order["run"]), harness.TESTS, "exec"), names)
    finally:
        unittest.main = main  # jobs of other kinds are forks of what has run this
    defined = {name: value for name, value in names.items() if before.get(name) is not value}
    ran = _run_check(defined, names, entry_point) + _run_cases(defined) + pytest_run.run(defined, names, _finish)
    if not ran and not order["inline"]:
        raise AssertionError("no test ran")


def _asking(code: str) -> ast.Module | str:
    """Test code that asks the candidate's jail what an object is: where it calls `type(x)`, `callable(x)` or `isinstance(x, C)`,
    or reads `x.__class__`."""
    if "__class__" not in code and not any(f"{name}(" in code for name in _ASKED):
        return code  # a tree of Python's objects costs more than most tests
    return ast.fix_missing_locations(_Asking().visit(ast.parse(code, harness.TESTS)))


class _Asking(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and len(node.args) == _ASKED.get(node.func.id) and not node.keywords:
            node.func = ast.copy_location(ast.Name(id=_PREFIX + node.func.id, ctx=ast.Load()), node.func)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr != "__class__" or not isinstance(node.ctx, ast.Load):
            return node
        function = ast.Name(id=f"{_PREFIX}type", ctx=ast.Load())
        return ast.copy_location(ast.Call(func=function, args=[node.value], keywords=[]), node)


def _run_check(defined: dict[str, Any], names: dict[str, Any], entry_point: str) -> int:
    """`check(candidate)`, as HumanEval has it."""
    if not callable(check := defined.get("check")) or not entry_point:
        return 0
    _finish(check(names[entry_point]))
    return 1


def _finish(result: object) -> None:
    """Runs the rest of a test that is a coroutine: until then it has tested nothing. What else a test returns is a mistake if it
    means that the test has not run, or has not passed."""
    if isinstance(result, types.GeneratorType | types.AsyncGeneratorType) or result is False:
        raise AssertionError("a test yields or returns False: it must assert")
    if isinstance(result, types.CoroutineType):
        import asyncio  # here, because most tests need none

        asyncio.run(result)


def _run_cases(defined: dict[str, Any]) -> int:
    cases = [value for value in defined.values() if _is_class(value) and issubclass(value, unittest.TestCase)]
    if not cases:
        return 0
    suite = unittest.TestSuite(unittest.defaultTestLoader.loadTestsFromTestCase(case) for case in cases)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="It is deprecated to return a value")  # a coroutine that nobody awaits
        result = unittest.TextTestRunner(stream=io.StringIO(), failfast=True).run(suite)
    for _, text in (*result.failures, *result.errors):
        raise AssertionError(text.strip().splitlines()[-1])
    if result.unexpectedSuccesses:
        raise AssertionError("a test passed that should not")
    return result.testsRun - len(result.skipped) - len(result.expectedFailures)


def _is_class(value: object) -> bool:
    return issubclass(type(value), type)  # a proxy of a class is an instance of `type` for `isinstance`


class Link:
    """The way to the candidate, and every object that one side has shown to the other."""

    def __init__(self) -> None:
        self.declared: dict[int, set[str]] = {}  # by the numbers of classes: their operators that count
        self.named: set[int] = set()  # numbers of what the tests name
        self.proxies: dict[int, Any] = {}
        self.copy_classes: dict[int, type[proxy.DataCopy]] = {}
        self.exceptions: dict[int, type[BaseException]] = {}
        self.copies: dict[int, proxy.DataCopy] = {}
        self.ours: list[object] = []  # objects of the tests that the candidate may hold, and exceptions that go through it
        self.our_numbers: dict[int, int] = {}  # the number of each of these objects, by its id
        self.undo: list[Callable[[], None]] = []  # one for each change that the candidate may have made to an object of the tests
        self.in_place: set[tuple[str, str]] = set()  # functions of the tests, and variables that they look at after a call
        self.items: dict[int, Any] = {}  # what objects have shown when they were iterated, until the next call
        self.failed: AssertionError | None = None  # inside of a callback: no candidate swallows it
        self.lock = threading.RLock()
        self.awaited = 0  # coroutines of the tests that the candidate waits for
        self.messages = self.before_unit = 0
        self.code = ""  # not in `linecache`: a stack that the candidate has formatted would show the lines of the tests
        self.defined = self.read()  # what the candidate defines, by name

    def bind(self, order: dict[str, Any]) -> dict[str, Any]:
        """The names that some test code takes from the candidate, and what it takes from the library without an import."""
        self.before_unit = self.messages
        self.code = order.get("run", "")
        self.in_place = {(function, name) for function, name in order["in_place"]}
        self.declared = {}
        for name, operation in order["operators"]:
            for number in self.numbers([name]):
                self.declared.setdefault(number, set()).add(operation)
        self.named = set(self.numbers(order["names"]))
        names = {name: _not_everything(self.value(name)) for name in order["names"] if name in self.defined}
        names |= {name: getattr(importlib.import_module(module), name) for name, module in order["library"].items()}
        return names | {name: self.module(name, module) for name, module in order["modules"].items()}

    def ask_callable(self, value: object) -> bool:
        return self.ask("callable", value) is True if proxy.is_proxy(value) else callable(value)

    def ask_isinstance(self, value: object, cls: Any) -> bool:
        if isinstance(cls, tuple):
            return any(self.ask_isinstance(value, one) for one in cls)
        if proxy.is_proxy(value) and _is_class(cls) and cls.__module__ == "collections.abc":
            return self.ask("isinstance", value, cls) is True
        return isinstance(value, cls)

    def ask_type(self, value: object) -> Any:
        """The class of a value, which is the candidate's for an object of its own."""
        if isinstance(value, proxy.DataCopy):
            return self.ask_type(value.kestrel_original)
        if not proxy.is_proxy(value):
            return type(value)
        if not proxy.is_proxy(cls := self.ask("type", value)):
            self.give_up("the candidate's class is none")
        return cls

    def numbers(self, names: list[str]) -> list[Any]:
        """The numbers of the candidate's objects that have these names."""
        refs = [self.defined[name].get("__ref__") for name in names if isinstance(self.defined.get(name), dict)]
        return [ref.get("n") for ref in refs if isinstance(ref, dict)]

    def was_asked(self, names: list[str]) -> bool:
        """Whether the unit has asked the candidate anything, or takes a value from it that is there without asking."""
        values = (self.defined[name] for name in names if name in self.defined)
        return self.messages > self.before_unit or not all(isinstance(value, dict) and "__ref__" in value for value in values)

    def module(self, name: str, module: str) -> object:
        """The standard module of a name; or a standard type, which code may import under the same name, as `datetime`."""
        value = self.value(name) if name in self.defined else None
        return value if _is_class(value) else importlib.import_module(module)

    def value(self, name: str) -> Any:
        return self.unpack(self.defined[name])

    def ask(self, operation: str, *args: object, **kwargs: object) -> Any:
        """What the candidate answers. One thread of the tests asks at a time; a coroutine that it waits for runs in another."""
        with nullcontext() if self.awaited else self.lock:
            return self._ask(operation, *args, **kwargs)

    def _ask(self, operation: str, *args: object, **kwargs: object) -> Any:
        before = len(self.undo)
        if operation in _CHANGES:
            self.items.clear()
        packed = {name: self.pack(value) for name, value in kwargs.items()}
        self.write({"do": operation, "args": [self.pack(value) for value in args], "kwargs": packed})
        args = (*args, *kwargs.values())
        while True:
            reply = self.read()
            if "callback" in reply:
                self.call_back(reply)
            elif self.failed is not None:
                failed, self.failed = self.failed, None
                raise failed
            elif "ok" in reply:
                result = self.unpack(reply["ok"])
                if result is None or id(result) in self.our_numbers:
                    self.take_back(args, reply.get("back"))
                else:
                    changed = self.looked_at(args)
                    self.take_back(changed, reply.get("back"))
                    if all(arg is None for arg in changed):
                        self.undo_since(before)
                return result
            elif reply.get("exhausted") and operation == "next":
                raise StopIteration(self.unpack(reply.get("value")))
            elif reply.get("exhausted") and operation == "await":
                raise StopAsyncIteration
            elif isinstance(reply.get("raise"), dict):
                raise self.exception(reply["raise"])
            else:
                self.give_up("the candidate's answer is none")

    def iterate(self, value: proxy.Proxy) -> Iterator[Any]:
        """The items of an object. One whose class the tests do not name shows the same items each time."""
        found = self.ask("iter", value)
        if not proxy.is_proxy(found) or found is value or self.is_named(value):
            return iter(found) if not proxy.is_proxy(found) else found
        # A generator, because `tee` copies an iterator that has `__copy__`, as a proxy does, and then keeps no items.
        (kept,) = itertools.tee((item for item in found), 1)
        return copy.copy(self.items.setdefault(proxy.number_of(value), kept))

    def read(self) -> dict[str, Any]:
        self.messages += 1
        if self.messages > MAX_MESSAGES:
            self.give_up(f"more than {MAX_MESSAGES} messages between the tests and the code")
        try:
            reply = harness.read_frame(harness.LINK_FD, at_most_bytes=MAX_REPLY_BYTES)
        except harness.FrameTooLong:
            self.give_up(f"the candidate's answer is longer than {MAX_REPLY_BYTES} bytes")
        except (harness.ChannelClosed, ConnectionError):
            self.give_up("the program ended itself")
        except (ValueError, RecursionError):
            self.give_up("the candidate's answer is not JSON")
        if not isinstance(reply, dict):
            self.give_up("the candidate's answer is not an object")
        if "printed" in reply and sys.stdout is not sys.__stdout__:  # the tests look at what is printed
            sys.stdout.write(str(reply["printed"]))
        return reply

    def write(self, message: dict[str, Any]) -> None:
        try:
            harness.write_frame(message, harness.LINK_FD)
        except OSError:
            self.give_up("the program ended itself")

    def give_up(self, reason: str) -> NoReturn:
        """No exception, which a test could swallow."""
        harness.write_frame({"done": {"passed": False, "error": reason, "lost": True}})
        harness.leave(1)

    def call_back(self, request: dict[str, Any]) -> None:
        try:
            subject, operation = self.ours[request["callback"]], shared_objects.OPERATIONS[request["do"]]
            args = [self.unpack(item) for item in request["args"]]
            kwargs = {name: self.unpack(item) for name, item in request["kwargs"].items()}
        except (LookupError, TypeError, AttributeError):
            self.give_up("the candidate calls what it was not given")
        if request["do"] == "setattr":
            self.undo.append(partial(_restore, subject, args[0], getattr(subject, args[0], None)))
        elif (container := shared_objects.container_of(subject)) is not None and request["do"] in ("call", "getattr", "setitem"):
            self.undo.append(partial(shared_objects.refill, container, copy.copy(container)))
        self.awaited += request["do"] == "await"
        try:
            answer = {"answer": self.pack(operation(subject, *args, **kwargs))}
        except BaseException as error:  # noqa: BLE001 - it comes back as itself, through the candidate
            if isinstance(error, StopIteration) and request["do"] == "next":
                answer = {"exhausted": True}
            else:
                self.failed = error if isinstance(error, AssertionError) else self.failed
                number, _, kind, text = self.share_error(error)
                answer = {"failed": number, "kind": kind, "text": text}
        self.awaited -= request["do"] == "await"
        self.write(answer)

    def share_error(self, error: BaseException) -> tuple[int, str, str, str]:
        """An exception of the tests as the candidate gets it: to catch, and to raise again as itself."""
        number = self.share(error)
        kind = next(cls.__name__ for cls in type(error).__mro__ if cls in CROSSING_EXCEPTIONS or cls is BaseException)
        return number, "exception", kind, "" if isinstance(error, AssertionError) else str(error)

    def leave_context(self, manager: proxy.Proxy, error: BaseException | None) -> bool:
        """Ends a `with` block on a context manager of the candidate; whether it swallows the block's exception."""
        if error is None:
            self.ask("exit", manager, None)
            return False
        if not _is_of_tests_making(error, self.code):
            with suppress(Exception):  # what the tests have raised counts, whatever the manager makes of it
                self.ask("exit", manager, error)
            return False
        return self.ask("exit", manager, error) is True

    async def leave_async_context(self, manager: proxy.Proxy, error: BaseException | None) -> bool:
        """The same for `async with`."""
        if error is None:
            await self.ask("aexit", manager, None)
            return False
        if not _is_of_tests_making(error, self.code):
            with suppress(Exception):
                await self.ask("aexit", manager, error)
            return False
        return await self.ask("aexit", manager, error) is True

    def undo_since(self, before: int) -> None:
        """Undoes all changes to the tests' objects after the first `before` changes."""
        while len(self.undo) > before:
            self.undo.pop()()

    def looked_at(self, args: tuple[object, ...]) -> list[object]:
        """The arguments of a call whose changes the tests look at, and None in place of every other."""
        here = _frame_of_tests() if self.in_place else None
        if here is None:
            return [None] * len(args)
        variables = {**here.f_globals, **here.f_locals}
        names = [name for function, name in self.in_place if function == here.f_code.co_name and name in variables]
        return [arg if any(variables[name] is arg for name in names) else None for arg in args]

    def take_back(self, args: Sequence[object], back: object) -> None:
        for mine, theirs in zip(args, back if isinstance(back, list) else (), strict=False):
            if theirs is None:
                continue
            changed: Any = mine
            new: Any = self.unpack(theirs)
            kind = type(mine)
            if kind in transfer.MUTABLE and kind is type(new):
                changed.clear()
                (changed.update if issubclass(kind, dict | set) else changed.extend)(new)

    def exception(self, body: dict[str, Any]) -> BaseException:
        try:
            if "callback" in body:
                return self.raised_by_tests(self.ours[body["callback"]])
            cls = self.exception_class([(int(number), str(name)) for number, name in body["classes"]])
            args, number = self.unpack(body["args"]), int(body["object"])
            error = cls(*args) if type(args) is tuple else cls(args)
        except (LookupError, TypeError, ValueError):
            self.give_up("the candidate raised what is no exception")
        error.__dict__["candidate"] = proxy.Proxy(self, number, frozenset(), holds_data=False)
        return error

    def raised_by_tests(self, value: object) -> BaseException:
        if not isinstance(value, BaseException):
            raise TypeError("no exception")
        return RuntimeError(f"{type(value).__name__}: {value}") if isinstance(value, _STEERING) else value

    def exception_class(self, chain: list[tuple[int, str]]) -> type[BaseException]:
        """A class of this side for an exception of the candidate's: the same for the same, whatever name it goes by."""
        if not chain:
            return Exception
        number, name = chain[0]
        if number < 0:
            return _BUILTIN.get(name) or _of_library(name) or self.exception_class(chain[1:])
        if number not in self.exceptions:
            base = self.exception_class(chain[1:])
            methods = {"__init__": _any_arguments, "__getattr__": _of_candidate, "__str__": _text}
            self.exceptions[number] = type(name, (base,), methods)
        return self.exceptions[number]

    def pack(self, value: object) -> Any:
        return transfer.pack(value, self.wrap)

    def unpack(self, data: Any) -> Any:
        try:
            return transfer.unpack(data, self.resolve)
        except codec.CodecError as error:
            self.give_up(f"the candidate returned {error}")

    def wrap(self, value: object) -> dict[str, Any]:
        if proxy.is_proxy(value):
            return {"__ref__": proxy.number_of(value)}
        if isinstance(value, proxy.DataCopy):
            return {"__ref__": proxy.number_of(value.kestrel_original)}
        if isinstance(value, BaseException) and "candidate" in value.__dict__:
            return {"__ref__": proxy.number_of(value.__dict__["candidate"])}
        for number, cls in self.exceptions.items():
            if cls is value:
                return {"__ref__": number}
        if isinstance(value, BaseException):
            return {"__fn__": self.share_error(value)}
        return {"__fn__": [self.share(value), *shared_objects.described(value)]}

    def share(self, value: object) -> int:
        """The number by which the candidate may ask for an object of the tests."""
        if id(value) not in self.our_numbers:
            self.our_numbers[id(value)] = len(self.ours)
            self.ours.append(value)
        return self.our_numbers[id(value)]

    def resolve(self, tag: str, body: Any) -> object:
        try:
            if tag == "__fn__":
                return self.ours[body]
            number, classes = int(body["n"]), [int(cls) for cls in body["classes"]]
            if chain := body.get("exception"):
                return self.exception_class([(int(number), str(name)) for number, name in chain])
        except (LookupError, TypeError, ValueError, AttributeError):
            raise codec.CodecError("a reference to nothing") from None
        if number not in self.proxies:
            kind = transfer.PYTHON_KINDS.get(body.get("kind"), proxy.Proxy)
            self.proxies[number] = proxy.Proxy(self, number, frozenset(classes), holds_data="data" in body, kind=kind)
        found = self.proxies[number]
        if body.get("coroutine"):
            return self.result_of(found)
        return found if "data" not in body or self.is_declared(found) else self.copy(found, classes[0], body)

    def copy(self, original: proxy.Proxy, cls: int, body: dict[str, Any]) -> proxy.DataCopy:
        """The real contents of an object whose class is a subclass of plain data."""
        data = self.unpack(body["data"])
        if type(data) not in PLAIN_BASES:
            raise codec.CodecError("a copy of what is no plain data")
        if cls not in self.copy_classes:
            self.copy_classes[cls] = proxy.copy_class(str(body["name"]), type(data))
        if not issubclass(self.copy_classes[cls], type(data)):
            raise codec.CodecError("a copy of another type than before")
        copied: Any = self.copy_classes[cls](data)  # type: ignore[call-arg]
        copied.kestrel_original = original
        is_mutable = isinstance(data, list | dict | set)
        return copied if is_mutable else self.copies.setdefault(proxy.number_of(original), copied)

    async def result_of(self, coroutine: proxy.Proxy) -> Any:
        return self.ask("await", coroutine)

    def is_declared(self, value: proxy.Proxy, operation: str = "") -> bool:
        """Whether the tests visibly use an operation on objects of this class, or any operation."""
        declared = (self.declared.get(number, ()) for number in (proxy.number_of(value), *value._kestrel_classes))
        return any(operation in names if operation else names for names in declared)

    def is_named(self, value: proxy.Proxy) -> bool:
        """Whether the tests name the object or its class."""
        return proxy.number_of(value) in self.named or not self.named.isdisjoint(value._kestrel_classes)


def _frame_of_tests() -> types.FrameType | None:
    """Where the tests, or a helper of the setup, are now."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and (frame.f_code.co_filename not in (harness.TESTS, "setup.py") or frame.f_code.co_name in _INNER):
        frame = frame.f_back
    return frame


class _Unraised(Exception):
    """In place of a class that would catch a failed assertion of the tests, where the candidate has a name for it."""


def _not_everything(value: Any) -> Any:
    """What an `except` of the tests may have from the candidate."""
    if isinstance(value, tuple):
        return type(value)(map(_not_everything, value)) if type(value) is tuple else value
    return _Unraised if _is_class(value) and issubclass(AssertionError, value) and value is not object else value


def _restore(subject: object, name: str, value: object) -> None:
    with suppress(AttributeError, TypeError):  # it cannot be set, and so was not
        setattr(subject, name, value)


def _is_of_tests_making(error: BaseException, code: str) -> bool:
    """Whether the tests raised an exception on their own: by a `raise`, or in a statement that has only literals and builtins.
    A failed assertion never counts as such."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or isinstance(error, AssertionError) or trace.tb_frame.f_code.co_filename != harness.TESTS:
        return False
    *around, statement = _statements_at(trace.tb_lineno, code)
    names_result = isinstance(statement, ast.Assign) and all(isinstance(target, ast.Name) for target in statement.targets)
    computed = statement.value if names_result else statement  # type: ignore[attr-defined]
    names = [node.id for node in ast.walk(computed) if isinstance(node, ast.Name)]
    is_meant = isinstance(statement, ast.Raise) or all(hasattr(builtins, name) for name in names)
    return is_meant and not _is_conditional(around)


def _is_conditional(around: list[ast.stmt]) -> bool:
    """Whether a statement inside these, which begin with the outermost, runs only under a condition inside its `with` block."""
    inner = list(itertools.takewhile(lambda node: not isinstance(node, ast.With | ast.AsyncWith), reversed(around)))
    return any(isinstance(node, ast.If) for node in inner)


def _statements_at(line: int, code: str) -> list[ast.stmt]:
    """The statements of the tests that hold a line, the innermost last."""
    holding = [
        node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    return sorted(holding, key=lambda node: node.lineno - (node.end_lineno or 0))


def _of_library(name: str) -> type[BaseException] | None:
    """An exception of a module of the standard library that the tests have loaded; none that changes how tests are run."""
    module, _, cls = name.rpartition(".")
    package = module.partition(".")[0]
    if package not in sys.stdlib_module_names or package in ("builtins", "unittest", "doctest"):
        return None
    found = getattr(sys.modules.get(module), cls, None)
    return found if isinstance(found, type) and issubclass(found, Exception) else None


def _any_arguments(self: BaseException, *args: object, **kwargs: object) -> None:
    BaseException.__init__(self, *args)


def _text(self: BaseException) -> str:
    """What the candidate's own class makes of it."""
    return str(self.__dict__["candidate"]) if "candidate" in self.__dict__ else BaseException.__str__(self)


def _of_candidate(self: BaseException, name: str) -> Any:
    """An attribute that only the candidate's own object has."""
    if name.startswith("__") or "candidate" not in self.__dict__:
        raise AttributeError(name)
    return getattr(self.__dict__["candidate"], name)
