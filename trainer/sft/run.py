"""A run of supervised fine-tuning on one rank: steps over packed examples, held-out losses, checkpoints, and the saved model."""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from conf.compose.model_description import description_of
from conf.compose.run_folder import CHECKPOINTS, HF
from conf.schema import RunConfig
from conf.shapes import layout_of
from rollout.ledger.records import Trajectory
from trainer import process_groups
from trainer.between_steps.saver import load_newest
from trainer.learn.advantages import I64, loss_weights
from trainer.learn.balance import Capacity, CostModel
from trainer.learn.health import TrainingError
from trainer.learn.packing import Minibatch, pack_minibatch
from trainer.learn.token_figures import TokenFigures
from trainer.megatron import hf_weights
from trainer.megatron.checkpoint import Checkpoints, Saved
from trainer.megatron.policy import load_policy
from trainer.metrics.loggers import Loggers
from trainer.ranks import Control
from trainer.step import Figures, Stopwatch, packing_figures

log = logging.getLogger("trainer")
HELDOUT_STEP = 64  # examples of a forward pass over the held-out ones


def total_steps(config: RunConfig, examples: int) -> int:
    return config.sft.epochs * -(-examples // config.sft.examples_per_step)


def chosen(config: RunConfig, examples: int, step: int) -> I64:
    """The examples of a step. Each epoch is another permutation, which depends on nothing but the seed: a resume repeats it."""
    epoch, position = divmod(step, total_steps(config, examples) // config.sft.epochs)
    order = np.random.default_rng((config.trainer.seed, epoch)).permutation(examples)
    size = config.sft.examples_per_step
    return order[position * size : (position + 1) * size]


class Finetuning:
    """One rank. All ranks call every method together."""

    def __init__(self, config: RunConfig, run_dir: Path, train: Sequence[Trajectory], heldout: Sequence[Trajectory]) -> None:
        self.config, self.run_dir, self.train, self.heldout = config, run_dir, train, heldout
        trainer = config.trainer
        self.mesh = process_groups.initialize(layout_of(trainer), seed=trainer.seed, timeout_s=trainer.collective_s)
        self.control = Control(timeout_s=trainer.collective_s)
        self.policy = load_policy(config, self.mesh)
        self.checkpoints = Checkpoints(run_dir / CHECKPOINTS, self.policy.training_state, keep=trainer.checkpoints_kept)
        loaded = load_newest(self.checkpoints.folder, self.policy.training_state, self.control)
        self.step = loaded.version if loaded else 0
        self.loggers = Loggers(run_dir, config, version=self.step) if self.control.is_leader else None

    def run(self) -> None:
        trainer = self.config.trainer
        if self.step == 0 and self.heldout:
            self.log(self.heldout_loss())
        while self.step < trainer.steps:
            watch = Stopwatch()
            with watch("time/step_s"):
                figures = self.learn()
            self.step += 1
            is_last = self.step == trainer.steps
            if self.heldout and (is_last or (trainer.eval_every and self.step % trainer.eval_every == 0)):
                figures |= self.heldout_loss()
            self.log(figures | watch.seconds)
            if is_last or (trainer.checkpoint_every and self.step % trainer.checkpoint_every == 0):
                self.settle(self.checkpoints.begin_save(self.step, {}))
            self.settle(self.checkpoints.poll())
        self.settle(self.checkpoints.wait(timeout_s=trainer.collective_s))
        if trainer.save_hf:
            description = description_of(self.config, self.run_dir)
            hf_weights.save(self.policy.chunks, self.policy.shape, self.mesh, self.run_dir / HF, description=description)
        if self.loggers is not None:
            self.loggers.close()
        process_groups.shutdown()

    def learn(self) -> Figures:
        """One optimizer step. The loss is the mean of -log p over the learned tokens of the step's examples."""
        numbers = chosen(self.config, len(self.train), self.step)
        minibatch, figures = self.packed(self.train, numbers), TokenFigures(self.mesh)
        mine = minibatch.microbatches(self.mesh.dp_rank, cp=self.mesh.layout.cp, cp_rank=self.mesh.cp_rank)

        def loss(current: Tensor, _: Tensor) -> Tensor:
            figures.add("sft/loss", -current.detach())
            return -current

        norm, learning_rate = self.policy.update(mine, [loss] * len(mine) if self.mesh.is_last_stage else [])
        self.policy.gather_parameters()
        learned = {"tokens/trained": float(sum(self.train[i].completion_tokens for i in numbers))}
        epoch = {"sft/epoch": self.config.sft.epochs * (self.step + 1) / self.config.trainer.steps}
        return (
            figures.reduce()
            | {"grad_norm": norm, "learning_rate": learning_rate}
            | learned
            | epoch
            | packing_figures([minibatch])
        )

    def heldout_loss(self) -> Figures:
        figures = TokenFigures(self.mesh)
        for numbers in _parts(len(self.heldout), HELDOUT_STEP):
            minibatch = self.packed(self.heldout, numbers)
            mine = minibatch.microbatches(self.mesh.dp_rank, cp=self.mesh.layout.cp, cp_rank=self.mesh.cp_rank)
            for logprobs in self.policy.logprobs(mine, "current log-prob"):
                figures.add("sft/heldout_loss", -logprobs)
        return figures.reduce()

    def packed(self, examples: Sequence[Trajectory], numbers: I64) -> Minibatch:
        of_step = [examples[i] for i in numbers]
        learned = np.array([example.completion_tokens for example in of_step])
        capacity = Capacity.of(self.mesh.layout, self.config.trainer.tokens_per_microbatch)
        cost = CostModel.of(self.policy.shape)
        weights = loss_weights(learned, "token", longest=1)
        return pack_minibatch(of_step, weights, numbers, capacity=capacity, dp=self.mesh.dp, cost=cost)

    def log(self, figures: Figures) -> None:
        if self.loggers is not None:
            self.loggers.write(self.step, figures, {})
            told = "  ".join(f"{name} {figures[name]:.4f}" for name in ("sft/loss", "sft/heldout_loss") if name in figures)
            log.info("step %d of %d  %s", self.step, self.config.trainer.steps, told)

    def settle(self, ended: Sequence[Saved]) -> None:
        if failures := [saved.failure for saved in ended if saved.failure is not None]:
            raise TrainingError(f"a checkpoint could not be written: {failures[-1]}")


def _parts(count: int, size: int) -> Iterator[I64]:
    return (np.arange(begin, min(begin + size, count)) for begin in range(0, count, size))
