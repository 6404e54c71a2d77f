"""Runs a lifecycle on a backend, from the first process to the last.

    with Signals() as signals:
        end = supervise(lifecycle, backend, signals, say=print, tick=progress.tick, newest_checkpoint=lambda: 7)

The lifecycle (lifecycle.py) decides and the backend (local.py, slurm/backend.py) acts. SIGINT, SIGTERM and SIGHUP end the run;
a second one ends it at once. SIGUSR1 makes the trainer save and the run end, to be resumed later. While the run lives, a signal
only sets a flag that is read ten times per second, so no line here can be interrupted halfway.
"""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Protocol

from launch.placement.placement import ProcessSpec
from launch.processes.lifecycle import Action, Lifecycle, ProcessExit, RequestSave, RunEnd, RunOutcome, Say, Start, StopProcess

TICK_S = 0.1
END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAVE_SIGNAL = signal.SIGUSR1


class RunFailed(Exception):
    """The run cannot go on. The message names the process, the reason, and the end of its log."""


class Interrupted(KeyboardInterrupt):
    """A signal asked for the end of the run, and of the sweep that it belongs to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exited:
    """A process that the backend started has ended."""

    name: str
    exit: ProcessExit


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeLost:
    node: str
    why: str
    silent_s: float  # the time from its last heartbeat until the loss was known


class Backend(AbstractContextManager["Backend"], Protocol):
    """The machines where the processes run. Leaving the context ends all processes."""

    def start(self, process: ProcessSpec) -> None: ...

    def stop(self, name: str) -> None:
        """Kills a process; `events` reports when it has ended. Does nothing if that was reported already."""

    def request_save(self, name: str) -> None:
        """Asks a trainer process to save and to exit. Does nothing if its end was reported already."""

    def events(self) -> Sequence[Exited | NodeLost]:
        """What has happened since the last call."""

    def heartbeat_s(self) -> float:
        """Every node that is not lost has sent a heartbeat after this time of the monotonic clock."""

    def time_left_s(self) -> float:
        """The time until the machines are taken away; inf without a limit."""

    def end_all(self, at_once: Callable[[], bool]) -> None:
        """Ends every process: asks first, then kills. Kills without waiting as soon as `at_once()` is true."""


@dataclass(slots=True)
class Signals:
    """Collects the signals that arrive. Outside of `deferred`, a signal that asks for the end raises Interrupted immediately."""

    _received: list[int] = field(default_factory=list)
    _deferred: bool = False
    _old_handlers: dict[int, object] = field(default_factory=dict)
    _blocked: set[int] = field(default_factory=set)

    def __enter__(self) -> "Signals":
        for number in (*END_SIGNALS, SAVE_SIGNAL):
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # started under nohup
            self._old_handlers[number] = signal.signal(number, self._receive)
        # The batch script blocks the signal while the launcher starts, so that it is not lost meanwhile.
        self._blocked = set(signal.pthread_sigmask(signal.SIG_UNBLOCK, {SAVE_SIGNAL}))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._blocked)
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Within this context signals are only collected."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    @property
    def end_requests(self) -> list[int]:
        return [number for number in self._received if number in END_SIGNALS]

    @property
    def save_requested(self) -> bool:
        return SAVE_SIGNAL in self._received

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received.append(number)
        if number in END_SIGNALS and not self._deferred:
            raise Interrupted


def supervise(
    lifecycle: Lifecycle,
    backend: Backend,
    signals: Signals,
    say: Callable[[str], None],
    *,
    tick: Callable[[], None] = lambda: None,
    newest_checkpoint: Callable[[], int] = lambda: 0,
    note: Callable[[object], None] = lambda what: None,
) -> RunEnd:
    """Runs to the end. A run that was asked to save before it began has nothing to save, and does not begin.

    `tick` is called ten times per second, `newest_checkpoint` returns a version, `note` receives every event and every action.
    """
    if signals.save_requested:
        return RunEnd(outcome=RunOutcome.SAVED, why="The signal to save came before anything was started.")
    with signals.deferred(), backend:
        loop = _Loop(
            lifecycle=lifecycle, backend=backend, say=say, tick=tick, newest_checkpoint=newest_checkpoint, note=note,
            signals=signals,
        )  # fmt: skip
        end = loop.run()
        answered = min(len(signals.end_requests), 1)  # a second signal may have come before the first was read
        backend.end_all(lambda: len(signals.end_requests) > answered)
        tick()
    if signals.end_requests and end.outcome is not RunOutcome.DONE:
        # Who interrupts a run wants neither a requeue nor the next run of the sweep.
        if end.why:
            say(end.why)
        return RunEnd(outcome=RunOutcome.INTERRUPTED)
    return end


@dataclass(frozen=True, kw_only=True, slots=True)
class _Loop:
    lifecycle: Lifecycle
    backend: Backend
    say: Callable[[str], None]
    tick: Callable[[], None]
    newest_checkpoint: Callable[[], int]
    note: Callable[[object], None]
    signals: Signals

    def run(self) -> RunEnd:
        end = self._take(self.lifecycle.begin(time.monotonic()))
        save_requested = False
        while end is None:
            actions: list[Action] = []
            events = self.backend.events()
            # After the events, so that a checkpoint that the trainer wrote before it exited counts.
            self.lifecycle.checkpointed(self.newest_checkpoint())
            for event in events:
                self.note(event)
                actions += self._report(event)
            if self.signals.end_requests:
                actions += self.lifecycle.interrupt()
            elif self.signals.save_requested and not save_requested:
                save_requested = True
                actions += self.lifecycle.save(time.monotonic(), self.backend.time_left_s())
            actions += self.lifecycle.tick(time.monotonic(), self.backend.heartbeat_s())
            end = self._take(actions)
            self.tick()
            time.sleep(TICK_S)
        return end

    def _report(self, event: Exited | NodeLost) -> list[Action]:
        now = time.monotonic()
        if isinstance(event, NodeLost):
            return self.lifecycle.node_lost(event.node, event.why, now)
        return self.lifecycle.exited(event.name, event.exit, now)

    def _take(self, actions: Sequence[Action]) -> RunEnd | None:
        for action in actions:
            self.note(action)
            match action:
                case Start(process=process):
                    self.backend.start(process)
                case StopProcess(name=name):
                    self.backend.stop(name)
                case RequestSave(name=name):
                    self.backend.request_save(name)
                case Say(text=text):
                    self.say(text)
                case RunEnd():
                    return action
        return None
