"""The tests' side of an `asserts` job: runs test code in a jail of its own, where the candidate is a set of proxies.

The test code is the problem's and is trusted; what comes from the candidate is not. It can only become plain data, a `Proxy`, or
an exception of a known kind. What a candidate could otherwise fake is refused here:

- an object of its own equals no plain data, and is neither ordered nor added to it, unless the tests name its class;
- StopIteration of a call arrives as RuntimeError, so that it cannot end an `all(map(...))` early;
- its death is no exception: it ends this side too.

The judge says {"run": code, …} for each unit of tests and gets {"done": {"passed": …, "error": …, "lost": …}}; in between this
side asks the candidate (`serve`) over the link. `lost`: this candidate is gone, or can be asked nothing more. At least one test
has to run for a unit to pass.
"""

import io
import types
import unittest
from typing import Any, NoReturn

from reward.jail import codec, harness, proxy, pytest_stand_in, shared_objects, transfer
from reward.jail.candidate import CROSSING_EXCEPTIONS

MAX_REPLY_BYTES = 1 << 20
MAX_MESSAGES = 100_000  # with one candidate
_BUILTIN = {cls.__name__: cls for cls in CROSSING_EXCEPTIONS}


def run(program: dict[str, Any]) -> None:
    module = harness.new_module("tests")
    pytest_stand_in.offer()
    link = Link(set(program["named"]))
    module.__dict__.update(link.names())
    entry = module.__dict__.get(program["entry_point"])
    error = harness.guard(lambda: exec(compile(program["setup"], "setup.py", "exec"), module.__dict__))
    if entry is not None:  # what the setup defines of the prompt's own is the tests', but not what is to be tested
        module.__dict__[program["entry_point"]] = entry
    harness.write_frame({"error": f"setup: {error}"} if error else {"ok": None})
    for _ in range(0 if error else program["units"]):
        order = harness.read_frame()
        names = dict(module.__dict__)
        failure = harness.guard(lambda order=order, names=names: run_unit(order, names, program["entry_point"]))  # type: ignore[misc]
        harness.write_frame({"done": {"passed": not failure, "error": failure}})


def run_unit(order: dict[str, Any], names: dict[str, Any], entry_point: str) -> None:
    """Raises what the first failing test raises."""
    before = dict(names)
    exec(compile(order["run"], harness.TESTS, "exec"), names)
    defined = {name: value for name, value in names.items() if before.get(name) is not value}
    ran = _run_check(defined, names, entry_point) + _run_cases(defined) + _run_functions(defined)
    if not ran and not order["inline"]:
        raise AssertionError("no test ran")


def _run_check(defined: dict[str, Any], names: dict[str, Any], entry_point: str) -> int:
    """`check(candidate)`, as HumanEval has it."""
    if not callable(check := defined.get("check")) or not entry_point:
        return 0
    check(names[entry_point])
    return 1


def _run_cases(defined: dict[str, Any]) -> int:
    cases = [value for value in defined.values() if isinstance(value, type) and issubclass(value, unittest.TestCase)]
    if not cases:
        return 0
    suite = unittest.TestSuite(unittest.defaultTestLoader.loadTestsFromTestCase(case) for case in cases)
    result = unittest.TextTestRunner(stream=io.StringIO(), failfast=True).run(suite)
    for _, text in (*result.failures, *result.errors):
        raise AssertionError(text.strip().splitlines()[-1])
    if result.unexpectedSuccesses:
        raise AssertionError("a test passed that should not")
    return result.testsRun - len(result.skipped) - len(result.expectedFailures)


def _run_functions(defined: dict[str, Any]) -> int:
    ran = 0
    for name, function in defined.items():
        if name.startswith("test") and isinstance(function, types.FunctionType):
            for arguments in pytest_stand_in.cases(function):
                function(**arguments)
                ran += 1
    return ran


