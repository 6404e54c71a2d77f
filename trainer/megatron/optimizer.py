"""Training state around the model: Megatron's data-parallel wrapper and its distributed AdamW with a schedule.

chunks = wrap(chunks)
optimizer, scheduler = build_optimizer(chunks, config.trainer, total_steps=600)     # once the weights are loaded
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module

from conf.schema import TrainerConfig


def wrap(
    chunks: list[GPTModel], *, overlap_grad_reduce: bool = False, overlap_param_gather: bool = False
) -> list[DistributedDataParallel]:
    """Adds gradient buffers and data-parallel reduction for the distributed optimizer.

    The overlaps hide reductions and gathers behind computation.
    """
    config = chunks[0].config
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlap_grad_reduce,
        overlap_param_gather=overlap_param_gather,
    )
    wrapped = []
    for number, chunk in enumerate(chunks):
        module = Float16Module(config, chunk) if config.bf16 else chunk
        wrapped.append(DistributedDataParallel(config, ddp, module, disable_bucketing=number > 0))
    config.finalize_model_grads_func = finalize_model_grads
    if overlap_grad_reduce:
        config.no_sync_func = _one_or_list([chunk.no_sync for chunk in wrapped])
        config.grad_sync_func = _one_or_list([chunk.start_grad_sync for chunk in wrapped])
    if overlap_param_gather:
        config.param_sync_func = _one_or_list([chunk.start_param_sync for chunk in wrapped])
    return wrapped


def _one_or_list(functions: list[Any]) -> Any:
    return functions[0] if len(functions) == 1 else functions


def gather_parameters(chunks: Sequence[torch.nn.Module]) -> None:
    """Brings the weights of every rank up to date after an optimizer step. All ranks call it before weights leave the model.

    With `overlap_param_gather` a rank has only its own shard of the new weights until the next forward pass.
    """
    for chunk in chunks:
        if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


def build_optimizer(
    chunks: list[DistributedDataParallel], trainer: TrainerConfig, *, total_steps: int
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """The distributed AdamW and its schedule. After each optimizer step call `scheduler.step(1)`.

    total_steps: optimizer steps (minibatches) of the whole run. The first step already has a learning rate above 0.
    """
    config = chunks[0].config
    min_lr = trainer.lr * trainer.min_lr_fraction
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=trainer.lr,
            min_lr=min_lr,
            weight_decay=trainer.weight_decay,
            adam_beta1=trainer.adam_beta1,
            adam_beta2=trainer.adam_beta2,
            adam_eps=trainer.adam_eps,
            clip_grad=trainer.clip_grad,
            bf16=config.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=True,
            overlap_param_gather=chunks[0].ddp_config.overlap_param_gather,
        ),
        chunks,
        use_gloo_process_groups=torch.cuda.is_available(),
    )
    _allocate_adam_state(optimizer)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=trainer.lr,
        min_lr=min_lr,
        lr_warmup_steps=trainer.warmup_steps,
        lr_decay_steps=total_steps,
        lr_decay_style=trainer.lr_schedule,
        start_wd=trainer.weight_decay,
        end_wd=trainer.weight_decay,
        wd_incr_steps=total_steps,
        wd_incr_style="constant",
    )
    # Megatron counts from 0, which with warm-up spends the first step at learning rate 0.
    scheduler.step(1)
    return optimizer, scheduler


def _allocate_adam_state(optimizer: MegatronOptimizer) -> None:
    """Gives torch's AdamW a state of zeros, because Megatron cannot save or load one that has never made a step."""
    for inner in (part.optimizer for part in optimizer.chained_optimizers):
        if not isinstance(inner, torch.optim.AdamW):
            continue
        for parameter in (parameter for group in inner.param_groups for parameter in group["params"]):
            inner.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def optimizer_bytes(optimizer: MegatronOptimizer) -> int:
    """Bytes of the main weights and both moments on this rank."""
    states = [part.optimizer.state for part in optimizer.chained_optimizers]
    return sum(
        parameter.nbytes + sum(values.nbytes for key, values in state.items() if key != "step")
        for of in states
        for parameter, state in of.items()
    )
