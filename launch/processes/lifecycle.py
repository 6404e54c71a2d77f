"""The lifecycle of a run: which process starts, restarts and stops when, and when the run is over. It is pure.

    lifecycle = Lifecycle(place, rules)     place: from the lost nodes to the processes of the run
    actions = lifecycle.begin(now)          then: exited, node_lost, save, interrupt, checkpointed, tick; each returns actions

The rules:

- The run is done when every trainer process has exited with 0. The queue then tells the other processes to leave, and the
  launcher waits for them.
- A worker (queue, rollout or judge process) that exits early is restarted after a short delay. It is not restarted when it cannot
  start at all: it exits with CANNOT_START, or fails three times soon after its start. (NOT_NOW says that the reason may pass, so
  it does not count.) Then its node is given up if the fleet runs well on other nodes; otherwise the run fails.
- A worker that exits with 0 leaves because the run is over. If the run is not over a while later, it is restarted.
- When a trainer process fails or its node is lost, all trainer processes are stopped, placed on the nodes that are left, and
  started again. They resume from the last checkpoint by themselves. A trainer process may fail because a
  node died. So the restart waits until every other node has sent a heartbeat after the failure: then all dead nodes are known.
- A process that moves to another node is stopped on its old node first.
- While the trainer saves before the end of the job, nothing else counts: other failures are ignored.

When it is asked to save, the trainer writes a checkpoint and exits with 0. The run then ends and can be resumed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf

from launch.placement.placement import ProcessSpec, Restart, TooFewNodes
from rollout.exit_codes import CANNOT_START, NOT_NOW

CLOSING_S = 30.0  # the time that the other processes have to leave after the trainer is done
RESTART_DELAYS_S = (0.5, 1.0, 2.0, 4.0, 8.0)
EARLY_FAILURE_S = 30.0
MAX_EARLY_FAILURES = 3
REPEAT_SAVE_S = 10.0
ENDING_S = 60.0  # the time that is kept after the save, to end all processes and to requeue the job


class RunOutcome(StrEnum):
    DONE = "done"
    SAVED = "saved"  # not done, but a checkpoint was written as asked
    TOO_FEW_NODES = "too few nodes"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessExit:
    """How a process ended."""

    code: int  # as in subprocess: -9 means killed by SIGKILL
    description: str  # for example "trainer-0 was killed by SIGKILL"
    log_tail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    process: ProcessSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class StopProcess:
    """Kills the process."""

    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestSave:
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Say:
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnd:
    """The run is over. Every process that still runs must be ended."""

    outcome: RunOutcome
    why: str = ""


Action = Start | StopProcess | RequestSave | Say | RunEnd


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartRules:
    worker_restarts: int  # for each restartable process
    trainer_restarts: int  # in a row without a new checkpoint; a restart because of a lost node does not count
    steps: int  # total steps of the run
    save_s: float  # the time that the trainer has to write a requested checkpoint
    closing_s: float = CLOSING_S


class Phase(StrEnum):
    RUNNING = "running"
    RESTARTING = "restarting"  # the trainer is being stopped and will start again
    SAVING = "saving"
    CLOSING = "closing"
    OVER = "over"


@dataclass(slots=True)
class _Tracked:
    """A process of the placement and its present state."""

    process: ProcessSpec
    running: bool = False
    stopping: bool = False
    finished: bool = False  # it has exited and must not start again
    left_early: bool = False  # it exited as if the run were over, and the run is not
    started_s: float = 0.0
    due_s: float = 0.0  # when it must start
    restarts: int = 0
    early_failures: int = 0


@dataclass(slots=True)
class _TrainerFailure:
    at_s: float
    exit: ProcessExit | None  # None: a node was lost
    because_of_node: bool = False
    counted: bool = False  # as a restart: once for each failure, however long the restart takes


class Lifecycle:
    """One run. Every method that takes `now` (in seconds, from any origin) returns actions in the order to take them."""

    def __init__(self, place: Callable[[frozenset[str]], Sequence[ProcessSpec]], rules: RestartRules) -> None:
        self._place, self._rules = place, rules
        self._lost_nodes: frozenset[str] = frozenset()
        self._tracked = {p.name: _Tracked(process=p) for p in place(self._lost_nodes)}
        self._removed: dict[str, _Tracked] = {}  # no longer in the placement, but still running
        self._version = 0  # version of the newest checkpoint
        self._trainer_restarts = 0
        self._failure: _TrainerFailure | None = None
        self._deadline_s = 0.0  # deadline of the present phase, saving or closing
        self._save_s = 0.0
        self._save_requested = False
        self._repeat_save_at_s = 0.0
        self.phase = Phase.RUNNING

    @property
    def processes(self) -> list[ProcessSpec]:
        """The processes of the present placement."""
        return [tracked.process for tracked in self._tracked.values()]

    def begin(self, now: float) -> list[Action]:
        return self._start_due(now)

    def exited(self, name: str, exit: ProcessExit, now: float) -> list[Action]:
        """A process that was started has ended."""
        if (removed := self._removed.pop(name, None)) is not None:
            removed.running = False
            return []
        tracked = self._tracked[name]
        expected, tracked.running, tracked.stopping = tracked.stopping, False, False
        if self.phase is Phase.OVER or expected:
            return []
        if tracked.process.role == "trainer":
            return self._trainer_exited(tracked, exit, now)
        if self.phase is Phase.CLOSING:
            tracked.finished = True
            return []
        if exit.code == 0 and tracked.process.restart is Restart.ON_FAILURE:
            # The run may be about to end. If it is not over by then, somebody else told the process to leave.
            tracked.left_early, tracked.due_s = True, now + self._rules.closing_s
            return []
        return self._worker_failed(tracked, exit, now)

    def node_lost(self, node: str, why: str, now: float) -> list[Action]:
        """Nothing runs on this node any more, and nothing can."""
        self._lost_nodes |= {node}
        affected = [t for t in [*self._tracked.values(), *self._removed.values()] if t.process.node == node]
        for tracked in affected:
            tracked.running = tracked.stopping = False
        self._removed = {name: tracked for name, tracked in self._removed.items() if tracked.running}
        actions: list[Action] = [Say(text=f"{node} is lost ({why}); it ran {_names(affected) or 'no process'}")]
        if self.phase in (Phase.CLOSING, Phase.OVER):
            return actions
        if self.phase is Phase.SAVING:
            for tracked in affected:
                tracked.finished = True
        if any(t.process.node == node and t.process.role == "trainer" for t in self._tracked.values()):
            return actions + self._restart_trainer(_TrainerFailure(at_s=now, exit=None, because_of_node=True))
        return actions + self._place_again(now) if self.phase is Phase.RUNNING else actions

    def checkpointed(self, version: int) -> None:
        """The newest checkpoint is of this version."""
        if version > self._version:
            self._version, self._trainer_restarts = version, 0

    def save(self, now: float, time_left_s: float = inf) -> list[Action]:
        """The job's time is nearly over: the trainer writes a checkpoint and exits. `time_left_s`: until Slurm ends the job.

        A trainer that is being restarted has nothing to save. Its restart goes on, since it may turn out that it cannot start.
        """
        if self._save_requested or self.phase not in (Phase.RUNNING, Phase.RESTARTING):
            return []
        self._save_requested = True
        self._save_s = min(self._rules.save_s, max(time_left_s - ENDING_S, time_left_s / 2))
        self._deadline_s = now + self._save_s
        if self.phase is Phase.RESTARTING:
            return []
        self.phase = Phase.SAVING
        return [Say(text=f"the trainer is asked to save and to end within {self._save_s:.0f} s"), *self._request_save(now)]

    def interrupt(self) -> list[Action]:
        return self._over(RunOutcome.INTERRUPTED)

    def tick(self, now: float, heartbeat_s: float) -> list[Action]:
        """Time has passed. `heartbeat_s`: every node that is not lost has sent a heartbeat after this time."""
        match self.phase:
            case Phase.RESTARTING:
                return self._continue_restart(now, heartbeat_s)
            case Phase.CLOSING:
                return self._closing(now)
            case Phase.SAVING if now > self._deadline_s:
                return self._over(RunOutcome.SAVED, f"the trainer did not save within {self._save_s:.0f} s")
            case Phase.SAVING if now >= self._repeat_save_at_s:
                return self._start_due(now) + self._request_save(now)
            case Phase.RUNNING | Phase.SAVING:
                return self._start_due(now)
        return []

    # The trainer.

    def _request_save(self, now: float) -> list[Action]:
        """A process that is only starting misses the signal, so the request is repeated."""
        self._repeat_save_at_s = now + REPEAT_SAVE_S
        return [RequestSave(name=trainer.process.name) for trainer in self._trainers() if trainer.running]

    def _trainers(self) -> list[_Tracked]:
        return [tracked for tracked in self._tracked.values() if tracked.process.role == "trainer"]

    def _trainer_exited(self, trainer: _Tracked, exit: ProcessExit, now: float) -> list[Action]:
        if exit.code == 0:
            trainer.finished = True
            if not all(other.finished for other in self._trainers()):
                return []
            if self.phase is Phase.SAVING and self._version < self._rules.steps:
                return self._over(RunOutcome.SAVED)
            self.phase, self._deadline_s = Phase.CLOSING, now + self._rules.closing_s
            return []
        if self.phase is Phase.SAVING:
            return self._over(RunOutcome.SAVED, f"the last checkpoint is an older one: {exit.description}\n{exit.log_tail}")
        return self._restart_trainer(_TrainerFailure(at_s=now, exit=exit))

    def _restart_trainer(self, failure: _TrainerFailure) -> list[Action]:
        """Stops all trainer processes first."""
        if self._failure is None:
            self._failure = failure
        else:  # one failure leads to others: the first one is reported
            self._failure.because_of_node = self._failure.because_of_node or failure.because_of_node
            self._failure.at_s = failure.at_s if failure.because_of_node else self._failure.at_s
        if self.phase is Phase.SAVING:
            return self._over(RunOutcome.SAVED, "the trainer was lost while it saved")
        self.phase = Phase.RESTARTING
        return [action for trainer in self._trainers() for action in self._stop(trainer)]

    def _continue_restart(self, now: float, heartbeat_s: float) -> list[Action]:
        failure = self._failure
        assert failure is not None
        waiting = any(trainer.running for trainer in self._trainers()) or heartbeat_s < failure.at_s
        if waiting and not (self._save_requested and now > self._deadline_s):
            return []
        if failure.exit is not None and not failure.because_of_node and not failure.counted:
            if failure.exit.code == CANNOT_START or self._trainer_restarts >= self._rules.trainer_restarts:
                return self._over(RunOutcome.FAILED, self._why_trainer_failed(failure.exit))
            self._trainer_restarts += 1
            failure.counted = True
        if self._save_requested:
            return self._over(RunOutcome.SAVED, "the trainer was being restarted")
        actions = self._place_again(now)
        if self.phase is Phase.OVER or self._removed or any(t.stopping for t in self._tracked.values()):
            return actions  # a process that is still stopping may hold the GPUs that the trainer needs
        self.phase, self._failure = Phase.RUNNING, None
        for trainer in self._trainers():
            trainer.finished, trainer.due_s = False, now
        return [*actions, self._restart_message(failure), *self._start_due(now)]

    def _restart_message(self, failure: _TrainerFailure) -> Say:
        by_itself = failure.exit is not None and not failure.because_of_node
        why = f"after {failure.exit.description}" if failure.exit is not None and by_itself else "without the lost node"
        nodes = ", ".join(dict.fromkeys(trainer.process.node for trainer in self._trainers()))
        start = f"the checkpoint of version {self._version}" if self._version else "the beginning: it has no checkpoint yet"
        return Say(text=f"the trainer starts again {why}, on {nodes}, from {start}")

    def _why_trainer_failed(self, exit: ProcessExit) -> str:
        text = f"{exit.description}. {exit.log_tail}"
        if self._rules.trainer_restarts == 0:
            return text
        return f"after {self._trainer_restarts} restarts without a new checkpoint (cluster.trainer_restarts): {text}"

    # The other processes.

    def _worker_failed(self, worker: _Tracked, exit: ProcessExit, now: float) -> list[Action]:
        """A process that was killed may well start again; one that fails soon after its start may not."""
        early = exit.code > 0 and exit.code != NOT_NOW and now - worker.started_s < EARLY_FAILURE_S
        worker.early_failures = worker.early_failures + 1 if early else 0
        limit = self._rules.worker_restarts
        cannot_start = exit.code == CANNOT_START or not worker.process.restartable or worker.early_failures >= MAX_EARLY_FAILURES
        if cannot_start or worker.restarts >= limit:
            if self.phase is Phase.SAVING:
                worker.finished = True
                return [Say(text=f"{exit.description}; the run is about to end, so it is not restarted")]
            if self._fleet_runs_elsewhere(worker, now):
                return self._give_up_node(worker.process.node, exit, now)
            after = "" if cannot_start else f"after {worker.restarts} restarts (cluster.worker_restarts): "
            return self._over(RunOutcome.FAILED, f"{after}{exit.description}. {exit.log_tail}")
        delay_s = RESTART_DELAYS_S[min(worker.restarts, len(RESTART_DELAYS_S) - 1)]
        worker.due_s = now + delay_s
        worker.restarts += 1
        return [Say(text=f"{exit.description}; it starts again in {delay_s:g} s ({worker.restarts} of {limit} restarts)")]

    def _fleet_runs_elsewhere(self, worker: _Tracked, now: float) -> bool:
        """Whether the fleet runs well on other nodes. Then this node must be the problem, and the run can do without it."""
        here, role = worker.process.node, worker.process.role
        roles_here = {other.process.role for other in self._tracked.values() if other.process.node == here}
        if role != "rollout" or roles_here & {"trainer", "queue"}:
            return False
        others = [other for other in self._tracked.values() if other.process.role == role and other.process.node != here]
        return any(other.running and now - other.started_s >= EARLY_FAILURE_S for other in others)

    def _give_up_node(self, node: str, exit: ProcessExit, now: float) -> list[Action]:
        self._lost_nodes |= {node}
        said = Say(text=f"{node} is given up, since the fleet runs on other nodes: {exit.description}. {exit.log_tail}")
        return [said, *(self._place_again(now) if self.phase is not Phase.RESTARTING else ())]

    def _closing(self, now: float) -> list[Action]:
        """Workers and judges leave when the queue says that the run is over. The queue itself does not leave."""
        late = [t for t in self._tracked.values() if t.running and t.process.role not in ("trainer", "queue")]
        if late and now <= self._deadline_s:
            return []
        said: list[Action] = []
        if late:
            said.append(Say(text=f"{_names(late)} did not leave within {self._rules.closing_s:g} s and will be ended"))
        return said + self._over(RunOutcome.DONE)

    # All processes.

    def _start_due(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for tracked in self._tracked.values():
            if tracked.running or tracked.finished or now < tracked.due_s or tracked.process.name in self._removed:
                continue
            if tracked.left_early:
                actions.append(Say(text=f"{tracked.process.name} left while the run goes on; it starts again"))
            tracked.running, tracked.left_early, tracked.started_s = True, False, now
            actions.append(Start(process=tracked.process))
        return actions

    def _stop(self, tracked: _Tracked) -> list[Action]:
        if not tracked.running or tracked.stopping:
            return []
        tracked.stopping = True
        return [StopProcess(name=tracked.process.name)]

    def _place_again(self, now: float) -> list[Action]:
        """Changes to the placement without the lost nodes. A process that moves or is no longer placed is stopped."""
        try:
            placed = {process.name: process for process in self._place(self._lost_nodes)}
        except TooFewNodes as error:
            return self._over(RunOutcome.TOO_FEW_NODES, str(error))
        actions: list[Action] = []
        for name, tracked in list(self._tracked.items()):
            if placed.get(name) == tracked.process:
                continue
            if tracked.running:
                actions += self._stop(tracked)
                self._removed[name] = tracked
            del self._tracked[name]
        self._tracked = {
            name: self._tracked.get(name) or _Tracked(process=process, due_s=now) for name, process in placed.items()
        }
        return actions

    def _over(self, outcome: RunOutcome, why: str = "") -> list[Action]:
        if self.phase is Phase.OVER:
            return []
        self.phase = Phase.OVER
        return [RunEnd(outcome=outcome, why=why)]


def _names(tracked: Sequence[_Tracked]) -> str:
    return ", ".join(item.process.name for item in tracked)
