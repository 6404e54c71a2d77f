"""Checkpoints of a training job: weights, optimizer, schedule, random state, and a small JSON record, in one unit.

    checkpoints = Checkpoints(folder, state, keep=2)
    checkpoints.begin_save(version, extra)    # all ranks: copies the state, returns, writes behind the training
    for saved in checkpoints.poll(): ...      # all ranks, each step: what became durable, or failed
    version, extra = load(latest(folder), state)

A checkpoint is a folder `version-<n>` in torch_dist format; it may be loaded into another layout. While it is written
it is called `version-<n>.partial`, and the rename comes last: what bears the name is whole. A failed or killed save
costs that save alone.

Each rank writes from a thread of its own. Megatron's way, forked writers and a manager process a rank, forks under the
threads of the collectives and leaves processes behind when a rank is killed.
"""

import json
import os
import queue
import random
import re
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed.checkpoint.api import CheckpointException

from trainer import megatron_fixes
from trainer.model import bare, gather_parameters
from trainer.parallel import Mesh
from trainer.spec import ModelError

_NAME = re.compile(r"version-(\d+)")
_PARTIAL = ".partial"
_MOST_MESSAGE_BYTES = 2048
_RECORD = "kestrel.json"
_HYPERPARAMETERS = ("lr", "max_lr", "min_lr", "weight_decay", "betas", "eps")  # the run's configuration decides these
_BYTES_PER_PARAMETER_STATE = 12  # fp32 weight and two moments

megatron_fixes.install()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """The live objects that a checkpoint saves and restores."""

    chunks: Sequence[torch.nn.Module]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    mesh: Mesh


class Saved(NamedTuple):
    """The end of a save: durable if `failure` is None, otherwise without effect."""

    version: int
    seconds: float  # from begin_save to the rename
    failure: str | None


class Loaded(NamedTuple):
    """What came with the weights."""

    version: int
    extra: dict[str, Any]


def complete(folder: str | Path) -> list[tuple[int, Path]]:
    """The whole checkpoints in a folder, oldest first."""
    found = []
    for path in Path(folder).glob("version-*"):
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir():
            found.append((int(match[1]), path))
    return sorted(found)


def latest(folder: str | Path) -> Path | None:
    """The newest whole checkpoint."""
    found = complete(folder)
    return found[-1][1] if found else None


