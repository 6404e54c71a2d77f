"""Checkpoints of a training job: weights, optimizer, schedule, random state, reference, and a small JSON record, in one unit.

    checkpoints = Checkpoints(folder, state, keep=2)
    checkpoints.begin_save(version, extra)    # all ranks: copies the state, returns, writes behind the training
    for saved in checkpoints.poll(): ...      # all ranks, each step: what became durable, or failed
    version, extra = load(latest(folder), state)

A checkpoint is a folder `version-<n>` in torch_dist format; it may be loaded into another layout. While it is written
its name is `version-<n>.partial`, and the rename is the last step, so a folder with the final name is complete. A save
that fails or is killed costs that save alone. `shards` does the writing. Every file has a digest, which `load` checks.
"""

import json
import logging
import random
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from conf.shapes import ModelError
from rollout import checkpoint_files
from rollout.checkpoint_files import SumsError
from trainer.megatron import fixes
from trainer.megatron.model import bare
from trainer.megatron.optimizer import gather_parameters
from trainer.megatron.reference import Reference
from trainer.megatron.shards import Planner, Shards, from_rank_0, of_any_rank, sync, sync_path
from trainer.process_groups import Mesh

_PARTIAL = ".partial"
_RECORD = "kestrel.json"
_HYPERPARAMETERS = ("lr", "max_lr", "min_lr", "weight_decay", "betas", "eps")  # the run's configuration decides these
_WAY_BACK = "Bring the checkpoint back as it was, or start a new run"
_MODEL, _REFERENCE = "model", "reference"
_BYTES_PER_PARAMETER_STATE = 12  # fp32 weight and two moments
_ROUND_S = 1.0  # how often the ranks tell one another whether they still write
log = logging.getLogger("trainer")

fixes.install()


