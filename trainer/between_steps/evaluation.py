"""Evaluations on held-out problems, which the run's own engines sample and its own judges grade while training goes on.

Training waits for the first evaluation (before step 1) and the last one (after the final step). The others run beside training,
and the trainer asks for their results once per step. Their figures are logged with the step at which they are complete.
Two evaluations never run at once: one that becomes due while another runs begins after it, or is left out if the last one comes
first.

Problems are leased ahead of training groups, so they begin at the version at which they were asked for, `eval/version`. A push
does not stop them: tokens after it are of the next version, as `eval/version_min` and `eval/version_max` show.
"""

import time
from dataclasses import dataclass

from conf.schema import RunConfig
from rollout.ledger.records import EvalResult
from trainer.between_steps.feed import Feed


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    version: int
    began_s: float


class Evaluations:
    """When evaluations are due, and their figures. Every method is collective."""

    def __init__(self, feed: Feed, config: RunConfig, *, owed: bool) -> None:
        """owed: an evaluation was running or due when the checkpoint was made; it starts again, at this version."""
        self._feed = feed
        self._steps, self._every = config.trainer.steps, config.trainer.eval_every
        self._completions = config.trainer.eval_completions
        self._there_are_problems = bool(config.data.heldout or config.data.heldout_fraction)
        self._due = owed
        self._asked: _Asked | None = None

    @property
    def owed(self) -> bool:
        """Whether an evaluation is running or due. A checkpoint keeps this."""
        return self._due or self._asked is not None

    def begin(self) -> dict[str, float]:
        """To be called before the first step of this process. Waits for the first evaluation of a run."""
        if self._feed.version == 0:
            return self._wait_for_one()
        self._ask_if_due()
        return {}

    def after_step(self) -> dict[str, float]:
        """Starts an evaluation if one is due. Returns the figures of one that is complete, else {}."""
        version = self._feed.version
        if version == self._steps:
            if self._asked is not None:
                self._give_up(self._asked)
            return self._wait_for_one()
        figures = self._collect(wait=False)
        self._due |= self._every > 0 and version % self._every == 0
        self._ask_if_due()
        return figures

    def _wait_for_one(self) -> dict[str, float]:
        if not self._there_are_problems:
            return {}
        began_s = time.monotonic()
        self._due = True
        self._ask_if_due()
        figures = self._collect(wait=True)
        return figures | {"time/eval_s": time.monotonic() - began_s}

    def _ask_if_due(self) -> None:
        if self._due and self._asked is None:
            self._due = False
            if self._there_are_problems:
                self._asked = _Asked(version=self._feed.version, began_s=time.monotonic())
                self._feed.start_evaluation(_name(self._asked), self._completions)

    def _collect(self, *, wait: bool) -> dict[str, float]:
        if self._asked is None:
            return {}
        result = self._feed.evaluation(_name(self._asked), wait=wait)
        if result is None:
            return {}
        asked, self._asked = self._asked, None
        return _figures(result, asked)

    def _give_up(self, asked: _Asked) -> None:
        self._feed.end_evaluation(_name(asked), "the last evaluation begins")
        self._asked = None


def _name(asked: _Asked) -> str:
    return f"version-{asked.version}"


def _figures(result: EvalResult, asked: _Asked) -> dict[str, float]:
    return {
        "eval/pass_rate": result.pass_rate,
        "eval/reward_mean": result.mean_reward,
        "eval/tokens": result.tokens,
        "eval/version": asked.version,
        "eval/version_min": result.version_min,
        "eval/version_max": result.version_max,
        "eval/wall_s": time.monotonic() - asked.began_s,
        **({} if result.teacher_kl is None else {"eval/kl_teacher": result.teacher_kl}),
    }
