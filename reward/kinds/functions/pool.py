"""Runs users' reward functions and environments in processes that stay warm, with a deadline per call and a limit of memory.

Each process has a thread here that sends it several calls in one message and takes the answers as they come. The process works
them off in order. So a call that hangs, or that ends its process, is the first one without an answer: it alone gets a reason, the
process is replaced, and the other calls are sent again.

A call with a `home` belongs to an episode and always goes to the same process, which keeps the episode's state. If that process
ends during the call, the call is sent once more to the process that replaces it: it may have been killed from outside.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Set
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conf.schema import ConfigError
from conf.user_code import find
from reward.jail.limits import Cancelled
from reward.kinds.functions.frames import PROGRESS, Frames
from reward.kinds.functions.returned import Returned

log = logging.getLogger("reward")

ASK_S = 0.1  # a call that runs is checked this often: its deadline, its memory, whether it is still wanted
MOST_CALLS = 16  # in one message
IMPORT_S = 60.0  # deadline of the first import of a function's module
END_S = 5.0
QUEUE_S = 0.1  # a judge takes further completions while the calls that wait take no longer than this
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
PROJECT = Path(__file__).parents[3]


@dataclass(slots=True)
class _Call:
    function: str
    given: Mapping[str, Any]
    deadline_s: float
    home: int | None = None  # the number of its thread; None: any
    tries: int = 1  # that are left
    future: "Future[Returned]" = field(default_factory=Future)


class FunctionPool:
    """At most `count` processes, which start when they are first needed."""

    def __init__(self, run_dir: Path, count: int, memory_mb: int) -> None:
        self._run_dir = run_dir
        self._count = count
        self._memory_bytes = memory_mb << 20
        self._waiting: deque[_Call] = deque()
        self._at_home: list[deque[_Call]] = [deque() for _ in range(count)]  # the calls that one thread must take
        self._changed = threading.Condition()
        self._closing = False
        self._idle = 0  # threads that wait for a call
        self._call_s = 0.0  # a running mean
        self._threads: list[threading.Thread] = []
        self.replaced = 0  # processes that hung, ended or used too much memory

    def call(
        self,
        function: str,
        given: Mapping[str, Any],
        *,
        deadline_s: float,
        cancelled: Callable[[], bool] = lambda: False,
        home: str = "",
    ) -> Returned:
        """Waits for the result of one call. Raises Cancelled.

        home: the name of an episode, whose calls all go to one process.
        """
        call = _Call(function, given, deadline_s)
        with self._changed:
            if home:
                call.home, call.tries = zlib.crc32(home.encode()) % self._count, 2
                self._at_home[call.home].append(call)
                self._start_threads(call.home + 1)
            else:
                self._waiting.append(call)
                if len(self._waiting) > self._idle:
                    self._start_threads(len(self._threads) + 1)
            self._changed.notify_all()
        while True:
            try:
                return call.future.result(timeout=ASK_S)
            except TimeoutError:
                if cancelled() or self._closing:
                    call.future.cancel()
                    raise Cancelled from None

    def is_quick(self) -> bool:
        """Whether calls are so short that further ones should wait here already, to be sent in one message."""
        return self._call_s * (len(self._waiting) + 1) < QUEUE_S * self._count

    def source(self, function: str) -> str:
        """The text of a function's module, which must be one file. Raises ConfigError."""
        file = find(function, self._run_dir, setting="reward.functions")
        if file.is_dir():
            raise ConfigError(f"{function}: {file} is a package, and the sandbox takes a module of one file")
        return file.read_text()

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout=END_S)

    # One thread per process

    def _start_threads(self, count: int) -> None:
        for number in range(len(self._threads), min(count, self._count)):
            self._threads.append(threading.Thread(target=self._drive, args=(number,), name="functions", daemon=True))
            self._threads[-1].start()

    def _drive(self, number: int) -> None:
        process: _Process | None = None
        try:
            while calls := self._next_calls(number):
                while calls:
                    try:
                        process = process or _Process(self._run_dir, self._memory_bytes)
                        process.work_off(calls, self._answer, lambda: self._closing)
                    except _Lost as lost:
                        self._end(process, str(lost))
                        process = None
                        calls[0].tries -= 1
                        if not (lost.died and calls[0].tries):
                            self._answer(calls.popleft(), Returned(error=str(lost)), 0.0)
                if process is not None and process.leaks():
                    self._end(process, "functions leave more and more memory in use")
                    process = None
        finally:
            if process is not None:
                process.end()

    def _next_calls(self, number: int) -> deque[_Call]:
        """The next calls for one process; none at the end."""
        own = self._at_home[number]
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: own or self._waiting or self._closing)
            self._idle -= 1
            if self._closing:
                return deque()
            if own:
                return deque([own.popleft()])
            count = max(1, min(MOST_CALLS, len(self._waiting) // self._count))
            return deque(self._waiting.popleft() for _ in range(count))

    def _end(self, process: "_Process | None", reason: str) -> None:
        """Ends a process, in whose place the next call starts another."""
        log.warning("a process that runs reward functions is ended: %s", reason)
        self.replaced += 1
        if process is not None:
            process.end()

    def _answer(self, call: _Call, returned: Returned, took_s: float) -> None:
        self._call_s += (took_s - self._call_s) / (32 if self._call_s else 1)
        if call.future.set_running_or_notify_cancel():
            call.future.set_result(returned)


class _Lost(Exception):
    """The process is of no use any more. The message says what its first unanswered call did."""

    def __init__(self, text: str, *, died: bool = False) -> None:
        super().__init__(text)
        self.died = died  # it ended by itself, or something outside ended it


class _Process:
    """One process that runs functions."""

    def __init__(self, run_dir: Path, memory_bytes: int) -> None:
        """Raises _Lost."""
        self._memory_bytes = memory_bytes
        self._first_memory = 0
        self._wanted: dict[str, Set[str]] = {}  # what each function that is loaded wants to be given
        self._ours, theirs = socket.socketpair()
        self._frames = Frames(self._ours)
        path = os.pathsep.join(filter(None, (str(PROJECT), os.environ.get("PYTHONPATH"))))
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "reward.kinds.functions.worker", str(run_dir), str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    env={**os.environ, "PYTHONPATH": path},
                    start_new_session=True,
                )
        except OSError as error:
            self._ours.close()
            raise _Lost(f"its process cannot be started: {error}") from error

    def work_off(
        self,
        calls: deque[_Call],
        answer: Callable[[_Call, Returned, float], None],
        closing: Callable[[], bool],
    ) -> None:
        """Answers the calls in order and takes each from the queue. Raises _Lost."""
        try:
            self._ours.settimeout(IMPORT_S)
            self._frames.send([(call.function, self._only_wanted(call)) for call in calls])
        except OSError as error:
            raise _Lost(f"its process is gone: {error}", died=True) from error
        self._ours.settimeout(ASK_S)
        while calls:
            call = calls[0]
            if call.function not in self._wanted:
                wanted = self._wait(IMPORT_S, f"its module was not imported within {IMPORT_S:g} s", closing)
                self._wanted[call.function] = frozenset(wanted)
            began_s = time.monotonic()
            answered: Any = PROGRESS
            while answered == PROGRESS:
                answered = self._wait(call.deadline_s, f"did not return within {call.deadline_s:g} s", closing)
            answer(calls.popleft(), Returned(**answered), time.monotonic() - began_s)

    def _only_wanted(self, call: _Call) -> Mapping[str, Any]:
        wanted = self._wanted.get(call.function, call.given.keys())
        return {name: value for name, value in call.given.items() if name in wanted}

    def leaks(self) -> bool:
        """Whether half of the memory is gone that was free after the first calls, which may have loaded a model."""
        memory = self._memory()
        self._first_memory = self._first_memory or memory
        return memory - self._first_memory > (self._memory_bytes - self._first_memory) / 2

    def end(self) -> None:
        """Ends the process and what it has started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(END_S)
        self._frames.close()

    def _wait(self, deadline_s: float, too_late: str, closing: Callable[[], bool]) -> Any:
        until_s = time.monotonic() + deadline_s
        while True:
            try:
                return self._frames.receive()
            except TimeoutError:
                if self._memory() > self._memory_bytes:
                    raise _Lost(f"used more than {self._memory_bytes >> 20} MiB of memory") from None
                if time.monotonic() > until_s or closing():
                    raise _Lost(too_late) from None
            except (EOFError, OSError):
                raise _Lost(f"its process ended with {self._process.wait(END_S)}", died=True) from None

    def _memory(self) -> int:
        try:
            return int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]) * PAGE_BYTES
        except (OSError, IndexError):
            return 0