class Checkpoints:
    """Saves into one folder, one save at a time, and keeps the last few. Every method is called by all ranks together."""

    def __init__(self, folder: str | Path, state: TrainingState, *, keep: int) -> None:
        if keep < 1:
            raise ModelError(f"checkpoints.keep = {keep}; keep at least one")
        self.folder = Path(folder).absolute()
        self._state = state
        self._keep = keep
        self._strategy = _save_strategy(state.mesh)
        self._pending: _Pending | None = None
        self._failed: list[Saved] = []
        self._validated = False  # that each shard is written exactly once; the same for every save
        if state.mesh.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            for left_over in self.folder.glob(f"version-*{_PARTIAL}"):
                shutil.rmtree(left_over)
        dist.barrier()

    def begin_save(self, version: int, extra: dict[str, Any], *, timeout_s: float = 600.0) -> list[Saved]:
        """Copies the state and starts to write it. Waits for an earlier save first and returns how that ended."""
        ended = self.wait(timeout_s=timeout_s)
        started_s = time.monotonic()
        partial = self.folder / f"version-{version}{_PARTIAL}"
        record = json.dumps({"version": version, "layout": _layout(self._state.mesh), "extra": extra}, indent=1)
        failure = self._prepare(partial)
        if failure is not None:
            self._failed.append(Saved(version, 0.0, failure))
            return ended
        request = dist_checkpointing.save(
            _sharded_state(self._state, is_loading=False, with_random_state=True),
            str(partial),
            self._strategy,
            validate_access_integrity=not self._validated,
            async_sharded_save=True,
        )
        self._validated = True
        thread = threading.Thread(target=_write, args=(request, self._copies(request)), name="checkpoint", daemon=True)
        thread.start()
        self._pending = _Pending(version, partial, record, request, thread, started_s)
        return ended

    def poll(self) -> list[Saved]:
        """The saves that ended since the last call. Cheap: one small all-reduce while a save is under way."""
        ended, self._failed = self._failed, []
        pending = self._pending
        if pending is None or _any_rank(pending.thread.is_alive(), self._state.mesh):
            return ended
        self._pending = None
        return [*ended, self._finish(pending)]

    def wait(self, *, timeout_s: float) -> list[Saved]:
        """Like `poll`, but waits for the save under way."""
        if self._pending is not None:
            self._pending.thread.join(timeout_s)
            if _any_rank(self._pending.thread.is_alive(), self._state.mesh):
                raise TimeoutError(f"checkpoint {self._pending.partial} was not written within {timeout_s} s")
        return self.poll()

    def _prepare(self, partial: Path) -> str | None:
        """Makes an empty folder on rank 0; all ranks learn whether that failed, and why."""
        mesh = self._state.mesh
        needed = torch.tensor([_state_bytes(self._state) if mesh.is_weight_replica_zero else 0], device=mesh.device)
        dist.all_reduce(needed)
        failure = _make_folder(partial, int(needed.item())) if mesh.rank == 0 else None
        return _from_rank_0(failure, mesh)

    def _copies(self, request: AsyncRequest) -> list[Any]:
        """The tensors to write, in memory that training does not touch."""
        if request.async_fn is None:
            return []
        buckets: list[Any] = request.preload_fn()
        if self._state.mesh.device.type != "cpu":
            return buckets
        return [
            (file, key, (blobs, [(item, tensor.detach().clone()) for item, tensor in tensors]))
            for file, key, (blobs, tensors) in buckets
        ]

    def _finish(self, pending: "_Pending") -> Saved:
        """Writes the metadata once every rank has written its part, and gives the folder its name."""
        failure = None
        try:
            for finalize in pending.request.finalize_fns:
                finalize()
        except CheckpointException as error:
            failure = f"writing {pending.partial} failed: {error}"
        if self._state.mesh.rank == 0:
            failure = failure or _publish(pending.partial, pending.record)
            if failure is None:
                self._prune()
            else:
                shutil.rmtree(pending.partial, ignore_errors=True)
        failure = _from_rank_0(failure, self._state.mesh)
        return Saved(pending.version, time.monotonic() - pending.started_s, failure)

    def _prune(self) -> None:
        for _, path in complete(self.folder)[: -self._keep]:
            _remove(path)


class _Pending(NamedTuple):
    version: int
    partial: Path
    record: str
    request: AsyncRequest
    thread: threading.Thread
    started_s: float


def _save_strategy(mesh: Mesh) -> Any:
    # The writer hands its results to the thread that finalises through this queue; Megatron would start a process to
    # hold it.
    filesystem_async._results_queue = queue.Queue()
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
    if mesh.dp * mesh.layout.cp == 1:
        return strategy
    # Ranks with the same parameters share the writing.
    return FullyParallelSaveStrategyWrapper(strategy, mesh.dp_cp_group, do_cache_distribution=True)


def _make_folder(partial: Path, needed_bytes: int) -> str | None:
    try:
        shutil.rmtree(partial, ignore_errors=True)
        free_bytes = shutil.disk_usage(partial.parent).free
        if free_bytes < needed_bytes:
            return f"{partial.parent}: a checkpoint needs {needed_bytes / 1e9:.1f} GB, {free_bytes / 1e9:.1f} GB are free"
        partial.mkdir()
    except OSError as error:
        return str(error)
    return None


def _write(request: AsyncRequest, buckets: list[Any]) -> None:
    """Writes this rank's files, and leaves results or the exception for `finalize_fns`. Runs in a thread."""
    if request.async_fn is None:
        return
    transforms = request.async_fn.args[0]
    results: queue.Queue[Any] = request.async_fn_args[2]
    written: dict[int, Any] = {}
    for number, bucket in enumerate(buckets):
        outcomes: queue.Queue[Any] = queue.Queue()
        tickets: queue.Queue[int] = queue.Queue()
        tickets.put(number)
        filesystem_async.FileSystemWriterAsync.write_preloaded_data(transforms, number, bucket, outcomes, tickets, use_fsync=True)
        _, outcome = outcomes.get_nowait()
        if isinstance(outcome, Exception):
            results.put(outcome)
            return
        written[number] = outcome
    results.put(written)


