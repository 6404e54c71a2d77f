"""One RL step: trains the policy on a batch and returns the figures of the step.

1. Pack the trajectories into microbatches, in `algo.minibatches` equal parts.
2. Compute old log-probs and, for a KL or a teacher, reference log-probs (forward only). The first minibatch needs no pass for
   its old log-probs: the forward pass of its update gives them.
3. Compute advantages (`learn/batch_loss.py`).
4. For each minibatch: forward, behaviour weights and loss (`learn/objective.py`), backward, optimizer step
   (`megatron/policy.py`).
5. If it is due, make the policy the new reference.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count

import numpy as np
import torch
from torch import Tensor

from conf.schema import RunConfig
from conf.shapes import Layout, ModelShape
from rollout.ledger.records import Batch
from trainer.learn.advantages import loss_weights
from trainer.learn.algorithm import Algorithm
from trainer.learn.balance import Capacity, CostModel
from trainer.learn.batch_loss import BatchLoss
from trainer.learn.health import NonFinite, TrainingError, describe
from trainer.learn.packing import Microbatch, Minibatch, deal, pack_minibatch
from trainer.learn.token_figures import TokenFigures
from trainer.megatron.policy import MicrobatchLoss, Policy
from trainer.process_groups import Mesh

Figures = dict[str, float]
"""Figures of a step by name; trainer/metrics/table.py lists all names."""


class Stopwatch:
    """Seconds by name: `with watch("time/train_s"): …`."""

    def __init__(self) -> None:
        self.seconds: Figures = {}
        self._began_s = time.perf_counter()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def elapsed_s(self) -> float:
        return time.perf_counter() - self._began_s


def train_step(policy: Policy, algorithm: Algorithm, batch: Batch, config: RunConfig, watch: Stopwatch) -> Figures:
    """Trains on `batch`. Collective over all ranks.

    Raises TrainingError if a token is older than the bound, or if a number is not finite.
    """
    check_staleness(batch, config.rollout.max_staleness)
    mesh, algo = policy.mesh, config.algo
    with watch("time/pack_s"):
        minibatches = pack(batch, config, policy.shape, mesh.layout, mesh.dp)
        mine = [m.microbatches(mesh.dp_rank, cp=mesh.layout.cp, cp_rank=mesh.cp_rank) for m in minibatches]
    everything = [microbatch for minibatch in mine for microbatch in minibatch]

    with watch("time/old_logprob_s"):
        old = old_logprobs(policy, batch, mine, config)
    reference: list[Tensor] = []
    if policy.reference is not None:
        with watch("time/ref_logprob_s"), policy.reference.in_place(), explained(batch, everything, "the reference log-probs"):
            reference = policy.logprobs(everything, "reference log-prob")
    teacher = teacher_logprobs(batch, everything, reference, config, mesh)

    figures, loss = TokenFigures(mesh), None
    if mesh.is_last_stage:
        loss = BatchLoss(
            batch, everything, old=old, reference=reference, teacher=teacher, config=config, algorithm=algorithm, mesh=mesh,
            figures=figures,
        )  # fmt: skip
    places, norms, learning_rate = count(), [], 0.0
    with watch("time/train_s"):
        for number, minibatch in enumerate(mine):
            with explained(batch, minibatch, f"minibatch {number} of {len(mine)}"):
                losses: list[MicrobatchLoss] = [partial(loss, next(places)) for _ in minibatch] if loss else []
                norm, learning_rate = policy.update(minibatch, losses)
            norms.append(norm)
        policy.gather_parameters()
    if policy.reference and algo.reference_refresh_steps and (batch.step + 1) % algo.reference_refresh_steps == 0:
        policy.reference.refresh(batch.step + 1)
    return {
        **figures.reduce(),
        "grad_norm": float(np.mean(norms)),
        "grad_norm_max": max(norms),
        "learning_rate": learning_rate,
        **packing_figures(minibatches),
        **(policy.reference.figures() if policy.reference else {}),
    }


def old_logprobs(
    policy: Policy, batch: Batch, minibatches: Sequence[Sequence[Microbatch]], config: RunConfig
) -> list[Tensor | None]:
    """The old log-probs of each microbatch, on the last stage; None for those of the first minibatch if its update gives them."""
    known_later = len(minibatches[0]) if config.first_pass_is_old else 0
    microbatches = [microbatch for minibatch in minibatches for microbatch in minibatch][known_later:]
    if not microbatches:
        return [None] * known_later
    with explained(batch, microbatches, "the old log-probs"):
        return [*[None] * known_later, *policy.logprobs(microbatches, "old log-prob")]


def pack(batch: Batch, config: RunConfig, shape: ModelShape, layout: Layout, dp: int) -> list[Minibatch]:
    """The minibatches of a step. Every rank computes the same ones, because all ranks have the same inputs."""
    trajectories = batch.trajectories
    sampled = np.array([t.completion_tokens for t in trajectories])
    return [
        pack_minibatch(
            [trajectories[i] for i in part],
            loss_weights(sampled[part], config.algo.loss_normalisation, config.rollout.max_completion_tokens),
            part,
            capacity=Capacity.of(layout, config.trainer.tokens_per_microbatch),
            dp=dp,
            cost=CostModel.of(shape),
        )
        for part in deal(len(trajectories), config.algo.minibatches, seed=config.trainer.seed * 1_000_003 + batch.step)
    ]


def teacher_logprobs(
    batch: Batch, microbatches: Sequence[Microbatch], reference: Sequence[Tensor], config: RunConfig, mesh: Mesh
) -> Sequence[Tensor]:
    """The teacher's log-probs of each microbatch, on the last stage; [] without a teacher. Raises TrainingError."""
    if config.algo.teacher_is_reference:
        return reference
    if not config.algo.teacher_is_asked:
        return []
    if any(not len(t.teacher) for t in batch.trajectories):
        raise TrainingError(
            f"step {batch.step} has completions without log-probs of the teacher {config.algo.teacher}: they were sampled before "
            "algo.teacher was set. Resume without it, or start a new run"
        )
    return [torch.from_numpy(m.teacher_logprobs).to(mesh.device) for m in microbatches]


def packing_figures(minibatches: Sequence[Minibatch]) -> Figures:
    """The imbalance compares with equal work on every data-parallel rank: ranks wait for one another at each minibatch."""
    balances = [minibatch.balance for minibatch in minibatches]
    ranks = [b.costs.sum(1) for b in balances]
    return {
        "packing/padding_fraction": float(sum(b.padding.sum() for b in balances) / sum(b.tokens.sum() for b in balances)),
        "packing/dp_imbalance_fraction": float(sum(r.max() for r in ranks) / sum(r.mean() for r in ranks) - 1),
        "packing/microbatches": float(sum(b.tokens.shape[1] for b in balances)),
    }


def check_staleness(batch: Batch, max_staleness: int) -> None:
    """Checks the ledger's law once more, where it matters. Raises TrainingError."""
    for group in batch.groups:
        if (lag := max(t.lag(batch.step) for t in group.trajectories)) > max_staleness:
            raise TrainingError(
                f"group {group.index} (prompt {group.prompt_id!r}) holds a token {lag} versions old at step {batch.step}, "
                f"above max_staleness={max_staleness}: the ledger's law is broken"
            )


@contextmanager
def explained(batch: Batch, microbatches: Sequence[Microbatch], part: str) -> Iterator[None]:
    """Names the trajectories that a number which is not finite comes from."""
    try:
        yield
    except NonFinite as found:
        raise TrainingError(describe(found, batch, microbatches, part)) from found
