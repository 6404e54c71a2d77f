"""What rank 0 learns, told to all ranks: small messages over a gloo group of its own, so that no GPU stream waits for them.

Only rank 0 speaks to the queue server and to the engines; the others hear through `share`.
"""

import datetime
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from rollout.ledger import wire

FAILED = -1  # sent in place of a size
T = TypeVar("T")


class LeaderFailed(RuntimeError):
    """Rank 0 raised instead of answering; it says why."""


class Control:
    """The control group of the trainer's ranks."""

    def __init__(self, timeout_s: float) -> None:
        self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))
        self.is_leader = dist.get_rank() == 0

    def share(self, kind: type[T] | Any, make: Callable[[], T]) -> T:
        """`make()` is called on rank 0 alone; every rank returns its value, which travels as a message of type `kind`.

        If it raises, so do the others: LeaderFailed, instead of waiting for a value that never comes.
        """
        if self.is_leader:
            try:
                value = make()
                payload = torch.from_numpy(np.frombuffer(bytearray(wire.pack(value)), dtype=np.uint8))
            except BaseException:  # whatever it is, it goes on from here: the others only have to hear of it
                dist.broadcast(torch.tensor([FAILED]), src=0, group=self._group)
                raise
            dist.broadcast(torch.tensor([len(payload)]), src=0, group=self._group)
            dist.broadcast(payload, src=0, group=self._group)
            return value
        size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, src=0, group=self._group)
        if int(size) == FAILED:
            raise LeaderFailed("rank 0 failed; the reason stands in its output")
        payload = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(payload, src=0, group=self._group)
        return wire.unpack(kind, payload.numpy().tobytes())

    def agree(self, ok: bool) -> bool:
        """Whether it went well on every rank."""
        flag = torch.tensor([int(ok)])
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self._group)
        return bool(flag)

    def gather(self, text: str) -> list[str]:
        """Every rank's text, in order of rank."""
        raw = text.encode()
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
        dist.all_gather(sizes, torch.tensor([len(raw)]), group=self._group)
        padded = torch.zeros(max(1, *(int(size) for size in sizes)), dtype=torch.uint8)
        padded[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else 0
        texts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(texts, padded, group=self._group)
        return [text[: int(size)].numpy().tobytes().decode() for text, size in zip(texts, sizes, strict=True)]
