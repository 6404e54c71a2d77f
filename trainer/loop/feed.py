"""What the trainer gets from the queue server, the same on every rank (batches, evaluations), and what it tells it (versions).

While it waits for a batch or an evaluation it pushes the present weights to engines that join, since that may be what is needed.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rollout.ledger.records import Batch, EvalResult, Waiting
from rollout.queue.client import QueueClient, QueueError
from trainer.push.control import Control
from trainer.push.push import Pusher, PushReport

POLL_S = 2.0
ACCOUNT = (
    "admitted_groups", "steps_taken", "trained_tokens", "waiting_tokens", "eval_tokens", "dropped_groups", "dropped_tokens",
    "lost_tokens",
)  # fmt: skip
"""Of the ledger's figures those that a checkpoint keeps: a new ledger could begin with them (`rollout/ledger/new_ledger.py`)."""

log = logging.getLogger("trainer")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    """What rank 0 found: exactly one of batch and result when it is there, else what to do instead of waiting on."""

    batch: Batch | None = None
    result: EvalResult | None = None
    engines_waiting: bool = False
    told_to_leave: bool = False


class Feed:
    """One rank's end. Every method is collective; only rank 0 has a `queue`."""

    def __init__(self, control: Control, queue: QueueClient | None, pusher: Pusher, *, version: int) -> None:
        self._control, self._queue, self._pusher = control, queue, pusher
        self.version = version  # of the weights that the policy holds

    def begin(self, position: Mapping[str, Any]) -> PushReport:
        """A run starts, or goes on from a checkpoint: the ledger goes back to `version`, and the fleet gets its weights.

        position: what `position` said when the checkpoint was made; {} where there is none. Raises QueueError if this
        cannot be the ledger that the checkpoint was made with.
        """
        self._control.share(bool, lambda: self._rewind(position))
        return self.publish()

    def position(self) -> dict[str, Any]:
        """Where the ledger stands, for a checkpoint; on rank 0, {} elsewhere."""
        if self._queue is None:
            return {}
        ledger = self._queue.status()["ledger"]
        return {name: ledger[name] for name in ACCOUNT}

    def publish(self) -> PushReport:
        """Gives the present weights to the fleet as it is now."""
        report = self._pusher.push(self.version)
        if self._queue is not None:
            self._report_failures(report)
            self._queue.published(self.version, report.engines)
        return report

    def advance(self) -> PushReport:
        """The step is done: the fleet gets the new weights, and only then may the ledger admit more."""
        self.version += 1
        report = self._pusher.push(self.version)
        if self._queue is not None:
            self._report_failures(report)
            self._queue.advance(self.version, report.engines)
        return report

    def take(self, told_to_leave: Callable[[], bool]) -> Batch | None:
        """The batch that takes the weights from `version` to the next one, or None once rank 0 is told to leave.

        Raises Stalled when none can come.
        """
        while (answer := self._control.share(_Answer, lambda: self._ask_batch(told_to_leave))).batch is None:
            if answer.told_to_leave:
                return None
            if answer.engines_waiting:
                self.publish()
        return answer.batch

    def start_evaluation(self, eval_id: str, completions: int) -> None:
        """Has the held-out problems sampled and graded from now on, ahead of training groups."""
        if self._queue is not None:
            self._queue.start_eval(eval_id, completions=completions)

    def evaluation(self, eval_id: str, *, wait: bool) -> EvalResult | None:
        """Its result, once it is complete; otherwise None, or, if it is waited for, Stalled when it cannot come."""
        while (answer := self._control.share(_Answer, lambda: self._ask_eval(eval_id, POLL_S if wait else 0.0))).result is None:
            if not wait:
                return None
            if answer.engines_waiting:
                self.publish()
        return answer.result

    def end_evaluation(self, eval_id: str, reason: str) -> None:
        """Gives it up: nobody waits for it any more."""
        if self._queue is not None:
            log.warning("the evaluation of %s is given up: %s", eval_id, reason)
            self._queue.close_eval(eval_id)

    def durable(self, version: int) -> None:
        """The checkpoint of `version` is safe: what lies before it may be forgotten."""
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
                    "made: it is not this run's, or an older copy. Bring the ledger.db back that belongs to the checkpoint, or "
                    "begin a new one from there: python -m rollout.ledger.new_ledger says what that loses"
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
            log.warning("push %d: engine %s failed and is started again: %s", report.version, engine, reason)
            self._queue.condemn(engine, reason)