class DamagedCheckpoint(ModelError):
    """A file of the checkpoint is not as it was written. Nothing of it was loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """The live objects that a checkpoint saves and restores."""

    chunks: Sequence[torch.nn.Module]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    mesh: Mesh
    reference: Reference | None = None


class Saved(NamedTuple):
    """How a save ended: it is durable if `failure` is None, and has no effect otherwise."""

    version: int
    seconds: float  # from begin_save to the rename
    failure: str | None


class Loaded(NamedTuple):
    """What the checkpoint holds beside the weights."""

    version: int
    extra: dict[str, Any]


def latest(folder: str | Path) -> Path | None:
    """The newest complete checkpoint."""
    found = checkpoint_files.complete(folder)
    return found[-1][1] if found else None


class Checkpoints:
    """Saves into one folder, one save at a time, and keeps the newest ones. All ranks call every method together."""

    def __init__(self, folder: str | Path, state: TrainingState, *, keep: int) -> None:
        if keep < 1:
            raise ModelError(f"trainer.checkpoints_kept={keep}: keep at least one")
        self.folder = Path(folder).absolute()
        self._state = state
        self._keep = keep
        self._planner = Planner(state.mesh)
        self._pending: _Pending | None = None
        self._failed: list[Saved] = []
        if state.mesh.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            for left_over in self.folder.glob(f"version-*{_PARTIAL}"):
                shutil.rmtree(left_over, ignore_errors=True)
        dist.barrier()

    def begin_save(self, version: int, extra: dict[str, Any], *, timeout_s: float = 600.0) -> list[Saved]:
        """Copies the state and starts to write it, together with `extra` of rank 0. First waits for an earlier save, and
        returns how that one ended. Raises TimeoutError if it does not end.
        """
        ended = self.wait(timeout_s=timeout_s)
        started_s = time.monotonic()
        partial = self.folder / f"version-{version}{_PARTIAL}"
        failure = self._prepare(partial)
        if failure is not None:
            self._failed.append(Saved(version, 0.0, failure))
            return ended
        reference = self._state.reference
        record = {
            "version": version,
            "layout": _layout(self._state.mesh),
            "reference": reference.identity if reference else None,
            "extra": extra,
        }
        shards = self._planner.plan(_sharded_state(self._state, is_loading=False, with_random_state=True), partial)
        shards.start()
        self._pending = _Pending(version, partial, json.dumps(record, indent=1), shards, started_s)
        return ended

    def poll(self) -> list[Saved]:
        """The saves that ended since the last call. Cheap: one small all-reduce while a save is being written."""
        ended, self._failed = self._failed, []
        pending = self._pending
        if pending is None or _any_rank(pending.shards.writing, self._state.mesh):
            return ended
        self._pending = None
        return [*ended, self._finish(pending)]

    def wait(self, *, timeout_s: float) -> list[Saved]:
        """Like `poll`, but waits for the save that is being written. Raises TimeoutError on every rank if it does not end."""
        # In short rounds, because a rank that has finished would else wait for the slowest one within a single collective,
        # which has a deadline of its own.
        rounds = ceil(timeout_s / _ROUND_S)
        while self._pending is not None and _any_rank(self._pending.shards.writing, self._state.mesh):
            if rounds == 0:
                raise TimeoutError(f"checkpoint {self._pending.partial} was not written within {timeout_s:g} s")
            self._pending.shards.join(_ROUND_S)
            rounds -= 1
        return self.poll()

    def _prepare(self, partial: Path) -> str | None:
        """Makes an empty folder on rank 0. All ranks learn whether that failed, and why."""
        mesh = self._state.mesh
        needed = torch.tensor([_state_bytes(self._state) if mesh.is_weight_replica_zero else 0], device=mesh.device)
        dist.all_reduce(needed)
        failure = _make_folder(partial, int(needed.item())) if mesh.rank == 0 else None
        return from_rank_0(failure, mesh)

    def _finish(self, pending: "_Pending") -> Saved:
        """Gives the folder its final name once every rank has written its part."""
        mesh = self._state.mesh
        failure = pending.shards.finish()
        if mesh.rank == 0:
            failure = failure or _publish(pending.partial, pending.record, pending.shards.digests)
            if failure is None:
                self._prune()
            else:
                shutil.rmtree(pending.partial, ignore_errors=True)
        failure = from_rank_0(failure, mesh)
        return Saved(pending.version, time.monotonic() - pending.started_s, failure)

    def _prune(self) -> None:
        for _, path in checkpoint_files.complete(self.folder)[: -self._keep]:
            try:
                _remove(path)
            except OSError as error:  # it only takes space, and the next save tries again
                log.warning("cannot remove the old checkpoint %s: %s", path, error)


class _Pending(NamedTuple):
    version: int
    partial: Path
    record: str
    shards: Shards
    started_s: float


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


def _publish(partial: Path, record: str, digests: Mapping[str, str]) -> str | None:
    """Gives a finished checkpoint its final name, in place of an older one of that version, and makes that durable."""
    final = partial.with_name(partial.name.removesuffix(_PARTIAL))
    try:
        (partial / _RECORD).write_text(record)
        checkpoint_files.write_sums(partial, digests)
        sync(partial)
        if final.exists():
            _remove(final)
        partial.rename(final)
        sync_path(final.parent)
    except OSError as error:
        return str(error)
    return None


def _remove(path: Path) -> None:
    """Renames it first, so that a checkpoint which is half deleted is never taken for a complete one."""
    doomed = path.with_name(f"{path.name}.old{_PARTIAL}")
    path.rename(doomed)
    shutil.rmtree(doomed)


def load(path: str | Path, state: TrainingState) -> Loaded:
    """Restores everything from a checkpoint, in this layout or another, into wrapped chunks and an optimizer that is built.

    Learning rate, betas and weight decay come from the configuration, not from the checkpoint. Random state is restored if the
    layout is the same. Raises DamagedCheckpoint, and ModelError if the run trained against another reference than this one.
    """
    path = Path(path)
    _check_digests(path, state.mesh)
    record = read_record(path)
    # The reference is loaded first and alone, because the loaded tensors may share the memory of the modules.
    if version := _reference_to_load(path, record["reference"], state.reference):
        assert state.reference is not None
        _fill(state.chunks, _read(path, _sharded_weights(state, _REFERENCE), state.mesh), _REFERENCE)
        state.reference.refresh(version)
    same_layout = record["layout"] == _layout(state.mesh)
    loaded = _read(path, _sharded_state(state, is_loading=True, with_random_state=same_layout), state.mesh)
    _fill(state.chunks, loaded, _MODEL)
    settings = [{key: group[key] for key in _HYPERPARAMETERS if key in group} for group in state.optimizer.param_groups]
    state.optimizer.load_state_dict(loaded["optimizer"])
    for group, current in zip(state.optimizer.param_groups, settings, strict=True):
        group.update(current)
    state.scheduler.num_steps = loaded["optimizer_steps"]
    state.scheduler.step(0)
    if same_layout:
        _restore_random_state(loaded["random_state"])
    return Loaded(record["version"], record["extra"])


def _check_digests(path: Path, mesh: Mesh) -> None:
    """Every rank reads its share of the files. Raises DamagedCheckpoint or ModelError, the same on all ranks."""
    found: str | None = None
    refused: str | None = None
    try:
        names = sorted(checkpoint_files.read_sums(path))
        found = checkpoint_files.damage(path, names[mesh.rank :: mesh.world_size])
    except SumsError as error:
        refused = str(error)
    if refused := of_any_rank(refused, mesh):
        raise ModelError(refused)
    if found := of_any_rank(found, mesh):
        raise DamagedCheckpoint(found)


def put_aside(damaged: Path, why: DamagedCheckpoint) -> str:
    """Renames a damaged checkpoint, so that the one before is the newest; says so. Raises ModelError if there is none before."""
    older = [path for _, path in checkpoint_files.complete(damaged.parent) if path != damaged]
    if not older:
        raise ModelError(f"{why}, and there is no other checkpoint. {_WAY_BACK}") from why
    kept = damaged.with_name(f"{damaged.name}.damaged")
    shutil.rmtree(kept, ignore_errors=True)
    damaged.rename(kept)
    return (
        f"{why}. The run goes on from {older[-1].name}, and the steps in between are done again. "
        f"The damaged checkpoint is kept as {kept}; delete it when you do not need it any more"
    )


def read_record(path: Path) -> dict[str, Any]:
    """The JSON record of a checkpoint. Raises ModelError."""
    try:
        record: dict[str, Any] = json.loads((path / _RECORD).read_text())
        missing = {"version", "layout", "reference", "extra"} - record.keys()
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{path / _RECORD} cannot be read ({error}). {_WAY_BACK}") from error
    if missing:
        raise ModelError(f"{path / _RECORD} lacks {', '.join(sorted(missing))}. {_WAY_BACK}")
    return record


def _read(path: Path, wanted: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    strategy = get_default_load_sharded_strategy(str(path))
    if mesh.dp * mesh.layout.cp > 1:
        strategy = FullyParallelLoadStrategyWrapper(strategy, mesh.dp_cp_group)
    loaded: dict[str, Any] = dist_checkpointing.load(wanted, str(path), strategy)
    return loaded


def _reference_to_load(path: Path, recorded: dict[str, Any] | None, reference: Reference | None) -> int:
    """The version of the reference in the checkpoint; 0 if the reference is the model's folder, or if there is none."""
    if reference is None or recorded is None:
        return 0
    if recorded["version"] == 0 and recorded["fingerprint"] != reference.fingerprint:
        raise ModelError(
            f"{path} was trained against another reference: its weights have the fingerprint {recorded['fingerprint'][:16]}, "
            f"those of model.path or algo.teacher {reference.fingerprint[:16]} (in model.dtype). Bring the folder back as it "
            "was, or start a new run"
        )
    return int(recorded["version"])


