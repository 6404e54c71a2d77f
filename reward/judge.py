"""A judge: takes grading leases from the queue server and grades them.

It has four kinds of thread, each with its own client, and two queues between them:

    leaser     takes as many leases as slots are free            ──> work
    slot x N   work ──> grades (`grading/grader.py`)             ──> outcomes
    reporter   outcomes ──> sends all that are there to the queue server, and retries until it answers
    main       sends heartbeats (what is held), and hears what is cancelled and whether the run is closing

A judge that dies loses nothing: its leases lapse when its heartbeats stop, and other judges get them. A judge that is told to end
takes no more leases, finishes what it can within DRAIN_S, and lets the other leases lapse.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

from reward.grading.figures import Figures
from reward.grading.grader import Grader, Outcome
from reward.grading.resources import Sandboxes, Slots
from reward.grading.services import Services
from reward.kinds.endpoint import OwnServer
from reward.kinds.functions.pool import FunctionPool
from reward.kinds.turns import Turns
from reward.sandbox.host import Settings
from reward.task import Defaults
from rollout.ledger.records import Answered, GradingWork, Heard, Position
from rollout.queue.client import QueueTimeout, Refused

log = logging.getLogger("reward")

DRAIN_S = 5.0
LEASE_WAIT_S = 2.0
BEAT_S = 0.2  # the main thread checks its flags this often
FIGURES_S = 60.0
TOLD_AT_ONCE = 64  # at most this many verdicts in one message
MOST_WAITING = 64  # at most this many slots wait for something outside while others take their places


class JudgeError(RuntimeError):
    """The judge cannot go on."""


class QueueLike(Protocol):
    """What a judge asks of `rollout.queue.client.QueueClient`."""

    def lease_grading(self, holder: str, n: int, wait_s: float = 5.0) -> list[GradingWork]: ...

    def answer(self, holder: str, answers: Sequence[Answered]) -> list[str]: ...

    def refuse_task(self, group: int, reason: str) -> None: ...

    def heartbeat(self, holder: str, role: str, held: Sequence[Position] = ()) -> Heard: ...

    def close(self) -> None: ...


class Judge:
    """Grades until the run closes or `close` is called."""

    def __init__(
        self,
        *,
        holder: str,  # no other judge of the run, past or present, has this name
        defaults: Defaults,
        packages: Sequence[str],
        functions: FunctionPool,
        judge_model: OwnServer | None = None,
        turns: Turns,
        slots: int,
        connect: Callable[[str], QueueLike],  # a new client, by the name of the thread that owns it
        lease_s: float,
        stall_s: float,
    ) -> None:
        self.holder = holder
        self.figures = Figures()
        self._slots = Slots(slots, MOST_WAITING)
        self._grader = Grader(
            defaults=defaults,
            sandboxes=Sandboxes(slots, Settings(packages=tuple(packages))),
            functions=functions,
            services=Services(judge_model),
            slots=self._slots,
            turns=turns,
            figures=self.figures,
            patience_s=stall_s,
        )
        self._connect = connect
        self._lease_s = lease_s
        self._stall_s = stall_s
        self._slot_threads: list[threading.Thread] = []  # one per completion that is graded at the same time
        self._idle = threading.Semaphore(0)  # slots that wait for work
        self._work: queue.SimpleQueue[GradingWork | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[Outcome | None] = queue.SimpleQueue()
        self._held: dict[Position, threading.Event] = {}  # the event is set when the result is no longer wanted
        self._lock = threading.Lock()  # guards `_held` and `_failure`
        self._closing = threading.Event()
        self._asked_to_close = False
        self._failure: BaseException | None = None

    def close(self) -> None:
        """Asks `run` to end. Signal handlers call it, so it takes no lock."""
        self._asked_to_close = True

    def run(self) -> None:
        """Returns when the run is over or `close` was called. Raises JudgeError, SandboxUnavailable or QueueError."""
        leaser, reporter = self._thread("leaser", self._lease_all), self._thread("reporter", self._report_all)
        try:
            self._keep_heard()
            self._closing.set()
            self._drain()
        finally:
            self._closing.set()
            for event in list(self._held.values()):
                event.set()
            leaser.join(timeout=DRAIN_S)
            for _ in self._slot_threads:
                self._work.put(None)
            for thread in self._slot_threads:
                thread.join(timeout=DRAIN_S)
            for lent in (self._grader.sandboxes, self._grader.services, self._grader.functions):
                lent.close()
            self._outcomes.put(None)
            reporter.join(timeout=DRAIN_S)
            log.info("%s ends: %s", self.holder, self.figures.line())
        if self._failure is not None:
            raise self._failure

    # The main thread

    def _keep_heard(self) -> None:
        client = self._connect("main")
        heard_s = figures_s = time.monotonic()
        next_s = 0.0
        try:
            while not self._closing.is_set() and not self._asked_to_close:
                now = time.monotonic()
                if now - figures_s > FIGURES_S:
                    figures_s = now
                    log.info("%s", self.figures.line())
                if now < next_s:
                    self._closing.wait(BEAT_S)
                    continue
                try:
                    self._obey(client.heartbeat(self.holder, "judge", self._positions()))
                except QueueTimeout as error:
                    if time.monotonic() - heard_s > self._stall_s:
                        raise JudgeError(f"the queue server has been away for {self._stall_s:.0f} s: {error}") from error
                    continue
                heard_s = time.monotonic()
                next_s = heard_s + self._lease_s / 4
        finally:
            client.close()

    def _obey(self, heard: Heard) -> None:
        with self._lock:
            cancelled = [self._held[position] for position in heard.cancel if position in self._held]
        for event in cancelled:
            event.set()
        if heard.closing:
            self._closing.set()

    def _drain(self) -> None:
        deadline_s = time.monotonic() + DRAIN_S
        while self._positions() and self._failure is None and time.monotonic() < deadline_s:
            time.sleep(0.05)

    def _positions(self) -> list[Position]:
        with self._lock:
            return list(self._held)

    # The leaser

    def _lease_all(self) -> None:
        client = self._connect("leaser")
        try:
            while not self._closing.is_set():
                if not (count := self._slots.take(BEAT_S)):
                    continue
                for work in self._lease(client, count):
                    with self._lock:
                        if work.position in self._held:  # a restarted server leases it again before it hears our heartbeat
                            continue
                        self._held[work.position] = threading.Event()
                    self._start(work)
                    count -= 1
                self._slots.give_back(count)
        finally:
            client.close()

    def _lease(self, client: QueueLike, count: int) -> list[GradingWork]:
        try:
            return client.lease_grading(self.holder, count, wait_s=LEASE_WAIT_S)
        except QueueTimeout:  # the main thread ends the judge if this lasts too long
            return []

    # The slots

    def _start(self, work: GradingWork) -> None:
        if not self._idle.acquire(blocking=False):
            self._slot_threads.append(self._thread(f"slot-{len(self._slot_threads)}", self._run_slot))
        self._work.put(work)

    def _run_slot(self) -> None:
        while (work := self._work.get()) is not None:
            with self._lock:
                unwanted = self._held[work.position]
            self._outcomes.put(self._grader.outcome(work, unwanted))
            self._slots.give_back()
            self._idle.release()

    # The reporter

    def _report_all(self) -> None:
        client = self._connect("reporter")
        try:
            while outcomes := self._next_outcomes():
                self._report(client, outcomes)
                with self._lock:
                    for outcome in outcomes:
                        self._held.pop(outcome.work.position, None)
        finally:
            client.close()

    def _next_outcomes(self) -> list[Outcome]:
        """All outcomes that are there, at least one; [] after the last one."""
        outcomes = []
        outcome = self._outcomes.get()
        while outcome is not None:
            outcomes.append(outcome)
            if len(outcomes) == TOLD_AT_ONCE or self._outcomes.empty():
                return outcomes
            outcome = self._outcomes.get()
        if outcomes:
            self._outcomes.put(None)  # the next call finds it and returns []
        return outcomes

    def _report(self, client: QueueLike, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            if outcome.refused:
                log.warning("refused: %s", outcome.refused)
                self.figures.add_refused()
                with suppress(Refused):  # another judge has refused it already
                    self._tell(partial(client.refuse_task, outcome.work.position.group, outcome.refused))
        if answers := [outcome.answered for outcome in outcomes if outcome.answered is not None]:
            self._tell(partial(client.answer, self.holder, answers))

    def _tell(self, request: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + self._stall_s
        while time.monotonic() < deadline_s and not (self._closing.is_set() and self._failure is not None):
            try:
                request()
                return
            except QueueTimeout as error:
                log.warning("a verdict waits for the queue server: %s", error)

    # Threads

    def _thread(self, name: str, body: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=self._guarded, args=(body,), name=name, daemon=True)
        thread.start()
        return thread

    def _guarded(self, body: Callable[[], None]) -> None:
        """A thread that fails ends the judge, and `run` raises its error."""
        try:
            body()
        except BaseException as error:  # noqa: BLE001 - raised again by `run`
            with self._lock:
                self._failure = self._failure or error
            self._closing.set()
