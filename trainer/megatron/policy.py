"""The policy under training: Megatron's modules, and the two operations on them.

`logprobs` runs forward only (old and reference policies), and `update` trains on one minibatch with the losses that its caller
gives. Both raise before a number that is not finite reaches the optimizer. Each runs Megatron's pipeline schedule, so all ranks
of the job call them together.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from math import isfinite
from typing import Any, NoReturn

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor

from conf.schema import RunConfig
from conf.shapes import ModelShape, check_layout, check_same_shape, read_shape
from trainer.learn.health import FiniteCheck
from trainer.learn.logprobs import token_logprobs
from trainer.learn.packing import Microbatch
from trainer.megatron import attention, hf_weights, model
from trainer.megatron.checkpoint import TrainingState
from trainer.megatron.optimizer import build_optimizer, gather_parameters, wrap
from trainer.megatron.reference import Reference
from trainer.process_groups import Mesh

MicrobatchLoss = Callable[[Tensor, Tensor], Tensor]
"""Current log-probs and entropies of a microbatch's tokens -> the loss per token, with gradient; f32 [m] each."""


class Policy:
    """Modules, optimizer and schedule of one rank. Create it with `load_policy`."""

    def __init__(
        self,
        *,
        chunks: list[DistributedDataParallel],
        optimizer,
        scheduler,
        shape: ModelShape,
        mesh: Mesh,
        temperature: float,
        reference: Reference | None,
    ) -> None:
        self.chunks, self.optimizer, self.scheduler = chunks, optimizer, scheduler
        self.shape, self.mesh = shape, mesh
        self._temperature = temperature
        self._schedule = get_forward_backward_func()
        config = get_model_config(chunks[0])
        # The weights of the tokens (packing.py) normalise the loss over the whole minibatch, so no token count divides the
        # gradients again. Megatron's schedule wants a count from each microbatch all the same.
        config.finalize_model_grads_func = lambda modules, _num_tokens, **rest: finalize_model_grads(modules, None, **rest)
        self._no_tokens = torch.zeros((), dtype=torch.int, device=mesh.device)
        config.grad_scale_func = optimizer.scale_loss
        self.reference = reference  # the frozen policy of a KL, or a teacher in its place

    @property
    def training_state(self) -> TrainingState:
        """The objects that a checkpoint saves and restores."""
        return TrainingState(
            chunks=self.chunks,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            mesh=self.mesh,
            reference=self.reference,
        )

    def logprobs(self, microbatches: Sequence[Microbatch], quantity: str) -> list[Tensor]:
        """Log-probs f32 [m] of the targets of each microbatch on the ranks of the last stage; [] elsewhere. No gradient.

        Raises NonFinite, which names the `quantity` (health.QUANTITIES).
        """

        def collect(number: int, chunk: torch.nn.Module, hidden: Tensor, non_loss_data: bool) -> Tensor:
            return self._token_logprobs(chunk, microbatches[number], hidden)[0]

        with torch.no_grad():
            found: list[Tensor] = self._run(microbatches, collect, forward_only=True)
        finite = FiniteCheck(self.mesh)
        for number, logprobs in enumerate(found):
            finite.note(number, quantity, logprobs)
        finite.verify()
        return found

    def update(self, microbatches: list[Microbatch], losses: list[MicrobatchLoss]) -> tuple[float, float]:
        """One optimizer step on this rank's microbatches of a minibatch. Returns the norm of the gradient and the learning rate.

        losses: one for each microbatch on the last stage, [] elsewhere. Raises NonFinite with the weights as they were.
        """
        finite = FiniteCheck(self.mesh)
        self._backward(microbatches, losses, finite)
        finite.verify()
        self.optimizer.prepare_grads()
        if not isfinite(self.optimizer.get_grad_norm()):
            self._find_bad_gradient(microbatches, losses)
        learning_rate = self.optimizer.param_groups[0]["lr"]
        _, norm, _ = self.optimizer.step()
        self.scheduler.step(increment=1)  # sets the learning rate of the next step
        return float(norm), learning_rate

    def _backward(self, microbatches: Sequence[Microbatch], losses: list[MicrobatchLoss], finite: FiniteCheck) -> None:
        """Computes the gradient of the minibatch's loss: the sum over its tokens of loss times weight."""

        def weighted_sum(number: int, chunk: torch.nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor, dict]:
            current, entropies = self._token_logprobs(chunk, microbatches[number], hidden)
            per_token = losses[number](current, entropies)
            for quantity, values in (("current log-prob", current), ("entropy", entropies), ("loss", per_token)):
                finite.note(number, quantity, values.detach())
            weights = torch.from_numpy(microbatches[number].weights).to(self.mesh.device)
            return (per_token * weights).sum(), self._no_tokens, {}

        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._run(microbatches, weighted_sum, forward_only=False)

    def _find_bad_gradient(self, microbatches: list[Microbatch], losses: list[MicrobatchLoss]) -> NoReturn:
        """Runs one microbatch after another, without reduction over ranks, to find the one whose gradient is not finite."""
        config, finite = get_model_config(self.chunks[0]), FiniteCheck(self.mesh)
        # The run ends here, so these settings need not be restored.
        config.finalize_model_grads_func, config.no_sync_func, config.grad_sync_func = None, nullcontext, None
        with ExitStack() as unreduced:
            for chunk in self.chunks:
                unreduced.enter_context(chunk.no_sync())
            # The interleaved schedule needs a multiple of the number of stages.
            copies = self.mesh.layout.pp if self.mesh.layout.vpp > 1 else 1
            for number in range(len(microbatches)):
                only = slice(number, number + 1)
                self._backward(microbatches[only] * copies, losses[only] * copies, FiniteCheck(self.mesh))
                for chunk in self.chunks:
                    for buffer in chunk.buffers:
                        finite.note(number, "gradient", buffer.grad_data)
        # Each gradient is finite, but the sum of their squares is not.
        finite.note(len(microbatches) - 1, "gradient norm", torch.tensor(torch.inf, device=self.mesh.device))
        finite.verify()
        raise AssertionError("unreachable: infinity was noted")

    def gather_parameters(self) -> None:
        """To be called after the last update of a step: see `optimizer.gather_parameters`."""
        gather_parameters(self.chunks)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        return (p for chunk in self.chunks for p in chunk.parameters())

    def _run(self, microbatches: Sequence[Microbatch], on_hidden: Callable[..., Any], *, forward_only: bool) -> list:
        """Megatron's schedule; on the last stage `on_hidden(number, chunk, hidden)` ends the forward pass of each microbatch."""

        def forward_step(left: Iterator[tuple[int, Microbatch]], chunk: torch.nn.Module):
            number, microbatch = next(left)
            device, layout = self.mesh.device, self.mesh.layout
            packed = attention.pack(np.diff(microbatch.boundaries).tolist(), device, cp=layout.cp, cp_rank=self.mesh.cp_rank)
            tokens = torch.from_numpy(microbatch.tokens)[None].to(device)
            positions = torch.from_numpy(microbatch.positions)[None].to(device)
            return model.forward(chunk, tokens, positions, packed), partial(on_hidden, number, chunk)

        return self._schedule(
            forward_step_func=forward_step,
            data_iterator=[iter(enumerate(microbatches)) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(microbatches),
            seq_length=len(microbatches[0].tokens),  # not read: each microbatch has its own
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _token_logprobs(self, chunk: torch.nn.Module, microbatch: Microbatch, hidden: Tensor) -> tuple[Tensor, Tensor]:
        device, weight = self.mesh.device, model.output_weight(chunk)
        return token_logprobs(
            model.chosen_rows(chunk, hidden, torch.from_numpy(microbatch.rows).to(device)),
            weight,
            torch.from_numpy(microbatch.targets).to(device),
            temperature=self._temperature,
            vocab_size=self.shape.vocabulary,
            vocab_start=self.mesh.tp_rank * len(weight),
            group=self.mesh.tp_group,
        )


def load_policy(config: RunConfig, mesh: Mesh) -> Policy:
    """The policy of `config.model.path` on this rank, with a fresh optimizer, and its reference if the objective needs one.

    Raises ModelError if the layout cannot cut the model, or if a teacher in the reference's place has another shape.
    """
    trainer = config.trainer
    shape = read_shape(config.model.path)
    check_layout(shape, mesh.layout)
    built = model.build(shape, mesh, dtype=getattr(torch, config.model.dtype), recompute=trainer.recompute)
    chunks = wrap(built, overlap_grad_reduce=trainer.overlap_grad_reduce, overlap_param_gather=trainer.overlap_param_gather)
    reference: Reference | None = None
    if config.algo.teacher_is_reference:
        check_same_shape(shape, read_shape(config.algo.teacher))
        hf_weights.load(chunks, shape, mesh, config.algo.teacher)
        reference = Reference(chunks, shape, mesh)
    hf_weights.load(chunks, shape, mesh, config.model.path)
    if config.algo.kl_coef > 0:
        reference = Reference(chunks, shape, mesh)
    optimizer, scheduler = build_optimizer(chunks, trainer, total_steps=trainer.steps * config.algo.minibatches)
    return Policy(
        chunks=chunks,
        optimizer=optimizer,
        scheduler=scheduler,
        shape=shape,
        mesh=mesh,
        temperature=config.rollout.temperature,
        reference=reference,
    )