class Link:
    """The way to the candidate, and what both sides have named so far."""

    def __init__(self, named: set[str]) -> None:
        self.named_words = named
        self.named_classes: set[int] = set()
        self.proxies: dict[int, Any] = {}
        self.exceptions: dict[int, type[BaseException]] = {}
        self.ours: list[object] = []  # functions and objects of the tests that the candidate may hold
        self.raised: list[BaseException] = []  # by callbacks
        self.messages = 0

    def names(self) -> dict[str, Any]:
        """What the candidate defines, by name."""
        return {str(name): self.unpack(packed) for name, packed in self.read().items()}

    def ask(self, operation: str, *args: object, **kwargs: object) -> Any:
        packed = {name: self.pack(value) for name, value in kwargs.items()}
        self.write({"do": operation, "args": [self.pack(value) for value in args], "kwargs": packed})
        while True:
            reply = self.read()
            if "callback" in reply:
                self.call_back(reply)
            elif "ok" in reply:
                self.take_back(args, reply.get("back"))
                return self.unpack(reply["ok"])
            elif reply.get("exhausted") and operation == "next":
                raise StopIteration
            elif isinstance(reply.get("raise"), dict):
                raise self.exception(reply["raise"])
            else:
                self.give_up("the candidate's answer is none")

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
        try:
            answer = {"answer": self.pack(operation(subject, *args, **kwargs))}
        except BaseException as error:  # noqa: BLE001 - it comes back as itself, through the candidate
            if isinstance(error, StopIteration) and request["do"] == "next":
                answer = {"exhausted": True}
            else:
                self.raised.append(error)
                kind = next(cls.__name__ for cls in type(error).__mro__ if cls in CROSSING_EXCEPTIONS or cls is BaseException)
                answer = {"failed": len(self.raised) - 1, "kind": kind}
        self.write(answer)

    def take_back(self, args: tuple[object, ...], back: object) -> None:
        """Changes that the call made to its arguments."""
        for mine, theirs in zip(args, back if isinstance(back, list) else (), strict=False):
            if theirs is None:
                continue
            new = self.unpack(theirs)
            if isinstance(mine, list | bytearray) and type(new) is type(mine):
                mine[:] = new
            elif isinstance(mine, dict | set) and type(new) is type(mine):
                mine.clear()
                mine.update(new)

    def exception(self, body: dict[str, Any]) -> BaseException:
        try:
            if "callback" in body:
                return self.raised[body["callback"]]
            cls = self.exception_class([(int(number), str(name)) for number, name in body["classes"]])
            args, number = self.unpack(body["args"]), int(body["object"])
            error = cls(*args) if type(args) is tuple else cls(args)
        except (LookupError, TypeError, ValueError):
            self.give_up("the candidate raised what is no exception")
        error.__dict__["candidate"] = proxy.Proxy(self, number, -1, plain=False)
        return error

    def exception_class(self, chain: list[tuple[int, str]]) -> type[BaseException]:
        """A class of this side for an exception of the candidate's: the same for the same, whatever name it goes by."""
        number, name = chain[0]
        if number < 0 or len(chain) == 1:
            return _BUILTIN.get(name, Exception)
        if number not in self.exceptions:
            base = self.exception_class(chain[1:])
            self.exceptions[number] = type(name, (base,), {"__init__": _any_arguments, "__getattr__": _of_candidate})
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
        for number, cls in self.exceptions.items():
            if cls is value:
                return {"__ref__": number}
        for number, known in enumerate(self.ours):
            if known is value:
                return {"__fn__": [number, shared_objects.kind_of(value)]}
        self.ours.append(value)
        return {"__fn__": [len(self.ours) - 1, shared_objects.kind_of(value)]}

    def resolve(self, tag: str, body: Any) -> object:
        try:
            if tag == "__fn__":
                return self.ours[body]
            number, cls, name = int(body["n"]), int(body["class"]), str(body.get("name", ""))
            if name in self.named_words:
                self.named_classes.add(number)
            if builtin := body.get("exception"):
                chain = [(number, name), *((int(base["n"]), str(base["name"])) for base in body["bases"]), (-1, str(builtin))]
                return self.exception_class(chain)
        except (LookupError, TypeError, ValueError, AttributeError):
            raise codec.CodecError("a reference to nothing") from None
        if number not in self.proxies:
            self.proxies[number] = proxy.Proxy(self, number, cls, plain=body.get("plain") is True)
        return self.proxies[number]

    def is_named(self, cls: int) -> bool:
        return cls in self.named_classes


def _any_arguments(self: BaseException, *args: object, **kwargs: object) -> None:
    BaseException.__init__(self, *args)


def _of_candidate(self: BaseException, name: str) -> Any:
    """An attribute that only the candidate's own object has."""
    if name.startswith("__") or "candidate" not in self.__dict__:
        raise AttributeError(name)
    return getattr(self.__dict__["candidate"], name)
