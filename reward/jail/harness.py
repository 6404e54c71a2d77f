"""What runs inside a job, in the same process as the candidate's code: loads it, calls it, says what came back.

Nothing here is trusted by the judge. A candidate can read and rewrite all of it; what it cannot do is learn the expected
values, because they are not here. So the judge takes only data from the channel, and compares it outside.

The channel carries frames (4 bytes of length, then JSON). The judge sends the program, whose `kind` says what runs it (`stdio`
and `calls` here, the two halves of `asserts` in `candidate` and `tester`), and for `calls` as many calls as the program says. The
job sends {"ok": value} or {"error": text} for the program and for each call, and ends.
"""

import _sitebuiltins
import atexit
import builtins
import gc
import io
import json
import linecache
import os
import random
import sys
import threading
import types
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

from reward.jail import codec

CHANNEL_FD = 3  # to the judge
LINK_FD = 4  # between the two halves of an `asserts` job
SOLUTION, TESTS = "solution.py", "tests.py"
READ_BYTES = 1 << 16
_ERROR_CHARS = 300
LOOSE_ENDS = ("open", "IO", "Writer", "__del__", "finalize", "yield", "import *")
"""Without any of these words a program has no file and no destructor that only the collector would find; collecting is costly."""

_read, _write, _exit = os.read, os.write, os._exit
_dumps, _loads = json.JSONEncoder(separators=(",", ":")).encode, json.JSONDecoder().raw_decode
_unread = {CHANNEL_FD: bytearray(), LINK_FD: bytearray()}


def leave(status: int) -> NoReturn:
    _exit(status)


class ChannelClosed(Exception):
    """The other end wants nothing more, or is gone."""


class FrameTooLong(Exception):
    """A frame is announced that is longer than allowed."""


def read_frame(fd: int = CHANNEL_FD, *, at_most_bytes: int = 1 << 32) -> Any:
    unread, end = _unread[fd], 0
    while len(unread) < 4 or len(unread) < (end := 4 + int.from_bytes(unread[:4], "little")):
        if end > at_most_bytes:
            raise FrameTooLong
        if not (part := _read(fd, READ_BYTES)):
            raise ChannelClosed
        unread += part
    content = unread[4:end].decode()
    del unread[:end]
    return _loads(content)[0]


def write_frame(message: dict[str, Any], fd: int = CHANNEL_FD) -> None:
    write_bytes(frame(message), fd)


def frame(message: dict[str, Any]) -> bytes:
    data = _dumps(message).encode("ascii", "replace")
    return len(data).to_bytes(4, "little") + data


def write_bytes(data: bytes, fd: int = CHANNEL_FD) -> None:
    view = memoryview(data)
    while view:
        view = view[_write(fd, view) :]


DONE = frame({"ok": None})


def run(runners: Mapping[str, Callable[[dict[str, Any]], None]]) -> None:
    """Serves one job, from its first frame to the end of the process."""
    program = read_frame()
    runners[program["kind"]](program)
    _exit(0)


def run_script(program: dict[str, Any]) -> None:
    module = new_module("__main__")
    error = guard(lambda: execute(program, module), exit_is_fine=True)
    has_loose_ends = any(word in program["code"] for word in LOOSE_ENDS)
    error = guard(lambda: _finish(module, has_loose_ends)) or error
    write_bytes(frame({"error": error}) if error else DONE)


def serve_calls(program: dict[str, Any]) -> None:
    module = new_module("solution")
    function: list[Callable[..., object]] = []

    def load() -> None:
        execute(program, module)
        function.append(entry_point(module, program["entry_point"]))

    error = guard(load)
    write_bytes(frame({"error": error}) if error else DONE)
    for _ in range(0 if error else program["calls"]):
        write_frame(_call(function[0], read_frame()))


