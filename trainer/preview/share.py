"""The share of a model that one rank holds. Megatron builds it on the meta device, as if this process were that rank.

The job may have any size. Weights, gradient buffers and optimizer state use no memory, so a 32B model takes one second.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from conf.schema import TrainerConfig
from conf.shapes import Layout, ModelShape, check_layout
from trainer import process_groups
from trainer.megatron import cpu_device, model
from trainer.megatron.families import Cut, placements
from trainer.megatron.hf_weights import parameter_of, tensor_bytes
from trainer.megatron.optimizer import build_optimizer, optimizer_bytes, wrap
from trainer.push.push import Bucket, plan_buckets


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What one rank holds."""

    rank: int
    stage: int
    tp_rank: int
    dp_rank: int
    parameters: int  # on this rank, with vocabulary padding
    own_parameters: float  # sums to the whole model over all ranks: replicated ones count 1 / tp, second copies 0
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int


def share_of(shape: ModelShape, layout: Layout, *, rank: int, dp: int, dtype: torch.dtype) -> Share:
    """The share of one of the tp x pp x cp x dp ranks. Raises ModelError if the layout cannot split the model."""
    check_layout(shape, layout)
    mesh = process_groups.pretend(layout, rank=rank, world_size=dp * layout.ranks_per_replica)
    try:
        with cpu_device.on_meta():
            built = model.build(shape, mesh, dtype=dtype, use_te=False)
            own_parameters = sum(
                parameter_of(built, placed).numel() / (layout.tp if placed.cut is Cut.WHOLE else 1)
                for placed in placements(shape, layout, mesh.stage)
                if placed.exported
            )
            chunks = wrap(built)
            optimizer, _ = build_optimizer(chunks, TrainerConfig(), total_steps=1)
        buffers = [buffer for chunk in chunks for buffer in chunk.buffers]
        return Share(
            rank=rank,
            stage=mesh.stage,
            tp_rank=mesh.tp_rank,
            dp_rank=mesh.dp_rank,
            parameters=sum(p.numel() for chunk in chunks for p in chunk.parameters()),
            own_parameters=own_parameters,
            parameter_bytes=sum(buffer.param_data.nbytes for buffer in buffers),
            gradient_bytes=sum(buffer.grad_data.nbytes for buffer in buffers),
            optimizer_bytes=optimizer_bytes(optimizer),
        )
    finally:
        process_groups.shutdown()


def first_ranks(layout: Layout, dp: int) -> list[int]:
    """The first rank of each pipeline stage: ranks are numbered over tp, cp and dp first, and over the stages last."""
    return [stage * layout.tp * layout.cp * dp for stage in range(layout.pp)]


def pushed(shape: ModelShape, layout: Layout, dtype: torch.dtype, bucket_bytes: int) -> list[tuple[int, int, int]]:
    """For each pipeline stage, (tensors, buckets, bytes) of one weight push."""

    def of(stage: Sequence[Bucket]) -> tuple[int, int, int]:
        tensors = [tensor for bucket in stage for tensor in bucket]
        return len(tensors), len(stage), sum(tensor_bytes(tensor) for tensor in tensors)

    return [of(stage) for stage in plan_buckets(shape, layout, dtype, bucket_bytes)]
