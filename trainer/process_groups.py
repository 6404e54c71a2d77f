"""The process groups of one training job.

`initialize` starts torch.distributed (NCCL on GPUs, gloo on CPU) and Megatron's parallel state from the variables that
torchrun sets, and returns a `Mesh`: the ranks and groups of this process. `shutdown` undoes it. `pretend` needs no other ranks.
"""

import datetime
import math
import os
import socket
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch.distributed import ProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore  # torch has no public name for it

from conf.shapes import Layout, ModelError

__all__ = ["Layout", "Mesh", "initialize", "shutdown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The ranks of this process in each dimension, and its process groups. A `stage` is a pipeline rank."""

    layout: Layout
    device: torch.device
    rank: int
    world_size: int
    dp: int  # data-parallel size
    tp_rank: int
    stage: int
    cp_rank: int
    dp_rank: int
    tp_group: ProcessGroup
    cp_group: ProcessGroup
    dp_cp_group: ProcessGroup  # ranks that hold the same parameters

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank holds the embedding."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the output layer, and so computes log-probs and loss."""
        return self.stage == self.layout.pp - 1

    @property
    def is_weight_replica_zero(self) -> bool:
        """Whether this rank belongs to the tensor-parallel group that exports its parameters, among all that hold them."""
        return self.dp_rank == 0 and self.cp_rank == 0

    @property
    def is_weight_source(self) -> bool:
        """Whether this rank collects the full Hugging Face tensors of its stage."""
        return self.is_weight_replica_zero and self.tp_rank == 0


def initialize(layout: Layout, *, seed: int, timeout_s: float) -> Mesh:
    """Joins the job. Every collective fails after `timeout_s` instead of waiting forever."""
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ModelError(f"{', '.join(missing)} not set: start the trainer with torchrun")
    layout.dp(int(os.environ["WORLD_SIZE"]))
    device = own_device()
    timeout = datetime.timedelta(seconds=timeout_s)
    if device.type == "cuda":
        # Tensor parallelism overlaps communication with computation only if kernels start in the order in which they are queued.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # read when the device is first used
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=timeout, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=timeout)
    return _divide(layout, device, seed=seed, timeout_s=timeout_s)


def own_device() -> torch.device:
    """The device of this process: its own GPU (LOCAL_RANK selects it), or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def pretend(layout: Layout, *, rank: int, world_size: int) -> Mesh:
    """The mesh of `rank` among `world_size` ranks, without the other ranks: collectives return at once and move nothing, and
    tensors have no memory."""
    layout.dp(world_size)
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    return _divide(layout, torch.device("meta"), seed=0, timeout_s=60)


def _divide(layout: Layout, device: torch.device, *, seed: int, timeout_s: float) -> Mesh:
    """Divides the ranks into Megatron's groups."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        distributed_timeout_minutes=max(1, math.ceil(timeout_s / 60)),
        # On a CPU all groups are gloo groups already.
        create_gloo_process_groups=device.type == "cuda",
    )
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    return _mesh(layout, device)


def _mesh(layout: Layout, device: torch.device) -> Mesh:
    return Mesh(
        layout=layout,
        device=device,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        dp=parallel_state.get_data_parallel_world_size(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        stage=parallel_state.get_pipeline_model_parallel_rank(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        cp_group=parallel_state.get_context_parallel_group(),
        dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
    )


def shutdown() -> None:
    """Leaves the job."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def gather_texts(text: str, *, device: torch.device, group: ProcessGroup | None = None) -> list[str]:
    """Every rank's text, in order of rank. Collective over `group`, or over all ranks."""
    raw = text.encode()
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(raw)], device=device), group=group)
    padded = torch.zeros(max(1, *(int(size) for size in sizes)), dtype=torch.uint8, device=device)
    padded[: len(raw)] = torch.from_numpy(np.frombuffer(bytearray(raw), dtype=np.uint8))
    texts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(texts, padded, group=group)
    return [text[: int(size)].cpu().numpy().tobytes().decode() for text, size in zip(texts, sizes, strict=True)]


def address() -> str:
    """The address under which other hosts of the job reach this one: that of the interface which leads to MASTER_ADDR."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 9))  # a datagram socket sends nothing when it connects
        return str(probe.getsockname()[0])
