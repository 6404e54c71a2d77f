"""The supervisor on a backend that a test controls."""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType

import pytest

from launch.placement.placement import ProcessSpec
from launch.processes.lifecycle import Lifecycle, ProcessExit, RestartRules, RunOutcome
from launch.processes.supervise import END_SIGNALS, Exited, Interrupted, NodeLost, Signals, supervise

STEPS = 7
RULES = RestartRules(worker_restarts=0, trainer_restarts=0, steps=STEPS, save_s=480.0)


class Backend:
    """One trainer: it is told to save as soon as it runs, and at once writes a checkpoint and ends."""

    def __init__(self, version: int, while_ending: Callable[[], None]) -> None:
        self.version, self._saves, self._while_ending = 0, version, while_ending
        self._ended: list[Exited | NodeLost] = []

    def __enter__(self) -> "Backend":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...

    def start(self, process: ProcessSpec) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)

    def stop(self, name: str) -> None: ...

    def request_save(self, name: str) -> None:
        self._ended = [Exited(name=name, exit=ProcessExit(code=0, description="ended"))]

    def events(self) -> Sequence[Exited | NodeLost]:
        ended, self._ended = self._ended, []
        if ended:
            self.version = self._saves
        return ended

    def heartbeat_s(self) -> float:
        return float("inf")

    def time_left_s(self) -> float:
        return float("inf")

    def end_all(self, at_once: Callable[[], bool]) -> None:
        self._while_ending()


@pytest.mark.parametrize(
    ("version", "while_ending", "outcome"),
    [
        (STEPS - 1, lambda: None, RunOutcome.SAVED),
        (STEPS - 1, lambda: os.kill(os.getpid(), signal.SIGTERM), RunOutcome.INTERRUPTED),  # it must not be requeued
        (STEPS, lambda: None, RunOutcome.DONE),  # the last checkpoint and the exit came between two polls
        (STEPS, lambda: os.kill(os.getpid(), signal.SIGTERM), RunOutcome.DONE),
    ],
)
def test_run_that_was_asked_to_save_reports_how_it_really_ended(
    version: int, while_ending: Callable[[], None], outcome: RunOutcome
) -> None:
    trainer = ProcessSpec(role="trainer", name="trainer-0", node="n0", argv=("trainer",))
    life = Lifecycle(lambda lost: [trainer], RULES)
    host = Backend(version, while_ending)
    with Signals() as signals:
        assert supervise(life, host, signals, print, newest_checkpoint=lambda: host.version).outcome is outcome


class FailingBackend(Backend):
    """Its trainer fails as soon as it is started."""

    def start(self, process: ProcessSpec) -> None:
        self._ended = [Exited(name=process.name, exit=ProcessExit(code=1, description=f"{process.name} ended with exit code 1"))]


@pytest.mark.parametrize(
    ("while_ending", "outcome", "said"),
    [
        (lambda: None, RunOutcome.FAILED, []),
        (lambda: os.kill(os.getpid(), signal.SIGINT), RunOutcome.INTERRUPTED, ["trainer-0 ended with exit code 1"]),
    ],
)
def test_interrupt_of_a_run_that_is_just_failing_counts_and_the_failure_is_shown(
    while_ending: Callable[[], None], outcome: RunOutcome, said: list[str]
) -> None:
    """A sweep ends with an interrupted job, and goes on after a failed one."""
    told: list[str] = []
    life = Lifecycle(lambda lost: [ProcessSpec(role="trainer", name="trainer-0", node="n0", argv=("trainer",))], RULES)
    with Signals() as signals:
        assert supervise(life, FailingBackend(0, while_ending), signals, told.append).outcome is outcome
    assert [text.splitlines()[0].rstrip(". ") for text in told] == said


def test_run_that_is_asked_to_save_while_it_is_prepared_starts_nothing() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # as the batch script does
    try:
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)  # a library's thread, which does not block it, would die of it
        with Signals() as signals:
            assert signals.save_requested
            end = supervise(Lifecycle(lambda lost: [], RULES), Backend(0, lambda: None), signals, print)
        assert end.outcome is RunOutcome.SAVED
        assert signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


@pytest.mark.parametrize("number", END_SIGNALS)
def test_interrupt_during_preparation_ends_it_immediately(number: signal.Signals) -> None:
    with pytest.raises(Interrupted), Signals():
        os.kill(os.getpid(), number)
        time.sleep(60)


def test_signal_is_deferred_while_the_run_lives() -> None:
    with Signals() as signals:
        with signals.deferred():
            os.kill(os.getpid(), signal.SIGTERM)
        assert signals.end_requests == [signal.SIGTERM]
