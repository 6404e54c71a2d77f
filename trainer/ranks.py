"""How the trainer's ranks agree: what rank 0 learns reaches all of them, and the first failure is the one that is told.

`Control` sends small messages over a gloo group of its own, so that no GPU stream waits for them. Only rank 0 speaks to the
queue server and to the engines; the other ranks receive the answers through `share`.
"""

import datetime
import os
import socket
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from conf.compose.run_folder import TRAINER_FAILURE
from rollout.ledger import wire
from trainer.process_groups import gather_texts

FAILED = -1  # sent instead of a size
T = TypeVar("T")


class LeaderFailed(RuntimeError):
    """Rank 0 raised instead of answering; its own error tells why."""


class FirstFailure:
    """Writes the first failure of any rank into the run's folder, where the launcher reads it.

    When one rank fails, the others soon fail too, with errors that only say that a connection was closed. The first rank
    that creates the file has the cause; the file of an earlier start is removed by rank 0.
    """

    def __init__(self, run_dir: Path, *, expected: tuple[type[Exception], ...]) -> None:
        """expected: errors whose message says everything. Any other is written with its traceback."""
        self._path, self._expected = run_dir / TRAINER_FAILURE, expected
        self._rank = int(os.environ.get("RANK", "0"))

    def __enter__(self) -> None:
        if self._rank == 0:
            self._path.unlink(missing_ok=True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not isinstance(error, Exception) or isinstance(error, LeaderFailed):
            return
        # Another rank was first, or the disk is full: the log has this failure in any case.
        with suppress(OSError), self._path.open("x") as file:
            file.write(f"rank {self._rank} on {socket.gethostname()}: {self._told(error)}\n")

    def _told(self, error: Exception) -> str:
        if isinstance(error, self._expected):
            return str(error)
        if isinstance(error, dist.DistError) or "third_party/gloo" in str(error):
            return f"the connection to another rank broke or timed out; that rank was killed, hangs, or lost its node ({error})"
        return "".join(traceback.format_exception(error)).strip()


class Control:
    """The control group of the trainer's ranks."""

    def __init__(self, timeout_s: float) -> None:
        self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))
        self.is_leader = dist.get_rank() == 0

    def share(self, kind: type[T] | Any, make: Callable[[], T]) -> T:
        """Calls `make()` on rank 0 alone. Every rank returns its value, which is sent as a message of type `kind`.

        If `make` raises, the other ranks raise LeaderFailed, so that they do not wait for a value that never comes.
        """
        if self.is_leader:
            try:
                value = make()
                payload = torch.from_numpy(np.frombuffer(bytearray(wire.pack(value)), dtype=np.uint8))
            except BaseException:  # raised again below; the other ranks must hear of any failure
                dist.broadcast(torch.tensor([FAILED]), src=0, group=self._group)
                raise
            dist.broadcast(torch.tensor([len(payload)]), src=0, group=self._group)
            dist.broadcast(payload, src=0, group=self._group)
            return value
        size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, src=0, group=self._group)
        if int(size) == FAILED:
            raise LeaderFailed("rank 0 failed; its output tells why")
        payload = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(payload, src=0, group=self._group)
        return wire.unpack(kind, payload.numpy().tobytes())

    def gather(self, text: str) -> list[str]:
        """Every rank's text, in order of rank."""
        return gather_texts(text, device=torch.device("cpu"), group=self._group)
