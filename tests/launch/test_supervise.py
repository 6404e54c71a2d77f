"""The driver of a run on a host that does nothing but what a test says."""

import os
import signal
from collections.abc import Callable, Sequence
from types import TracebackType

import pytest

from launch.lifecycle import Cause, Lifecycle, Outcome, Rules
from launch.placement import Process
from launch.supervise import Ended, NodeLost, supervise

STEPS = 7


class Host:
    """One trainer: it is told to save as soon as it runs, and at once writes a checkpoint and ends."""

    def __init__(self, version: int, while_ending: Callable[[], None]) -> None:
        self.version, self._saves, self._while_ending = 0, version, while_ending
        self._ended: list[Ended | NodeLost] = []

    def __enter__(self) -> "Host":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...

    def start(self, process: Process) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)

    def stop(self, name: str, *, at_once: bool) -> None: ...

    def tell_to_save(self, name: str) -> None:
        self._ended = [Ended(name=name, cause=Cause(code=0, how="ended"))]

    def events(self) -> Sequence[Ended | NodeLost]:
        ended, self._ended = self._ended, []
        if ended:
            self.version = self._saves
        return ended

    def heard_s(self) -> float:
        return float("inf")

    def end_all(self, hurry: Callable[[], bool]) -> None:
        self._while_ending()


@pytest.mark.parametrize(
    ("version", "while_ending", "outcome"),
    [
        (STEPS - 1, lambda: None, Outcome.SAVED),
        (STEPS - 1, lambda: os.kill(os.getpid(), signal.SIGTERM), Outcome.INTERRUPTED),  # it must not be requeued
        (STEPS, lambda: None, Outcome.DONE),  # the last checkpoint and the end came between two looks
        (STEPS, lambda: os.kill(os.getpid(), signal.SIGTERM), Outcome.DONE),
    ],
)
def test_run_that_was_asked_to_save_ends_as_what_it_was_at_its_end(
    version: int, while_ending: Callable[[], None], outcome: Outcome
) -> None:
    trainer = Process(role="trainer", name="trainer-0", node="n0", argv=("trainer",))
    life = Lifecycle(lambda lost: [trainer], Rules(worker_restarts=0, trainer_restarts=0, steps=STEPS))
    host = Host(version, while_ending)
    assert supervise(life, host, print, newest=lambda: host.version).outcome is outcome
