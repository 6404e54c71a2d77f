"""The trainer's connection to the queue: every rank receives the same batches and evaluations, and rank 0 reports versions.

While it waits for a batch or an evaluation, it pushes the present weights to engines that join: the batch may need them.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rollout.ledger.records import Batch, EvalResult, Waiting
from rollout.queue.client import QueueClient, QueueError
from trainer.push.push import Pusher, PushReport
from trainer.ranks import Control

POLL_S = 2.0
ACCOUNT = (
    "admitted_groups", "steps_taken", "trained_tokens", "waiting_tokens", "eval_tokens", "dropped_groups", "dropped_tokens",
    "lost_tokens",
)  # fmt: skip
"""The counts of the ledger that a checkpoint keeps: a new ledger can begin with them (`rollout/ledger/new_ledger.py`)."""

log = logging.getLogger("trainer")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    """What rank 0 got: a batch, or the result of an evaluation, or what to do before it asks again."""

    batch: Batch | None = None
    result: EvalResult | None = None
    engines_waiting: bool = False
    told_to_leave: bool = False


class Feed:
    """Every method is collective. Only rank 0 has a `queue`."""

    def __init__(self, control: Control, queue: QueueClient | None, pusher: Pusher, *, version: int) -> None:
        self._control, self._queue, self._pusher = control, queue, pusher
        self.version = version  # the version of the policy's weights

    def begin(self, position: Mapping[str, Any]) -> PushReport:
        """Starts or resumes the run: sets the ledger back to `version`, and gives the fleet the weights of that version.

        position: what `position` returned when the checkpoint was made; {} without a checkpoint. Raises QueueError if the
        checkpoint cannot belong to this ledger.
        """
        self._control.share(bool, lambda: self._rewind(position))
        return self.publish()

    def position(self) -> dict[str, Any]:
        """The counts of the ledger, for a checkpoint, on rank 0; {} elsewhere."""
        if self._queue is None:
            return {}
        ledger = self._queue.status()["ledger"]
        return {name: ledger[name] for name in ACCOUNT}

    def publish(self) -> PushReport:
        """Pushes the present weights to all engines that are registered now."""
        report = self._pusher.push(self.version)
        if self._queue is not None:
            self._report_failures(report)
            self._queue.published(self.version, report.engines)
        return report

    def advance(self) -> PushReport:
        """Ends a step: pushes the new weights, and only then lets the ledger admit more groups."""
        self.version += 1
        report = self._pusher.push(self.version)
        if self._queue is not None:
            self._report_failures(report)
            self._queue.advance(self.version, report.engines)
        return report

    def take(self, told_to_leave: Callable[[], bool]) -> Batch | None:
        """Waits for the batch that takes the weights from `version` to the next one. None if rank 0 is told to leave.

        Raises Stalled if no batch can come.
        """
        while (answer := self._control.share(_Answer, lambda: self._ask_batch(told_to_leave))).batch is None:
            if answer.told_to_leave:
                return None
            if answer.engines_waiting:
                self.publish()
        return answer.batch

    def start_evaluation(self, eval_id: str, completions: int) -> None:
        """Starts to sample and grade the held-out problems, ahead of training groups."""
        if self._queue is not None:
            self._queue.start_eval(eval_id, completions=completions)

    def evaluation(self, eval_id: str, *, wait: bool) -> EvalResult | None:
        """The result of an evaluation, or None while it is incomplete. With `wait`, waits; raises Stalled if it cannot come."""
        while (answer := self._control.share(_Answer, lambda: self._ask_eval(eval_id, POLL_S if wait else 0.0))).result is None:
            if not wait:
                return None
            if answer.engines_waiting:
                self.publish()
        return answer.result

    def end_evaluation(self, eval_id: str, reason: str) -> None:
        """Gives up an evaluation: nobody waits for its result any more."""
        if self._queue is not None:
            log.warning("the evaluation %s is given up: %s", eval_id, reason)
            self._queue.close_eval(eval_id)

    def durable(self, version: int) -> None:
        """Tells the ledger that the checkpoint of `version` is written, so it may forget what came before."""
        if self._queue is not None:
            self._queue.durable(version)

    def queue_figures(self) -> dict[str, float]:
        """The queue's own figures on rank 0; {} elsewhere."""
        if self._queue is None:
            return {}
        figures: dict[str, float] = self._queue.status()["figures"]
        return figures

    def _rewind(self, position: Mapping[str, Any]) -> bool:
        assert self._queue is not None
        ledger = self._queue.status()["ledger"]
        for name, least in (("admitted_groups", position.get("admitted_groups", 0)), ("steps_taken", self.version)):
            if ledger[name] < least:
                raise QueueError(
                    f"the ledger has {name}={ledger[name]}, but had {least} when the checkpoint of version {self.version} was "
                    "made: it is another run's, or an older copy. Restore the ledger.db that belongs to the checkpoint, or "
                    "begin a new one from the checkpoint: python -m rollout.ledger.new_ledger says what that loses"
                )
        self._queue.rewind(self.version)
        return True

    def _ask_batch(self, told_to_leave: Callable[[], bool]) -> _Answer:
        assert self._queue is not None
        if told_to_leave():
            return _Answer(told_to_leave=True)
        found = self._queue.take(self.version, wait_s=POLL_S)
        if isinstance(found, Waiting):
            return _Answer(engines_waiting=found.fleet_changed)
        return _Answer(batch=found)

    def _ask_eval(self, eval_id: str, wait_s: float) -> _Answer:
        assert self._queue is not None
        result = self._queue.eval_result(eval_id, wait_s=wait_s)
        if result is not None:
            return _Answer(result=result)
        return _Answer(engines_waiting=any(e.version != self.version for e in self._queue.fleet()))

    def _report_failures(self, report: PushReport) -> None:
        assert self._queue is not None
        for engine, reason in report.failed.items():
            log.warning("push %d: engine %s failed and is restarted: %s", report.version, engine, reason)
            self._queue.condemn(engine, reason)
