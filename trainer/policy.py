"""The policy under training: Megatron's modules, and the three things that are done with them.

`logprobs` runs forward only (old and reference policies), `update` trains on one minibatch, `reference_weights` swaps the frozen
reference in. Each goes through Megatron's pipeline schedule, so every rank of the job calls them together.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor

from conf.schema import RunConfig
from rollout.types import F32
from trainer import attention, hf_weights, model
from trainer.checkpoint import TrainingState
from trainer.logprobs import token_logprobs
from trainer.metrics import TokenMeans
from trainer.objective import Objective, token_losses
from trainer.packing import Microbatch
from trainer.parallel import Mesh
from trainer.spec import ModelSpec, read_spec


class TrainingError(RuntimeError):
    """Training went wrong in a way that more steps will not mend."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """A microbatch on the device, with the log-probs that its loss needs."""

    microbatch: Microbatch
    advantages: F32 | None = None  # [m], where it is trained on
    old: Tensor | None = None  # [m], on the last stage
    reference: Tensor | None = None  # [m], on the last stage, where a KL is asked for


class Policy:
    """Modules, optimizer and schedule of one rank. Create with `Policy.load`."""

    def __init__(
        self,
        *,
        chunks: list[DistributedDataParallel],
        optimizer,
        scheduler,
        spec: ModelSpec,
        mesh: Mesh,
        objective: Objective,
        temperature: float,
    ) -> None:
        self.chunks, self.optimizer, self.scheduler = chunks, optimizer, scheduler
        self.spec, self.mesh = spec, mesh
        self._objective, self._temperature = objective, temperature
        self._schedule = get_forward_backward_func()
        config = get_model_config(chunks[0])
        # The loss arrives normalised over the whole minibatch (packing.py), so no token count divides the gradients again.
        config.finalize_model_grads_func = lambda modules, _num_tokens, **rest: finalize_model_grads(modules, None, **rest)
        config.grad_scale_func = optimizer.scale_loss
        self._reference: list[Tensor] | None = None

    @property
    def training_state(self) -> TrainingState:
        """What a checkpoint saves and restores."""
        return TrainingState(chunks=self.chunks, optimizer=self.optimizer, scheduler=self.scheduler, mesh=self.mesh)

    def logprobs(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        """Log-probs f32 [m] of each microbatch's targets, on the last stage's ranks; [] elsewhere. No gradient."""
        with torch.no_grad():
            return self._run([Example(microbatch=m) for m in microbatches], self._collect_logprobs, forward_only=True)

    def update(self, examples: Sequence[Example], means: TokenMeans) -> tuple[float, float]:
        """One optimizer step on this rank's examples of a minibatch. Returns the gradient's norm and the learning rate.

        Raises TrainingError when the gradient is not finite.
        """
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._run(examples, partial(self._loss, means=means), forward_only=False)
        succeeded, grad_norm, _ = self.optimizer.step()
        norm = float(grad_norm or 0.0)
        if not succeeded or norm != norm or norm == float("inf"):
            raise TrainingError(f"the gradient is not finite (norm {norm}); the weights of the last checkpoint are unharmed")
        self.scheduler.step(increment=1)
        return norm, self.optimizer.param_groups[0]["lr"]

    def gather_parameters(self) -> None:
        """After the last update of a step: with `trainer.overlap_param_gather` a rank has only its part of the new weights."""
        model.gather_parameters(self.chunks)

    def remember_reference(self) -> None:
        """Keeps a copy of the present weights, in pinned CPU memory on a GPU machine, as the frozen reference."""
        self._reference = [_to_host(p.data) for p in self.parameters()]

    @contextmanager
    def reference_weights(self) -> Iterator[None]:
        """Within it the modules hold the reference's weights."""
        if self._reference is None:
            raise TrainingError("no reference weights were remembered")
        current = [p.data.clone() for p in self.parameters()]
        self._fill(self._reference)
        try:
            yield
        finally:
            self._fill(current)

    def _fill(self, tensors: Sequence[Tensor]) -> None:
        for parameter, tensor in zip(self.parameters(), tensors, strict=True):
            parameter.data.copy_(tensor, non_blocking=True)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        return (p for chunk in self.chunks for p in chunk.parameters())

    def _run(self, examples: Sequence[Example], on_hidden, forward_only: bool) -> list:
        def forward_step(examples_left: Iterator[Example], chunk: torch.nn.Module):
            example = next(examples_left)
            microbatch, device = example.microbatch, self.mesh.device
            layout = self.mesh.layout
            packed = attention.pack(np.diff(microbatch.boundaries).tolist(), device, cp=layout.cp, cp_rank=self.mesh.cp_rank)
            tokens = torch.from_numpy(microbatch.tokens)[None].to(device)
            positions = torch.from_numpy(microbatch.positions)[None].to(device)
            return model.forward(chunk, tokens, positions, packed), partial(on_hidden, chunk, example)

        return self._schedule(
            forward_step_func=forward_step,
            data_iterator=[iter(examples) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(examples),
            seq_length=len(examples[0].microbatch.tokens),  # not read: each microbatch has its own
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _token_logprobs(self, chunk: torch.nn.Module, example: Example, hidden: Tensor) -> tuple[Tensor, Tensor]:
        device, weight = self.mesh.device, model.output_weight(chunk)
        return token_logprobs(
            model.chosen_rows(chunk, hidden, torch.from_numpy(example.microbatch.rows).to(device)),
            weight,
            torch.from_numpy(example.microbatch.targets).to(device),
            temperature=self._temperature,
            vocab_size=self.spec.vocab,
            vocab_start=self.mesh.tp_rank * len(weight),
            group=self.mesh.tp_group,
        )

    def _collect_logprobs(self, chunk: torch.nn.Module, example: Example, hidden: Tensor, non_loss_data: bool) -> Tensor:
        return self._token_logprobs(chunk, example, hidden)[0]

    def _loss(
        self, chunk: torch.nn.Module, example: Example, hidden: Tensor, *, means: TokenMeans
    ) -> tuple[Tensor, Tensor, dict]:
        microbatch, device = example.microbatch, self.mesh.device
        current, entropies = self._token_logprobs(chunk, example, hidden)
        assert example.old is not None and example.advantages is not None
        losses, figures = token_losses(
            self._objective,
            current=current,
            old=example.old,
            behaviour=torch.from_numpy(microbatch.behaviour_logprobs).to(device),
            advantages=torch.from_numpy(example.advantages).to(device),
            reference=example.reference,
        )
        for name, values in figures.items():
            means.add(name, values)
        means.add("entropy/mean", entropies.detach())
        weights = torch.from_numpy(microbatch.weights).to(device)
        tokens = torch.tensor(microbatch.sampled_tokens, dtype=torch.int, device=device)
        return (losses * weights).sum(), tokens, {}


def load_policy(config: RunConfig, mesh: Mesh) -> Policy:
    """The policy of `config.model.path` on this rank, with a fresh optimizer. Raises ModelError for what cannot be cut so."""
    spec = read_spec(config.model.path)
    trainer = config.trainer
    chunks = model.build(spec, mesh, dtype=getattr(torch, config.model.dtype), recompute=trainer.recompute)
    hf_weights.load(chunks, spec, mesh, config.model.path)
    wrapped = model.wrap(
        chunks, overlap_grad_reduce=trainer.overlap_grad_reduce, overlap_param_gather=trainer.overlap_param_gather
    )
    optimizer, scheduler = model.build_optimizer(
        wrapped,
        model.OptimizerSettings(
            lr=trainer.lr,
            min_lr=trainer.lr * trainer.min_lr_fraction,
            betas=(trainer.adam_beta1, trainer.adam_beta2),
            eps=trainer.adam_eps,
            weight_decay=trainer.weight_decay,
            clip_grad=trainer.clip_grad,
            schedule="cosine" if trainer.lr_schedule == "cosine" else "constant",
            warmup_steps=trainer.warmup_steps,
            total_steps=trainer.steps * config.algo.minibatches,
        ),
    )
    algo = config.algo
    return Policy(
        chunks=wrapped,
        optimizer=optimizer,
        scheduler=scheduler,
        spec=spec,
        mesh=mesh,
        objective=Objective(
            clip_low=algo.clip_low,
            clip_high=algo.clip_high,
            behaviour_correction=algo.behaviour_correction,
            behaviour_cap=algo.behaviour_cap,
            kl_coef=algo.kl_coef,
            kl_estimator=algo.kl_estimator,
        ),
        temperature=config.rollout.temperature,
    )


def _to_host(tensor: Tensor) -> Tensor:
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return host.copy_(tensor)
