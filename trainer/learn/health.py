"""Detects training that goes wrong: numbers that are not finite, figures that diverge, and rewards without differences.

`FiniteCheck` looks at the quantities of each microbatch without waiting for the device; `verify` asks once, on all ranks.
`Divergence` looks at the figures of a whole step. Both raise TrainingError, which ends the run with an exit code other than 0.
A run without differences between rewards only gets a warning.
"""

from collections.abc import Mapping, Sequence
from math import isfinite

import torch
import torch.distributed as dist
from torch import Tensor

from rollout.ledger.records import Batch
from trainer.learn.packing import Microbatch
from trainer.process_groups import Mesh

QUANTITIES = (
    "old log-prob", "reference log-prob", "current log-prob", "entropy", "loss", "gradient",
    "gradient norm",
)  # fmt: skip
"""The quantities that are checked, in the order in which one is computed from another."""
_NOTHING = 2**62


class TrainingError(RuntimeError):
    """Training went wrong in a way that more steps cannot repair."""


class NonFinite(TrainingError):
    """A quantity of a microbatch is not finite. Raised on every rank, before any weight is changed."""

    def __init__(self, quantity: str, *, microbatch: int, rank: int) -> None:
        self.quantity, self.microbatch, self.rank = quantity, microbatch, rank
        super().__init__(f"{quantity} is not finite in microbatch {microbatch} of rank {rank}")


class FiniteCheck:
    """The first quantity that is not finite, over the microbatches of one pass."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._first = torch.full((), _NOTHING, dtype=torch.int64, device=mesh.device)

    def note(self, microbatch: int, quantity: str, values: Tensor) -> None:
        """Checks values of any shape, without waiting for the device."""
        code = microbatch * len(QUANTITIES) + QUANTITIES.index(quantity)
        self._first = torch.where(torch.isfinite(values).all(), self._first, self._first.clamp(max=code))

    def verify(self) -> None:
        """Raises NonFinite on every rank if any rank noted a value that is not finite. Collective over all ranks."""
        ranks = dist.get_world_size()
        code = torch.where(self._first == _NOTHING, _NOTHING, self._first * ranks + dist.get_rank())
        dist.all_reduce(code, op=dist.ReduceOp.MIN)
        if (found := int(code.item())) != _NOTHING:
            microbatch, quantity = divmod(found // ranks, len(QUANTITIES))
            raise NonFinite(QUANTITIES[quantity], microbatch=microbatch, rank=found % ranks)


def describe(found: NonFinite, batch: Batch, microbatches: Sequence[Microbatch], part: str) -> str:
    """The error message: the rank that has the microbatch names its prompts, the others name that rank.

    microbatches: this rank's microbatches of the pass that `part` names.
    """
    where = f"step {batch.step}, {part}, microbatch {found.microbatch} of {len(microbatches)} of rank {found.rank}"
    start = f"the {found.quantity} is not finite at {where}; no weight was changed. "
    if found.rank != dist.get_rank():
        return start + f"Rank {found.rank} says which prompts these are."
    groups = [(group, t) for group in batch.groups for t in group.trajectories]
    members = [groups[number] for number in microbatches[found.microbatch].trajectories]
    listed = ", ".join(
        f"{group.prompt_id!r} ({len(t.tokens)} tokens, {t.completion_tokens} sampled, lag {t.lag(batch.step)})"
        for group, t in members
    )
    return start + f"Its trajectories are of the prompts {listed}."


class Divergence:
    """Ends a run whose figures show that it learns from noise. It counts over steps; all ranks have the same figures."""

    def __init__(self, *, ess_floor: float, patience_steps: int) -> None:
        self._ess_floor, self._patience_steps = ess_floor, patience_steps
        self._low_steps = 0

    def check(self, figures: Mapping[str, float]) -> None:
        """Raises TrainingError for a figure that is not finite, and for an effective sample size that stays too low too long."""
        if broken := sorted(name for name, value in figures.items() if not isfinite(value)):
            raise TrainingError(f"the run diverged: {', '.join(broken)} not finite; {_ADVICE}")
        ess = figures.get("behaviour/ess_fraction", 1.0)
        self._low_steps = self._low_steps + 1 if ess < self._ess_floor else 0
        if self._low_steps >= self._patience_steps:
            raise TrainingError(
                f"the run diverged: the behaviour weights' effective sample size was below algo.ess_floor={self._ess_floor:g} of "
                f"the tokens for {self._low_steps} steps (now {ess:.3g}), so a few tokens decide each update; {_ADVICE}"
            )


_ADVICE = (
    "mismatch/same_version_abs_logprob shows whether trainer and engines disagree (above 0.1 one of them is wrong); if only the "
    "mismatch of older versions is large, lower rollout.max_staleness or trainer.lr and resume from an earlier checkpoint"
)

STEPS_WITHOUT_SIGNAL = 3


def no_signal_warning(figures: Mapping[str, float], reasons: Mapping[str, int]) -> str:
    """The warning for a run that learns nothing from its rewards, or "". It comes once, after a fixed number of steps."""
    if figures.get("reward/steps_without_signal") != STEPS_WITHOUT_SIGNAL:
        return ""
    commonest = "; ".join(f"{count} x {reason}" for reason, count in reasons.items()) or "none was given"
    return (
        f"warning: the run learns nothing from its rewards: for {STEPS_WITHOUT_SIGNAL} steps, all completions of each prompt got "
        f"the same reward (mean {figures['reward/mean']:.3g}). Commonest reasons of the verdicts: {commonest}"
    )
