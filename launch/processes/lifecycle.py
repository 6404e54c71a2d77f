"""How a run lives: what is started, started again, stopped, and when it is over. Pure: it knows no clock, process or file.

    life = Lifecycle(place, rules)          place: the nodes that are lost -> the processes of the run
    actions = life.begin(now)               then: ended, node_lost, save, interrupt, progressed, tick; each gives actions

Rules. The run is done when every trainer process has ended with 0; the others are then told to leave by the queue, and
are waited for. A worker that ends early is started again, with a small back-off, unless it cannot start at all (exit
code 2, or three failures soon after its start; not 75, by which it says that the cause may pass): then its node is given
up if the fleet runs well elsewhere, and else the run is. One that leaves, as all do when the run is over, is started again
if that is not so a while later. A trainer process that fails, or whose node is lost, takes the whole
trainer with it: all of it is stopped, the processes are placed anew on the nodes that are left, and it starts again,
from its last checkpoint by itself. Whether a node was the cause is known only when every other node was heard after the
failure, so that is waited for. What is to run somewhere else is stopped there first. A trainer that saves before the end
is all that counts: what else is lost or fails meanwhile is let go.

Asked to save, the trainer writes a checkpoint and ends with 0, and so does the run, to be gone on with.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf

from launch.placement.placement import Process, Restart, TooFewNodes
from rollout.exit_codes import CANNOT_START, NOT_NOW

CLOSING_S = 30.0  # for the others to leave by themselves when the trainer is done
BACK_OFF_S = (0.5, 1.0, 2.0, 4.0, 8.0)
EARLY_S = 30.0
EARLY_FAILURES = 3
TELL_AGAIN_S = 10.0
ENDING_S = 60.0  # to end everything and to have the job requeued, after the save


class Outcome(StrEnum):
    DONE = "done"
    SAVED = "saved"  # not done; a checkpoint was written as asked
    SHORT = "short"  # too few nodes are left
    FAILED = "failed"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """How a process ended."""

    code: int  # as of subprocess: -9 was killed by SIGKILL
    how: str  # "trainer-0 was killed by SIGKILL"
    last_words: str = ""  # the end of its log


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    process: Process


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    name: str
    at_once: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TellToSave:
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Say:
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """The run is over; whatever still runs is to be ended."""

    outcome: Outcome
    why: str = ""


Action = Start | Stop | TellToSave | Say | End


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    worker_restarts: int  # of each restartable process
    trainer_restarts: int  # in a row without a new checkpoint; those for a lost node are not counted
    steps: int  # of the whole run
    save_s: float = 480.0  # for a checkpoint that was asked for
    closing_s: float = CLOSING_S


class Phase(StrEnum):
    RUNNING = "running"
    MENDING = "mending"  # the trainer is stopped and will start again
    SAVING = "saving"
    CLOSING = "closing"
    OVER = "over"


@dataclass(slots=True)
class _Life:
    process: Process
    running: bool = False
    stopping: bool = False
    left: bool = False  # ended, and is not to be started again
    gone_early: bool = False  # has left as at the end of the run, and this has not come yet
    started_s: float = 0.0
    due_s: float = 0.0  # when it is to be started
    restarts: int = 0
    early_failures: int = 0


@dataclass(slots=True)
class _Failure:
    """Why the trainer is being mended."""

    at_s: float
    cause: Cause | None  # None: a node was lost
    for_node: bool = False
    counted: bool = False  # as a restart, once, however long it takes to clear the places


class Lifecycle:
    """One run. Every method that takes `now` (seconds, any origin) returns what is to be done, in order."""

    def __init__(self, place: Callable[[frozenset[str]], Sequence[Process]], rules: Rules) -> None:
        self._place, self._rules = place, rules
        self._lost: frozenset[str] = frozenset()
        self._lives = {p.name: _Life(process=p) for p in place(self._lost)}
        self._gone: dict[str, _Life] = {}  # no longer placed, and still ending
        self._version = 0  # of the newest checkpoint
        self._trainer_restarts = 0
        self._failure: _Failure | None = None
        self._deadline_s = 0.0  # of saving and of closing
        self._save_s = 0.0  # how long it had for that
        self._saves = False  # was told to save
        self._tell_s = 0.0  # when to tell the trainer again
        self.phase = Phase.RUNNING

    @property
    def processes(self) -> list[Process]:
        """Those of the present placement."""
        return [life.process for life in self._lives.values()]

    def begin(self, now: float) -> list[Action]:
        return self._start_due(now)

    def ended(self, name: str, cause: Cause, now: float) -> list[Action]:
        """A process that was started has ended."""
        if (gone := self._gone.pop(name, None)) is not None:
            gone.running = False
            return []
        life = self._lives[name]
        expected, life.running, life.stopping = life.stopping, False, False
        if self.phase is Phase.OVER or expected:
            return []
        if life.process.role == "trainer":
            return self._trainer_ended(life, cause, now)
        if self.phase is Phase.CLOSING:
            life.left = True
            return []
        if cause.code == 0 and life.process.restart is Restart.ON_FAILURE:
            life.gone_early, life.due_s = True, now + self._rules.closing_s  # if the run is not over then, it was asked by others
            return []
        return self._worker_failed(life, cause, now)

    def node_lost(self, node: str, why: str, now: float) -> list[Action]:
        """Nothing runs on this node any more, and nothing can."""
        self._lost |= {node}
        hit = [life for life in [*self._lives.values(), *self._gone.values()] if life.process.node == node]
        for life in hit:
            life.running = life.stopping = False
        self._gone = {name: life for name, life in self._gone.items() if life.running}
        actions: list[Action] = [Say(text=f"{node} is lost ({why}); it had {_names(hit) or 'nothing to do'}")]
        if self.phase in (Phase.CLOSING, Phase.OVER):
            return actions
        if self.phase is Phase.SAVING:
            for life in hit:
                life.left = True
        if any(life.process.node == node and life.process.role == "trainer" for life in self._lives.values()):
            return actions + self._mend(_Failure(at_s=now, cause=None, for_node=True))
        return actions + self._place_anew(now) if self.phase is Phase.RUNNING else actions

    def progressed(self, version: int) -> None:
        """The newest checkpoint is of this version."""
        if version > self._version:
            self._version, self._trainer_restarts = version, 0

    def save(self, now: float, left_s: float = inf) -> list[Action]:
        """The time is nearly up: the trainer writes a checkpoint and ends. `left_s`: until nothing can run any more.

        A trainer that is being mended has nothing to save, but may be found unable to go on at all.
        """
        if self._saves or self.phase not in (Phase.RUNNING, Phase.MENDING):
            return []
        self._saves = True
        self._save_s = min(self._rules.save_s, max(left_s - ENDING_S, left_s / 2))
        self._deadline_s = now + self._save_s
        if self.phase is Phase.MENDING:
            return []
        self.phase = Phase.SAVING
        return [Say(text=f"the trainer is told to save and to end, within {self._save_s:.0f} s"), *self._tell(now)]

    def interrupt(self) -> list[Action]:
        return self._over(Outcome.INTERRUPTED)

    def tick(self, now: float, heard_s: float) -> list[Action]:
        """Time has gone on. `heard_s`: every node that is not lost was heard after this."""
        match self.phase:
            case Phase.MENDING:
                return self._mending(now, heard_s)
            case Phase.CLOSING:
                return self._closing(now)
            case Phase.SAVING if now > self._deadline_s:
                return self._over(Outcome.SAVED, f"the trainer did not save within {self._save_s:.0f} s")
            case Phase.RUNNING | Phase.SAVING:
                return self._start_due(now) + (self._tell(now) if self.phase is Phase.SAVING and now >= self._tell_s else [])
        return []

    # The trainer.

    def _tell(self, now: float) -> list[Action]:
        """A process that is only just starting does not hear it yet, so it is said again."""
        self._tell_s = now + TELL_AGAIN_S
        return [TellToSave(name=life.process.name) for life in self._trainers() if life.running]

    def _trainers(self) -> list[_Life]:
        return [life for life in self._lives.values() if life.process.role == "trainer"]

    def _trainer_ended(self, life: _Life, cause: Cause, now: float) -> list[Action]:
        if cause.code == 0:
            life.left = True
            if not all(trainer.left for trainer in self._trainers()):
                return []
            if self.phase is Phase.SAVING and self._version < self._rules.steps:
                return self._over(Outcome.SAVED)
            self.phase, self._deadline_s = Phase.CLOSING, now + self._rules.closing_s
            return []
        if self.phase is Phase.SAVING:
            return self._over(Outcome.SAVED, f"the last checkpoint is an older one: {cause.how}\n{cause.last_words}")
        return self._mend(_Failure(at_s=now, cause=cause))

    def _mend(self, failure: _Failure) -> list[Action]:
        """Stops the whole trainer, to look at what happened and to start it again."""
        if self._failure is None:
            self._failure = failure
        else:  # one thing leads to another: the first cause is reported
            self._failure.for_node = self._failure.for_node or failure.for_node
            self._failure.at_s = failure.at_s if failure.for_node else self._failure.at_s
        if self.phase is Phase.SAVING:
            return self._over(Outcome.SAVED, "the trainer was lost while it saved")
        self.phase = Phase.MENDING
        return [action for life in self._trainers() for action in self._stop(life, at_once=True)]

    def _mending(self, now: float, heard_s: float) -> list[Action]:
        failure = self._failure
        assert failure is not None
        is_open = any(life.running for life in self._trainers()) or heard_s < failure.at_s
        if is_open and not (self._saves and now > self._deadline_s):
            return []
        if failure.cause is not None and not failure.for_node and not failure.counted:
            if failure.cause.code == CANNOT_START or self._trainer_restarts >= self._rules.trainer_restarts:
                return self._over(Outcome.FAILED, self._trainer_obituary(failure.cause))
            self._trainer_restarts += 1
            failure.counted = True
        if self._saves:
            return self._over(Outcome.SAVED, "the trainer was being started again")
        actions = self._place_anew(now)
        if self.phase is Phase.OVER or self._gone or any(life.stopping for life in self._lives.values()):
            return actions  # the trainer may need the place of what is still ending
        self.phase, self._failure = Phase.RUNNING, None
        for life in self._trainers():
            life.left, life.due_s = False, now
        why = f"after {failure.cause.how}" if failure.cause is not None and not failure.for_node else "without the lost node"
        nodes = ", ".join(dict.fromkeys(life.process.node for life in self._trainers()))
        start = (
            f"from its checkpoint of version {self._version}" if self._version else "from the beginning: it has no checkpoint yet"
        )
        actions.append(Say(text=f"the trainer starts again {why}, on {nodes}, {start}"))
        return actions + self._start_due(now)

    def _trainer_obituary(self, cause: Cause) -> str:
        text = f"{cause.how}. {cause.last_words}"
        if self._rules.trainer_restarts == 0:
            return text
        return f"after {self._trainer_restarts} restarts without a new checkpoint (cluster.trainer_restarts): {text}"

    # The others.

    def _worker_failed(self, life: _Life, cause: Cause, now: float) -> list[Action]:
        """A kill is no sign that a process cannot start; a failure soon after the start is."""
        early = cause.code > 0 and cause.code != NOT_NOW and now - life.started_s < EARLY_S
        life.early_failures = life.early_failures + 1 if early else 0
        limit = self._rules.worker_restarts
        cannot_run = cause.code == CANNOT_START or not life.process.restartable or life.early_failures >= EARLY_FAILURES
        if cannot_run or life.restarts >= limit:
            if self.phase is Phase.SAVING:
                life.left = True
                return [Say(text=f"{cause.how}; the run is about to end, so it is not started again")]
            if self._is_elsewhere_fine(life, now):
                return self._leave_node(life.process.node, cause, now)
            after = "" if cannot_run else f"after {life.restarts} restarts (cluster.worker_restarts): "
            return self._over(Outcome.FAILED, f"{after}{cause.how}. {cause.last_words}")
        back_off_s = BACK_OFF_S[min(life.restarts, len(BACK_OFF_S) - 1)]
        life.due_s = now + back_off_s
        life.restarts += 1
        return [Say(text=f"{cause.how}; started again in {back_off_s:g} s ({life.restarts} of {limit} restarts)")]

    def _is_elsewhere_fine(self, life: _Life, now: float) -> bool:
        """Whether the fleet runs well on other nodes, so that this one must be what is wrong, and can be done without."""
        here, role = life.process.node, life.process.role
        irreplaceable = [other for other in self._lives.values() if other.process.node == here and other.process.role != role]
        if role != "rollout" or any(other.process.role in ("trainer", "queue") for other in irreplaceable):
            return False
        others = [other for other in self._lives.values() if other.process.role == role and other.process.node != here]
        return any(other.running and now - other.started_s >= EARLY_S for other in others)

    def _leave_node(self, node: str, cause: Cause, now: float) -> list[Action]:
        self._lost |= {node}
        said = Say(text=f"{node} is given up, since the fleet runs elsewhere: {cause.how}. {cause.last_words}")
        return [said, *(self._place_anew(now) if self.phase is not Phase.MENDING else ())]

    def _closing(self, now: float) -> list[Action]:
        """Workers and judges leave when the queue says that it closes; the queue has nobody to wait for then."""
        late = [life for life in self._lives.values() if life.running and life.process.role not in ("trainer", "queue")]
        if late and now <= self._deadline_s:
            return []
        said: list[Action] = []
        if late:
            said.append(Say(text=f"{_names(late)} did not leave within {self._rules.closing_s:g} s and will be ended"))
        return said + self._over(Outcome.DONE)

    # All of them.

    def _start_due(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for life in self._lives.values():
            if life.running or life.left or now < life.due_s or life.process.name in self._gone:
                continue
            if life.gone_early:
                actions.append(Say(text=f"{life.process.name} left while the run goes on; it is started again"))
            life.running, life.gone_early, life.started_s = True, False, now
            actions.append(Start(process=life.process))
        return actions

    def _stop(self, life: _Life, *, at_once: bool = False) -> list[Action]:
        if not life.running or life.stopping:
            return []
        life.stopping = True
        return [Stop(name=life.process.name, at_once=at_once)]

    def _place_anew(self, now: float) -> list[Action]:
        """Goes over to the placement without the lost nodes; what is to run elsewhere, or nowhere, is stopped where it runs."""
        try:
            wanted = {process.name: process for process in self._place(self._lost)}
        except TooFewNodes as error:
            return self._over(Outcome.SHORT, str(error))
        actions: list[Action] = []
        for name, life in list(self._lives.items()):
            if wanted.get(name) == life.process:
                continue
            if life.running:
                actions += self._stop(life, at_once=True)
                self._gone[name] = life
            del self._lives[name]
        for name, process in wanted.items():
            if name not in self._lives:
                self._lives[name] = _Life(process=process, due_s=now)
        self._lives = {name: self._lives[name] for name in wanted}
        return actions

    def _over(self, outcome: Outcome, why: str = "") -> list[Action]:
        if self.phase is Phase.OVER:
            return []
        self.phase = Phase.OVER
        return [End(outcome=outcome, why=why)]


def _names(lives: Sequence[_Life]) -> str:
    return ", ".join(life.process.name for life in lives)
