"""A run from its first process to its last: drives the lifecycle, on whatever host it runs.

    with Signals() as signals:
        end = supervise(life, host, signals, say=print, tick=progress.tick, newest=lambda: 7)

The lifecycle (lifecycle.py) decides, the host (local.py, slurm/host.py) does. SIGINT, SIGTERM and SIGHUP end the run, a
second one at once; SIGUSR1 has the trainer save and the run end, to be gone on with. While the run lives a signal only
sets a flag that is looked at ten times a second, so that no line here can be cut in two.
"""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Protocol

from launch.placement.placement import Process
from launch.processes.lifecycle import Action, Cause, End, Lifecycle, Outcome, Say, Start, Stop, TellToSave

TICK_S = 0.1
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAVING = signal.SIGUSR1


class RunFailed(Exception):
    """The run cannot go on; the message says which process, why, and what its log says."""


class Interrupted(KeyboardInterrupt):
    """A signal asked for the end: of a whole sweep too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A process that the host started has ended."""

    name: str
    cause: Cause


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeLost:
    node: str
    why: str
    silent_s: float  # how long it was not heard before that was known


class Host(AbstractContextManager["Host"], Protocol):
    """Where processes run. Leaving it ends all of them."""

    def start(self, process: Process) -> None: ...

    def stop(self, name: str, *, at_once: bool) -> None:
        """Begins to end a process; that it has ended is told by `events`. If that was told already, nothing happens."""

    def tell_to_save(self, name: str) -> None:
        """Likewise."""

    def events(self) -> Sequence[Ended | NodeLost]:
        """What has happened since the last call."""

    def heard_s(self) -> float:
        """Every node that is not lost was heard after this, in the monotonic clock's time."""

    def left_s(self) -> float:
        """How long anything can run here; inf if nobody set a limit."""

    def end_all(self, hurry: Callable[[], bool]) -> None:
        """Ends everything: asks first, then forces, at once if there is a hurry."""


@dataclass(slots=True)
class Signals:
    """Those that came while it is entered. Outside of `kept` one that asks for the end raises Interrupted where it finds us."""

    _came: list[int] = field(default_factory=list)
    _keeps: bool = False
    _old: dict[int, object] = field(default_factory=dict)
    _blocked: set[int] = field(default_factory=set)

    def __enter__(self) -> "Signals":
        for number in (*ENDING, SAVING):
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # started under nohup
            self._old[number] = signal.signal(number, self._note)
        # The batch script holds it back until now, so that it waits for whoever is still importing.
        self._blocked = set(signal.pthread_sigmask(signal.SIG_UNBLOCK, {SAVING}))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._blocked)
        for number, handler in self._old.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Within it they are noted only, for whoever looks."""
        self._keeps = True
        try:
            yield
        finally:
            self._keeps = False

    @property
    def ending(self) -> list[int]:
        return [number for number in self._came if number in ENDING]

    @property
    def saving(self) -> bool:
        return SAVING in self._came

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came.append(number)
        if number in ENDING and not self._keeps:
            raise Interrupted


def supervise(
    life: Lifecycle,
    host: Host,
    signals: Signals,
    say: Callable[[str], None],
    *,
    tick: Callable[[], None] = lambda: None,
    newest: Callable[[], int] = lambda: 0,
    note: Callable[[object], None] = lambda what: None,
) -> End:
    """Runs to the end. One that was told to save before it began has nothing to save, and does not begin.

    `tick` is called ten times a second, `newest` tells the version of the newest checkpoint, `note` gets every event and action.
    """
    if signals.saving:
        return End(outcome=Outcome.SAVED, why="It was told so before anything was started.")
    with signals.kept(), host:
        end = _Loop(life=life, host=host, say=say, tick=tick, newest=newest, note=note, signals=signals).run()
        answered = min(len(signals.ending), 1)  # a second one may have come before the first was looked at
        host.end_all(lambda: len(signals.ending) > answered)
        tick()
    if signals.ending and end.outcome is not Outcome.DONE:
        # Whoever ends a run wants neither that it is requeued nor that a sweep goes on with the next one.
        if end.why:
            say(end.why)
        return End(outcome=Outcome.INTERRUPTED)
    return end


@dataclass(frozen=True, kw_only=True, slots=True)
class _Loop:
    life: Lifecycle
    host: Host
    say: Callable[[str], None]
    tick: Callable[[], None]
    newest: Callable[[], int]
    note: Callable[[object], None]
    signals: Signals

    def run(self) -> End:
        end = self._do(self.life.begin(time.monotonic()))
        asked_to_save = False
        while end is None:
            actions: list[Action] = []
            events = self.host.events()
            self.life.progressed(self.newest())  # after them: what a trainer wrote before it ended counts
            for event in events:
                self.note(event)
                actions += self._tell(event)
            if self.signals.ending:
                actions += self.life.interrupt()
            elif self.signals.saving and not asked_to_save:
                asked_to_save = True
                actions += self.life.save(time.monotonic(), self.host.left_s())
            actions += self.life.tick(time.monotonic(), self.host.heard_s())
            end = self._do(actions)
            self.tick()
            time.sleep(TICK_S)
        return end

    def _tell(self, event: Ended | NodeLost) -> list[Action]:
        now = time.monotonic()
        if isinstance(event, NodeLost):
            return self.life.node_lost(event.node, event.why, now)
        return self.life.ended(event.name, event.cause, now)

    def _do(self, actions: Sequence[Action]) -> End | None:
        for action in actions:
            self.note(action)
            match action:
                case Start(process=process):
                    self.host.start(process)
                case Stop(name=name, at_once=at_once):
                    self.host.stop(name, at_once=at_once)
                case TellToSave(name=name):
                    self.host.tell_to_save(name)
                case Say(text=text):
                    self.say(text)
                case End():
                    return action
        return None