def _fill(chunks: Sequence[torch.nn.Module], loaded: dict[str, Any], name: str) -> None:
    for number, chunk in enumerate(chunks):
        bare(chunk).load_state_dict(loaded[f"{name}{number}"])


def _sharded_state(state: TrainingState, *, is_loading: bool, with_random_state: bool) -> dict[str, Any]:
    gather_parameters(state.chunks)
    sharded = _sharded_weights(state, _MODEL)
    sharded["optimizer"] = state.optimizer.sharded_state_dict(dict(sharded), is_loading=is_loading, metadata=_metadata(state))
    sharded["optimizer_steps"] = state.scheduler.num_steps
    if with_random_state:
        sharded["random_state"] = _sharded_random_state(state.mesh)
    if not is_loading and state.reference is not None and state.reference.version:
        with state.reference.in_place():
            sharded |= _copied(_sharded_weights(state, _REFERENCE))
    return sharded


def _sharded_weights(state: TrainingState, name: str) -> dict[str, Any]:
    """The weights of the modules as Megatron's sharded state. In the checkpoint the model's own names have no prefix."""
    sharded = {
        f"{name}{number}": bare(chunk).sharded_state_dict(metadata=_metadata(state)) for number, chunk in enumerate(state.chunks)
    }
    if name != _MODEL:
        add_prefix_for_sharding(sharded, f"{name}.")
    return sharded


def _copied(sharded: dict[str, Any]) -> dict[str, Any]:
    """The same state with copies of the tensors, because the modules are about to hold other values."""
    for shard in nested_values(sharded):
        if isinstance(shard.data, torch.Tensor):
            shard.data = shard.data.detach().clone()
    return sharded


def _metadata(state: TrainingState) -> dict[str, Any]:
    return {"distrib_optim_sharding_type": "fully_reshardable", "dp_cp_group": state.mesh.dp_cp_group}


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
    """Bytes of a checkpoint for the parameters of this rank."""
    with_reference = state.reference is not None and state.reference.version > 0
    return sum(
        parameter.numel() * (parameter.element_size() * (1 + with_reference) + _BYTES_PER_PARAMETER_STATE)
        for chunk in state.chunks
        for parameter in chunk.parameters()
    )


def _any_rank(flag: bool, mesh: Mesh) -> bool:
    value = torch.tensor([int(flag)], device=mesh.device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return bool(value.item())
