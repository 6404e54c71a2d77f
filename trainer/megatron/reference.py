"""The reference policy: its weights lie in pinned CPU memory, and are swapped with the current weights for a forward pass.

    reference = Reference(chunks, shape, mesh)      # a copy of the present weights: version 0
    with reference.in_place(): ...                  # the modules hold the reference's weights
    reference.refresh(40)                           # the reference is now the policy of version 40

A swap needs GPU memory for one more parameter only, and moves all weights over the bus in both directions. It happens twice.
A teacher (`algo.teacher`) may take the place of the reference, as version 0. A run that is resumed must use the same reference.
Version 0 is the folder of the model or of the teacher, which is recognised by its fingerprint.
A later reference exists nowhere else, so checkpoints carry its weights.
"""

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from conf.shapes import ModelShape
from trainer.megatron import hf_weights
from trainer.megatron.optimizer import gather_parameters
from trainer.process_groups import Mesh


class Reference:
    """One rank's part of the reference. All ranks call every method together."""

    def __init__(self, chunks: Sequence[torch.nn.Module], shape: ModelShape, mesh: Mesh) -> None:
        self._chunks, self._device = chunks, mesh.device
        self.version = 0
        self.fingerprint = fingerprint(chunks, shape, mesh)  # identifies version 0
        self._host = [_pinned(parameter) for parameter in self._parameters()]
        self._swap_s = 0.0
        self.refresh(0)

    @property
    def identity(self) -> dict[str, Any]:
        """What a checkpoint records about the reference."""
        return {"version": self.version, "fingerprint": self.fingerprint}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within it the modules hold the reference's weights. Afterwards they hold the current weights again, bit by bit."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def refresh(self, version: int) -> None:
        """Makes the present weights, which are those of `version`, the reference."""
        gather_parameters(self._chunks)
        for kept, parameter in zip(self._host, self._parameters(), strict=True):
            kept.copy_(parameter.data, non_blocking=True)
        self._wait()
        self.version = version

    def figures(self) -> dict[str, float]:
        """The seconds spent in swaps since the last call, the bytes of CPU memory on this rank, and the version."""
        swap_s, self._swap_s = self._swap_s, 0.0
        host_bytes = sum(kept.numel() * kept.element_size() for kept in self._host)
        return {"time/reference_swap_s": swap_s, "reference/host_bytes": host_bytes, "reference/version": self.version}

    def _swap(self) -> None:
        start = time.perf_counter()
        gather_parameters(self._chunks)
        for kept, parameter in zip(self._host, self._parameters(), strict=True):
            current = parameter.data.clone()
            parameter.data.copy_(kept, non_blocking=True)
            kept.copy_(current, non_blocking=True)
        self._wait()
        self._swap_s += time.perf_counter() - start

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        return (parameter for chunk in self._chunks for parameter in chunk.parameters())


def fingerprint(chunks: Sequence[torch.nn.Module], shape: ModelShape, mesh: Mesh) -> str:
    """Identifies the values, names and dtype of the weights: 64 hexadecimal digits, the same in every layout. Collective.

    It adds up one SHA-256 per Hugging Face tensor, in four lanes of 64 bits, so that each stage can hash its own tensors.
    """
    lanes = np.zeros(4, dtype=np.int64)
    if mesh.is_weight_replica_zero:
        for name, tensor in hf_weights.hf_tensors(chunks, shape, mesh):
            if tensor is not None:
                lanes += np.frombuffer(_digest(name, tensor), dtype="<i8")  # wraps around
    total = torch.from_numpy(lanes).to(mesh.device)
    dist.all_reduce(total)
    return total.cpu().numpy().astype("<i8").tobytes().hex()


def _digest(name: str, tensor: Tensor) -> bytes:
    digest = hashlib.sha256(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(tensor.detach().contiguous().view(torch.uint8).cpu().numpy().data)
    return digest.digest()


def _pinned(parameter: Tensor) -> Tensor:
    return torch.empty_like(parameter.data, device="cpu", pin_memory=parameter.is_cuda)