def _call(function: Callable[..., object], arguments: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {}

    def call() -> None:
        args = [codec.decode(item) for item in arguments["args"]]
        kwargs = {name: codec.decode(item) for name, item in arguments["kwargs"].items()}
        result = function(*args, **kwargs)
        if type(result) is types.CoroutineType:
            import asyncio  # preloaded where the sandbox is configured so; costs nothing otherwise

            result = asyncio.run(result)
        try:
            answer["ok"] = codec.encode(result)
        except codec.CodecError as error:
            answer.update(error=str(error), not_data=True)

    error = guard(call)
    return {"error": error} if error else answer


def execute(program: dict[str, Any], module: types.ModuleType) -> None:
    if program["setup"]:
        exec(compile(program["setup"], "setup.py", "exec"), module.__dict__)
    code = _compile(program["code"], trim=program["trim"])
    exec(code, module.__dict__)


def _compile(source: str, *, trim: bool) -> types.CodeType:
    """The program's code. With `trim`, prose after the last complete statement (a model that goes on talking) is cut off."""
    first_error: SyntaxError | None = None
    source = source.removeprefix("\ufeff")  # as Python reads a file
    for _ in range(3 if trim else 1):
        linecache.cache[SOLUTION] = (len(source), None, source.splitlines(keepends=True), SOLUTION)
        try:
            return compile(source, SOLUTION, "exec", dont_inherit=True)
        except SyntaxError as error:
            first_error = first_error or error
            source = "\n".join(source.split("\n")[: (error.lineno or 1) - 1])
            if not source.strip():
                break
    raise first_error or SyntaxError("nothing to compile")


def entry_point(module: types.ModuleType, name: str) -> Callable[..., object]:
    """`f`, a method as in `Solution.f`, or `f` of a class `Solution` where there is no function of that name."""
    owner, _, method = name.rpartition(".")
    if not owner and name not in module.__dict__ and hasattr(module.__dict__.get("Solution"), name):
        owner, method = "Solution", name
    if owner:
        cls = module.__dict__.get(owner)
        if not isinstance(cls, type) or not hasattr(cls, method):
            raise NameError(f"the code does not define {name}")
        return lambda *args, **kwargs: getattr(cls(), method)(*args, **kwargs)
    if name not in module.__dict__:
        raise NameError(f"the code does not define {name}")
    function = module.__dict__[name]
    if not callable(function):
        raise TypeError(f"{name} is not a function")
    return function


def guard(action: Callable[[], None], *, exit_is_fine: bool = False) -> str:
    """Runs `action`; the empty string, or what it raised in one line."""
    try:
        action()
    except SystemExit as error:
        return "" if exit_is_fine else f"SystemExit: {error.code!r}"[:_ERROR_CHARS]
    except ChannelClosed:
        _exit(0)
    except BaseException as error:  # noqa: BLE001 - whatever the candidate raises is an answer, not a fault of ours
        return describe(error)
    return ""


def describe(error: BaseException) -> str:
    try:
        text = f"{type(error).__name__}: {error}"
    except BaseException:  # noqa: BLE001 - a hostile __str__
        text = "an exception that cannot be printed"
    line = 0
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename in (SOLUTION, TESTS):
            line = trace.tb_lineno
        trace = trace.tb_next
    return (text[:_ERROR_CHARS] + (f" (line {line})" if line else "")).encode("ascii", "backslashreplace").decode()


def _finish(module: types.ModuleType, has_loose_ends: bool) -> None:
    """What the interpreter does at its end: waits for threads, runs atexit, flushes its streams and files that were left open."""
    if threading.active_count() > 1 or threading._threading_atexits:  # type: ignore[attr-defined]
        threading._shutdown()  # type: ignore[attr-defined]
    if atexit._ncallbacks():
        atexit._run_exitfuncs()
    guard(lambda: sys.stdout.flush())  # may be an object of the program's own, and its errors count for nothing
    sys.stdout = sys.__stdout__
    module.__dict__.clear()
    if has_loose_ends:
        gc.collect()
    with suppress(ValueError):  # closed, or detached from what it wrote to
        if sys.stdout is not None:
            sys.stdout.flush()


def fresh_interpreter() -> None:
    """Standard streams, arguments, seeds and builtins as a new interpreter would have them. A zygote does this once for all of
    its jobs; 0, 1 and 2 must be what they will be in a job: a file, a pipe, /dev/null."""
    sys.stdin = sys.__stdin__ = _standard_stream(0, "r", "surrogateescape")  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _standard_stream(1, "w", "surrogateescape")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _standard_stream(2, "w", "backslashreplace", line_buffering=True)  # type: ignore[misc]
    for unread in _unread.values():
        unread.clear()
    sys.argv = [SOLUTION]
    builtins.exit = _sitebuiltins.Quitter("exit", "Ctrl-D (i.e. EOF)")  # `python -S` leaves them out
    builtins.quit = _sitebuiltins.Quitter("quit", "Ctrl-D (i.e. EOF)")
    random.seed(0)  # the same completion gets the same verdict


def _standard_stream(fd: int, mode: str, errors: str, *, line_buffering: bool = False) -> io.TextIOWrapper:
    raw = io.FileIO(fd, mode, closefd=False)
    raw.name = ("<stdin>", "<stdout>", "<stderr>")[fd]
    buffered = io.BufferedReader(raw) if mode == "r" else io.BufferedWriter(raw)
    stream = io.TextIOWrapper(buffered, "utf-8", errors, line_buffering=line_buffering)
    stream.mode = mode  # type: ignore[misc]
    return stream


def new_module(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__["__file__"] = SOLUTION
    module.__dict__["__builtins__"] = builtins
    sys.modules[name] = sys.modules["__main__"] = module
    return module
