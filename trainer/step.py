"""One RL step: a batch in, better weights and the step's figures out.

batch -> minibatches of packed microbatches
      -> old log-probs (forward) -> reference log-probs (forward, reference weights swapped in)
      -> behaviour weights, advantages by group
      -> for each minibatch: forward, backward, optimizer step
      -> when it is due, the reference becomes what the policy is now
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from conf.schema import RunConfig
from conf.shapes import Layout, ModelShape
from rollout.ledger.records import Batch
from trainer.learn.advantages import loss_weights
from trainer.learn.balance import Capacity, CostModel
from trainer.learn.health import NonFinite, TrainingError, describe
from trainer.learn.metrics import TokenFigures, mismatch_figure
from trainer.learn.packing import Microbatch, Minibatch, deal, pack_minibatch
from trainer.learn.targets import make_signals
from trainer.megatron.policy import Policy

Figures = dict[str, float]


class Stopwatch:
    """Seconds by name: `with watch("time/train_s"): …`."""

    def __init__(self) -> None:
        self.seconds: Figures = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def train_step(policy: Policy, batch: Batch, config: RunConfig, watch: Stopwatch) -> Figures:
    """Trains on `batch`; collective over all ranks. Raises TrainingError for a token older than the bound or a bad gradient."""
    check_staleness(batch, config.rollout.max_staleness)
    with watch("time/pack_s"):
        mesh = policy.mesh
        minibatches = pack(batch, config, policy.shape, mesh.layout, mesh.dp)
        mine = [m.microbatches(mesh.dp_rank, cp=mesh.layout.cp, cp_rank=mesh.cp_rank) for m in minibatches]
    everything = [microbatch for minibatch in mine for microbatch in minibatch]

    with watch("time/old_logprob_s"), explained(batch, everything, "the old log-probs"):
        old = policy.logprobs(everything, "old log-prob")
    reference: list[Tensor] = []
    if config.algo.kl_coef > 0:
        with watch("time/ref_logprob_s"), policy.reference_weights(), explained(batch, everything, "the reference log-probs"):
            reference = policy.logprobs(everything, "reference log-prob")

    figures = TokenFigures(policy.mesh, max_lag=config.rollout.max_staleness)
    measure_mismatch(everything, old, batch.step, figures)
    signals = make_signals(batch, everything, old, reference, config, policy.mesh, figures)
    norms, learning_rate, done = [], 0.0, 0
    with watch("time/train_s"):
        for number, minibatch in enumerate(mine):
            with explained(batch, minibatch, f"minibatch {number} of {len(mine)}"):
                norm, learning_rate = policy.update(minibatch, signals[done : done + len(minibatch)], figures)
            norms.append(norm)
            done += len(minibatch)
        policy.gather_parameters()
    if (every := config.algo.reference_refresh_steps) and policy.reference and (batch.step + 1) % every == 0:
        policy.reference.refresh(batch.step + 1)
    of_reference = policy.reference.figures() if policy.reference else {}
    return (
        figures.reduce()
        | {
            "grad_norm": float(np.mean(norms)),
            "grad_norm_max": max(norms),
            "learning_rate": learning_rate,
        }
        | packing_figures(minibatches)
        | of_reference
    )


def pack(batch: Batch, config: RunConfig, shape: ModelShape, layout: Layout, dp: int) -> list[Minibatch]:
    """The minibatches of a step: the same on every rank, since nothing that it depends on differs between them."""
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


def packing_figures(minibatches: Sequence[Minibatch]) -> Figures:
    """padding_fraction: of the tokens that go through the model. dp_imbalance_fraction: how much longer a step computes than it
    would with equal work on every data-parallel rank; the ranks wait for one another at each minibatch."""
    balances = [minibatch.balance for minibatch in minibatches]
    ranks = [b.costs.sum(1) for b in balances]
    return {
        "packing/padding_fraction": float(sum(b.padding.sum() for b in balances) / sum(b.tokens.sum() for b in balances)),
        "packing/dp_imbalance_fraction": float(sum(r.max() for r in ranks) / sum(r.mean() for r in ranks) - 1),
        "packing/microbatches": float(sum(b.tokens.shape[1] for b in balances)),
    }


def check_staleness(batch: Batch, max_staleness: int) -> None:
    """The ledger's law, checked once more where it matters. Raises TrainingError."""
    for group in batch.groups:
        if (lag := max(t.lag(batch.step) for t in group.trajectories)) > max_staleness:
            raise TrainingError(
                f"group {group.index} (prompt {group.prompt_id!r}) holds a token {lag} versions old at step {batch.step}, "
                f"above max_staleness={max_staleness}: the ledger's law is broken"
            )


@contextmanager
def explained(batch: Batch, microbatches: Sequence[Microbatch], part: str) -> Iterator[None]:
    """Says of a quantity that is not finite which trajectories it comes from."""
    try:
        yield
    except NonFinite as found:
        raise TrainingError(describe(found, batch, microbatches, part)) from found


def measure_mismatch(microbatches: Sequence[Microbatch], old: Sequence[Tensor], version: int, figures: TokenFigures) -> None:
    """|old - behaviour| a token: staleness and engine mismatch together, and by lag; at lag 0 it is engine mismatch alone."""
    for microbatch, logprobs in zip(microbatches, old, strict=False):
        difference = (logprobs - torch.from_numpy(microbatch.behaviour_logprobs).to(logprobs.device)).abs()
        figures.add("mismatch/abs_logprob", difference)
        lags = version - microbatch.versions
        for lag in np.unique(lags).tolist():
            figures.add(mismatch_figure(lag), difference[torch.from_numpy(lags == lag).to(difference.device)])


def batch_figures(batch: Batch) -> Figures:
    """What can be told of a batch before training on it."""
    trajectories = batch.trajectories
    lengths = np.array([t.completion_tokens for t in trajectories])
    lags = np.concatenate([batch.step - t.versions[t.sampled] for t in trajectories])
    rewards = np.array([t.reward for t in trajectories])
    signal = [np.ptp(g.rewards) > 0 for g in batch.groups]
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/groups_with_signal_fraction": float(np.mean(signal)),
        "lag/max_versions": float(lags.max()),
        "lag/mean_versions": float(lags.mean()),
        "tokens/trained": float(lengths.sum()),
        "completion/mean_tokens": float(lengths.mean()),
        "completion/max_tokens": float(lengths.max()),
        "completion/length_capped_fraction": float(np.mean([t.finish == "length" for t in trajectories])),
        "trajectories/multi_version": float(sum(np.ptp(t.versions[t.sampled]) > 0 for t in trajectories)),
        "trajectories/resumed": float(sum(t.segments > 1 for t in trajectories)),
    }
