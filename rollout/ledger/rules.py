"""The numbers of the off-policy contract. `docs/ledger.md` states the rules and proves the bound."""

from dataclasses import dataclass
from typing import Self

from conf.schema import RunConfig


class RulesError(ValueError):
    """The rules contradict one another. The message says what to change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    groups_per_step: int  # P
    completions_per_group: int  # G
    max_staleness: int  # S, in versions: no trained token has a larger lag
    window: int = 0  # W, in groups: how many ready groups may bypass the oldest group that is not ready
    segment_tokens: int
    max_completion_tokens: int
    total_steps: int | None = None  # no group is admitted that no step would train on
    drop_no_signal: bool = False  # drop groups whose rewards are all equal
    max_drops_per_step: int  # more drops than this between two takes stop the run: the data is too easy, too hard, or broken

    def __post_init__(self) -> None:
        least = {"groups_per_step": 1, "completions_per_group": 2, "max_staleness": 0, "window": 0, "segment_tokens": 1}
        least |= {"max_completion_tokens": 1, "max_drops_per_step": 0}
        for name, minimum in least.items():
            if (value := getattr(self, name)) < minimum:
                raise RulesError(f"{name}={value}: must be at least {minimum}")
        if self.total_steps is not None and self.total_steps < 1:
            raise RulesError(f"total_steps={self.total_steps}: must be at least 1, or None for a run without end")
        if self.lead < 0:
            raise RulesError(
                f"window={self.window} costs {self.max_staleness - self.lead} version(s) of lead (window / groups_per_step="
                f"{self.groups_per_step}, rounded up), more than max_staleness={self.max_staleness}: decrease the window "
                "or increase the staleness"
            )

    @classmethod
    def of(cls, config: RunConfig, *, steps: int | None = None) -> Self:
        """The rules of a run with this number of steps, by default `trainer.steps`."""
        algo, rollout = config.algo, config.rollout
        return cls(
            groups_per_step=algo.groups_per_step,
            completions_per_group=algo.completions_per_group,
            max_staleness=rollout.max_staleness,
            window=rollout.window,
            segment_tokens=rollout.segment_tokens,
            max_completion_tokens=rollout.max_completion_tokens,
            total_steps=config.trainer.steps if steps is None else steps,
            drop_no_signal=algo.drop_no_signal,
            max_drops_per_step=algo.max_drops_per_step,
        )

    @property
    def lead(self) -> int:
        """How many whole steps generation may run ahead of the published version."""
        return self.max_staleness - -(-self.window // self.groups_per_step)

    def admissible(self, version: int) -> int:
        """How many groups, without dropped ones, may have been admitted while `version` is the published version."""
        steps, total = version + self.lead + 1, self.total_steps
        return self.groups_per_step * (steps if total is None or steps < total else total)
