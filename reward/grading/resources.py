"""What a judge lends to a task while it grades: warm sandboxes, and a slot that may leave its place while it waits."""

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from reward.grading.services import Services
from reward.jail.limits import Cancelled
from reward.kinds.endpoint import Endpoint
from reward.kinds.functions.pool import FunctionPool
from reward.kinds.turns import Turns
from reward.sandbox.host import Settings
from reward.sandbox.sandbox import Sandbox
from rollout.ledger.records import I32

ASK_S = 0.2  # a slot that waits for a sandbox checks this often whether it is still wanted

T = TypeVar("T")


class Sandboxes:
    """At most `count` sandboxes with the same packages, started when they are first needed and kept warm. Each is lent to one
    thread at a time."""

    def __init__(self, count: int, settings: Settings | None = None) -> None:
        self._count = count
        self._settings = settings or Settings()
        self._idle: dict[Sequence[str], queue.LifoQueue[Sandbox | None]] = {}  # by packages; None: one that was not started yet
        self._started: list[Sandbox] = []
        self._lock = threading.Lock()  # guards `_idle`

    @contextmanager
    def lend(self, cancelled: Callable[[], bool], packages: Sequence[str] = ()) -> Iterator[Sandbox]:
        """A sandbox with these packages, or with those of the settings. Raises Cancelled while none is free, and SandboxError."""
        packages = tuple(packages or self._settings.packages)
        idle = self._idle_with(packages)
        sandbox = _take(idle, cancelled)
        try:
            if sandbox is None:
                sandbox = Sandbox(replace(self._settings, packages=packages)).__enter__()
                self._started.append(sandbox)
            sandbox.cancelled = cancelled
            yield sandbox
        finally:
            idle.put(sandbox)

    def close(self) -> None:
        for sandbox in self._started:
            sandbox.close()

    def _idle_with(self, packages: Sequence[str]) -> "queue.LifoQueue[Sandbox | None]":
        with self._lock:
            if packages not in self._idle:
                self._idle[packages] = queue.LifoQueue()
                for _ in range(self._count):
                    self._idle[packages].put(None)
            return self._idle[packages]


def _take(idle: "queue.LifoQueue[Sandbox | None]", cancelled: Callable[[], bool]) -> Sandbox | None:
    while not cancelled():
        try:
            return idle.get(timeout=ASK_S)
        except queue.Empty:
            continue
    raise Cancelled


class Slots:
    """How many completions a judge may take. A slot that waits for something outside leaves its place to another completion, and
    at most `most_waiting` slots do so at once."""

    def __init__(self, count: int, most_waiting: int) -> None:
        self._free = count  # below 0 where slots have come back from waiting and their places are taken
        self._may_wait = most_waiting
        self._changed = threading.Condition()

    def take(self, timeout_s: float) -> int:
        """Takes all free places, at least one; 0 if none is free within `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._free > 0, timeout_s)
            count = max(0, self._free)
            self._free -= count
            return count

    def give_back(self, count: int = 1) -> None:
        with self._changed:
            self._free += count
            self._changed.notify()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        with self._changed:
            leaves = self._may_wait > 0
            self._may_wait -= leaves
        if leaves:
            self.give_back()
        try:
            yield
        finally:
            if leaves:
                with self._changed:
                    self._free -= 1
                    self._may_wait += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Lent:
    """What one completion gets (`reward/kinds/kind.py:Resources`)."""

    sandboxes: Sandboxes
    services: Services
    functions: FunctionPool
    slots: Slots
    turns: Turns = field(default_factory=Turns)
    cancelled: Callable[[], bool]

    def sandbox(self, packages: Sequence[str] = ()) -> AbstractContextManager[Sandbox]:
        return self.sandboxes.lend(self.cancelled, packages)

    def waiting(self) -> AbstractContextManager[None]:
        return self.slots.waiting()

    def observe(self, messages: Sequence[Mapping[str, Any]], end: int) -> I32:
        return self.turns.tokens(messages, end)

    def ask(self, endpoint: Endpoint, data: Mapping[str, Any], read: Callable[[Any], T]) -> T:
        with self.slots.waiting():
            return self.services.ask(endpoint, data, read, self.cancelled)
