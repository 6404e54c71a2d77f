"""One rank's part of a checkpoint, written by a thread in torch_dist format.

    shards = Planner(mesh).plan(state, folder)     # all ranks together: who writes what
    shards.start()                                 # copies the state; training may go on
    failure = shards.finish()                      # all ranks, once none is `writing`: metadata, what went wrong

Megatron's own way has two properties that a run cannot live with. It forks its writers, under the threads of the
collectives, and leaves processes behind when a rank is killed; and where rank 0 writes a small file between two
collectives, a full disk raises on rank 0 alone while the others wait for it. Here a thread writes, nothing that touches the
disk stands between two collectives, and what goes wrong on one rank is what `finish` says on all.
"""

import io
import os
import queue
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from trainer.process_groups import Mesh

BACKEND = ("torch_dist", 1)
_MOST_MESSAGE_BYTES = 2048
_DATA_SUFFIX = ".distcp"  # Megatron's writer brings these to the disk itself


class Planner:
    """Decides which rank writes what, in the same way for every save of a job."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._strategies: dict[tuple[str, ...], Any] = {}  # by what is saved

    def plan(self, state: dict[str, Any], folder: Path) -> "Shards":
        """state: Megatron's sharded state. Collective over all ranks; writes nothing."""
        parts = tuple(state)
        # That each shard is written exactly once need be shown once only, and who writes it decided once.
        sharded, common = save_preprocess(state, validate_access_integrity=parts not in self._strategies)
        strategy = self._strategies.setdefault(parts, _strategy(self._mesh))
        writer, metadata = strategy.async_save(sharded, folder)
        return Shards(self._mesh, folder, writer, metadata, common)


def _strategy(mesh: Mesh) -> Any:
    # Never used here, but Megatron would start a process to hold it.
    filesystem_async._results_queue = queue.Queue()
    strategy = _Strategy(*BACKEND, thread_count=1)
    if mesh.dp * mesh.layout.cp == 1:
        return strategy
    # Ranks with the same parameters share the writing.
    return FullyParallelSaveStrategyWrapper(strategy, mesh.dp_cp_group, do_cache_distribution=True)


class _Strategy(TorchDistSaveShardedStrategy):
    """Megatron's plan of a save, handed out before it becomes a request for its forking writers."""

    def _get_save_and_finalize_callbacks(self, writer: FileSystemWriterAsync, planned: Any) -> Any:
        return writer, planned[1]


class Shards:
    """A save of this rank, under way."""

    def __init__(self, mesh: Mesh, folder: Path, writer: FileSystemWriterAsync, metadata: Any, common: Any) -> None:
        """metadata, of all ranks' shards, is known to rank 0 alone; common: what every rank has alike."""
        self._mesh, self._folder, self._writer, self._metadata = mesh, folder, writer, metadata
        self._common = _serialised(common) if mesh.rank == 0 else b""
        self._results: list[Any] = []
        self._failure: str | None = "the thread that writes it died"
        self._thread: threading.Thread | None = None

    @property
    def bytes(self) -> int:
        """Tensor bytes that this rank writes."""
        return sum(t.numel() * t.element_size() for _, _, (_, tensors) in self._writer.write_buckets for _, t in tensors)

    @property
    def writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Copies the tensors into memory that training does not touch, and starts to write."""
        on_gpu = self._mesh.device.type == "cuda"
        buckets = self._writer.preload_tensors(self._writer.write_buckets, non_blocking=on_gpu)
        if not on_gpu:  # "to the CPU" copied nothing
            buckets = [
                (file, key, (blobs, [(item, tensor.detach().clone()) for item, tensor in tensors]))
                for file, key, (blobs, tensors) in buckets
            ]
        self._thread = threading.Thread(target=self._write, args=(buckets,), name="checkpoint", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)

    def finish(self) -> str | None:
        """Rank 0 writes the metadata if every rank wrote its shards. What went wrong, the same on every rank. Collective."""
        mesh = self._mesh
        outcome = self._failure or self._results
        outcomes: list[Any] | None = [None] * mesh.world_size if mesh.rank == 0 else None
        dist.gather_object(outcome, outcomes, dst=0)
        failure = None
        if outcomes is not None:
            failures = [f"rank {rank}: {o}" for rank, o in enumerate(outcomes) if isinstance(o, str)]
            failure = "; ".join(failures) if failures else self._write_metadata(outcomes)
        return from_rank_0(failure, mesh)

    def _write(self, buckets: list[Any]) -> None:
        """Runs in the thread; leaves the results or the failure behind."""
        try:
            if self._common:
                (self._folder / COMMON_STATE_FNAME).write_bytes(self._common)
        except OSError as error:
            self._failure = str(error)
            return
        for number, bucket in enumerate(buckets):
            outcomes: queue.Queue[Any] = queue.Queue()
            tickets: queue.Queue[int] = queue.Queue()
            tickets.put(number)
            FileSystemWriterAsync.write_preloaded_data(
                [self._writer.transforms], number, bucket, outcomes, tickets, use_fsync=True
            )
            _, outcome = outcomes.get_nowait()
            if isinstance(outcome, Exception):
                self._failure = f"{bucket[0]}: {_cause(outcome)}"
                return
            self._results += outcome
        self._failure = None

    def _write_metadata(self, results: list[Any]) -> str | None:
        try:
            self._writer.finish(self._metadata, results)
            save_config(CheckpointingConfig(*BACKEND), str(self._folder))
        except OSError as error:
            return str(error)
        return None


def sync(folder: Path) -> None:
    """Brings the small files of a folder, and the names of all, to the disk. Raises OSError."""
    for path in folder.iterdir():
        if path.suffix != _DATA_SUFFIX:
            sync_path(path)
    sync_path(folder)


def sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def from_rank_0(text: str | None, mesh: Mesh) -> str | None:
    """What rank 0 says, on every rank."""
    message = (text or "").encode()[:_MOST_MESSAGE_BYTES]
    told = torch.zeros(_MOST_MESSAGE_BYTES, dtype=torch.uint8)
    if mesh.rank == 0 and message:
        told[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    told = told.to(mesh.device)
    dist.broadcast(told, src=0)
    return told.cpu().numpy().tobytes().rstrip(b"\0").decode(errors="replace") or None


def _cause(error: BaseException) -> BaseException:
    """The first of a chain of errors: torch's file writer hides a full disk behind a wrong position."""
    return _cause(error.__context__) if error.__context__ else error


def _serialised(values: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return buffer.getvalue()
