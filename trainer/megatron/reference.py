"""The reference policy: weights in pinned CPU memory that change places with the current ones while it is asked.

    reference = Reference(chunks, shape, mesh)       # of the present weights: version 0
    with reference.in_place(): ...                  # the modules hold the reference's weights
    reference.refresh(40)                           # it is now what the policy is at version 40

Changing places costs no GPU memory but one parameter's, and one trip of the weights each way over the bus, twice.
Which reference it is must outlive the process: version 0 is the model's folder, recognised by its fingerprint;
a later one exists nowhere else, so checkpoints carry its weights.
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
from trainer.megatron.model import gather_parameters
from trainer.process_groups import Mesh


class Reference:
    """One rank's part. Every method is called by all ranks together."""

    def __init__(self, chunks: Sequence[torch.nn.Module], shape: ModelShape, mesh: Mesh) -> None:
        self._chunks, self._device = chunks, mesh.device
        self.version = 0
        self.fingerprint = fingerprint(chunks, shape, mesh)  # of version 0
        self._host = [_pinned(parameter) for parameter in self._parameters()]
        self._swap_s = 0.0
        self.refresh(0)

    @property
    def identity(self) -> dict[str, Any]:
        """What a checkpoint says of it."""
        return {"version": self.version, "fingerprint": self.fingerprint}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within it the modules hold the reference's weights, and the reference's memory the current ones, to the bit."""
        self._change_places()
        try:
            yield
        finally:
            self._change_places()

    def refresh(self, version: int) -> None:
        """The present weights, which are those of `version`, become the reference."""
        gather_parameters(self._chunks)
        for kept, parameter in zip(self._host, self._parameters(), strict=True):
            kept.copy_(parameter.data, non_blocking=True)
        self._wait()
        self.version = version

    def figures(self) -> dict[str, float]:
        """Seconds of changing places since the last call, bytes of CPU memory of this rank, and the version."""
        swap_s, self._swap_s = self._swap_s, 0.0
        host_bytes = sum(kept.numel() * kept.element_size() for kept in self._host)
        return {"time/reference_swap_s": swap_s, "reference/host_bytes": host_bytes, "reference/version": self.version}

    def _change_places(self) -> None:
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
    """Of the weights' values, names and dtype: 64 hexadecimal digits, the same in every layout. Collective.

    The sum of a SHA-256 a Hugging Face tensor, in four lanes of 64 bits: a sum, since stages hash their own tensors.
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