def _publish(partial: Path, record: str) -> str | None:
    """Gives a finished checkpoint its name, replacing an older one of that version, and makes that durable."""
    final = partial.with_name(partial.name.removesuffix(_PARTIAL))
    try:
        (partial / _RECORD).write_text(record)
        if final.exists():
            _remove(final)
        partial.rename(final)
        folder = os.open(final.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        return str(error)
    return None


def _remove(path: Path) -> None:
    """Takes the name away first, so that a checkpoint half deleted is never taken for a whole one."""
    doomed = path.with_name(f"{path.name}.old{_PARTIAL}")
    path.rename(doomed)
    shutil.rmtree(doomed)


def load(path: str | Path, state: TrainingState) -> Loaded:
    """Restores everything from a checkpoint, in this layout or another. The chunks are wrapped, the optimizer is built.

    Learning rate, betas and weight decay are the configuration's, not the checkpoint's. Random state is restored if the
    layout is the same.
    """
    path = Path(path)
    record = json.loads((path / _RECORD).read_text())
    same_layout = record["layout"] == _layout(state.mesh)
    strategy = get_default_load_sharded_strategy(str(path))
    if state.mesh.dp * state.mesh.layout.cp > 1:
        strategy = FullyParallelLoadStrategyWrapper(strategy, state.mesh.dp_cp_group)
    wanted = _sharded_state(state, is_loading=True, with_random_state=same_layout)
    loaded = dist_checkpointing.load(wanted, str(path), strategy)
    for number, chunk in enumerate(state.chunks):
        bare(chunk).load_state_dict(loaded[f"model{number}"])
    settings = [{key: group[key] for key in _HYPERPARAMETERS if key in group} for group in state.optimizer.param_groups]
    state.optimizer.load_state_dict(loaded["optimizer"])
    for group, current in zip(state.optimizer.param_groups, settings, strict=True):
        group.update(current)
    state.scheduler.num_steps = loaded["optimizer_steps"]
    state.scheduler.step(0)
    if same_layout:
        _restore_random_state(loaded["random_state"])
    return Loaded(record["version"], record["extra"])


def _sharded_state(state: TrainingState, *, is_loading: bool, with_random_state: bool) -> dict[str, Any]:
    gather_parameters(state.chunks)
    metadata = {"distrib_optim_sharding_type": "fully_reshardable", "dp_cp_group": state.mesh.dp_cp_group}
    sharded: dict[str, Any] = {
        f"model{number}": bare(chunk).sharded_state_dict(metadata=metadata) for number, chunk in enumerate(state.chunks)
    }
    sharded["optimizer"] = state.optimizer.sharded_state_dict(dict(sharded), is_loading=is_loading, metadata=metadata)
    sharded["optimizer_steps"] = state.scheduler.num_steps
    if with_random_state:
        sharded["random_state"] = _sharded_random_state(state.mesh)
    return sharded


def _sharded_random_state(mesh: Mesh) -> ShardedObject:
    values = {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }
    grid = (mesh.layout.pp, mesh.layout.tp, mesh.dp)
    place = (mesh.stage, mesh.tp_rank, mesh.dp_rank)
    return ShardedObject("random_state", values, grid, place, replica_id=mesh.cp_rank)


def _restore_random_state(values: dict[str, Any]) -> None:
    random.setstate(values["python"])
    torch.cuda.set_rng_state(values["device"])
    torch.set_rng_state(values["torch"])
    get_cuda_rng_tracker().set_states(values["tracker"])


def _layout(mesh: Mesh) -> dict[str, Any]:
    return {**asdict(mesh.layout), "dp": mesh.dp}


def _state_bytes(state: TrainingState) -> int:
    return sum(
        parameter.numel() * (parameter.element_size() + _BYTES_PER_PARAMETER_STATE)
        for chunk in state.chunks
        for parameter in chunk.parameters()
    )


def _any_rank(flag: bool, mesh: Mesh) -> bool:
    value = torch.tensor([int(flag)], device=mesh.device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return bool(value.item())


def _from_rank_0(failure: str | None, mesh: Mesh) -> str | None:
    """What rank 0 says, on every rank."""
    message = (failure or "").encode()[:_MOST_MESSAGE_BYTES]
    told = torch.zeros(_MOST_MESSAGE_BYTES, dtype=torch.uint8)
    if mesh.rank == 0 and message:
        told[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    told = told.to(mesh.device)
    dist.broadcast(told, src=0)
    return told.cpu().numpy().tobytes().rstrip(b"\0").decode(errors="replace") or None
