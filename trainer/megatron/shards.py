"""One rank's part of a checkpoint, written by a thread in torch_dist format.

    shards = Planner(mesh).plan(state, folder)     # all ranks together: decides who writes what
    shards.start()                                 # copies the state; training may go on
    failure = shards.finish()                      # all ranks, once none is `writing`: writes metadata, tells what went wrong

Megatron's own writers have two properties that a run cannot accept. They are forked while threads of the collectives run,
and stay behind as processes when a rank is killed. And rank 0 writes small files between two collectives, so that a full
disk raises on rank 0 alone while the other ranks wait for it. Here a thread writes, no disk access happens between two
collectives, and `finish` tells every rank what went wrong on any of them.
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

from rollout import checkpoint_files
from trainer.process_groups import Mesh

BACKEND = ("torch_dist", 1)
_MOST_MESSAGE_BYTES = 2048
_DATA_SUFFIX = ".distcp"  # Megatron's writer syncs these files itself


class Planner:
    """Decides which rank writes what, in the same way for every save of a job."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._strategies: dict[tuple[str, ...], Any] = {}  # one for each set of parts that is saved

    def plan(self, state: dict[str, Any], folder: Path) -> "Shards":
        """state: Megatron's sharded state. Collective over all ranks; writes nothing."""
        parts = tuple(state)
        # Once is enough to verify that each shard is written exactly once, and to decide who writes it.
        sharded, common = save_preprocess(state, validate_access_integrity=parts not in self._strategies)
        strategy = self._strategies.setdefault(parts, _strategy(self._mesh))
        writer, metadata = strategy.async_save(sharded, folder)
        return Shards(self._mesh, folder, writer, metadata, common)


def _strategy(mesh: Mesh) -> Any:
    # This queue is never used, but without it Megatron would start a process to hold one.
    filesystem_async._results_queue = queue.Queue()
    strategy = _Strategy(*BACKEND, thread_count=1)
    if mesh.dp * mesh.layout.cp == 1:
        return strategy
    # Ranks that hold the same parameters share the writing.
    return FullyParallelSaveStrategyWrapper(strategy, mesh.dp_cp_group, do_cache_distribution=True)


class _Strategy(TorchDistSaveShardedStrategy):
    """Hands out Megatron's plan of a save before it becomes a request for Megatron's forked writers."""

    def _get_save_and_finalize_callbacks(self, writer: FileSystemWriterAsync, planned: Any) -> Any:
        return writer, planned[1]


class Shards:
    """A save of this rank while it is being written."""

    def __init__(self, mesh: Mesh, folder: Path, writer: FileSystemWriterAsync, metadata: Any, common: Any) -> None:
        """metadata: of the shards of all ranks, on rank 0 alone; common: the state that is the same on every rank."""
        self._mesh, self._folder, self._writer, self._metadata = mesh, folder, writer, metadata
        self._common = _serialised(common) if mesh.rank == 0 else b""
        self._results: list[Any] = []
        self.digests: dict[str, str] = {}  # by file name: of this rank's files, and on rank 0 of all once it is finished
        self._failure: str | None = "the thread that writes it died"
        self._thread: threading.Thread | None = None

    @property
    def bytes(self) -> int:
        """The bytes of the tensors that this rank writes."""
        return sum(t.numel() * t.element_size() for _, _, (_, tensors) in self._writer.write_buckets for _, t in tensors)

    @property
    def writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Copies the tensors into memory that training does not change, and starts to write."""
        on_gpu = self._mesh.device.type == "cuda"
        buckets = self._writer.preload_tensors(self._writer.write_buckets, non_blocking=on_gpu)
        if not on_gpu:  # they are on the CPU already, so nothing was copied
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
        """Rank 0 writes the metadata if every rank wrote its shards. Returns what went wrong on any rank. Collective."""
        mesh = self._mesh
        outcome = self._failure or (self._results, self.digests)
        outcomes: list[Any] | None = [None] * mesh.world_size if mesh.rank == 0 else None
        dist.gather_object(outcome, outcomes, dst=0)
        failure = None
        if outcomes is not None:
            failures = [f"rank {rank}: {o}" for rank, o in enumerate(outcomes) if isinstance(o, str)]
            failure = "; ".join(failures) if failures else self._write_metadata([results for results, _ in outcomes])
            self.digests |= {name: value for o in outcomes if not isinstance(o, str) for name, value in o[1].items()}
        return from_rank_0(failure, mesh)

    def _write(self, buckets: list[Any]) -> None:
        """Runs in the thread, and stores the results or the failure."""
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
        try:
            written = [Path(file) for file, _, _ in buckets]
            self.digests = {path.name: checkpoint_files.digest(path) for path in written if path.exists()}
        except OSError as error:
            self._failure = str(error)
            return
        self._failure = None

    def _write_metadata(self, results: list[Any]) -> str | None:
        try:
            self._writer.finish(self._metadata, results)
            save_config(CheckpointingConfig(*BACKEND), str(self._folder))
        except OSError as error:
            return str(error)
        return None


def sync(folder: Path) -> None:
    """Syncs the small files of a folder and the names of all its files to the disk. Raises OSError."""
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
    """The text of rank 0, on every rank."""
    message = (text or "").encode()[:_MOST_MESSAGE_BYTES]
    told = torch.zeros(_MOST_MESSAGE_BYTES, dtype=torch.uint8)
    if mesh.rank == 0 and message:
        told[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    told = told.to(mesh.device)
    dist.broadcast(told, src=0)
    return told.cpu().numpy().tobytes().rstrip(b"\0").decode(errors="replace") or None


def of_any_rank(text: str | None, mesh: Mesh) -> str | None:
    """The text of the first rank that has one, on every rank."""
    told: list[str | None] = [None] * mesh.world_size
    dist.all_gather_object(told, text)
    return next(filter(None, told), None)


def _cause(error: BaseException) -> BaseException:
    """The first error of a chain: torch's file writer hides a full disk behind a wrong position."""
    return _cause(error.__context__) if error.__context__ else error


def _serialised(values: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return buffer.getvalue()
