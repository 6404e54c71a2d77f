"""Reads and writes weights in the format of Hugging Face.

`load` reads safetensors: each rank reads only its own slices, so no rank ever holds the whole model. `hf_tensors` gives the
weights for pushing and saving: tensor by tensor, gathered over the tensor-parallel group of each stage. `hf_manifest` lists
what it will yield, and every rank knows that list without communication. `save` writes a folder that transformers and SGLang
load. All of them use the tables in `families`.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from conf.compose.model_description import copy_description
from conf.shapes import QUANTISED, Layout, ModelError, ModelShape
from trainer.megatron.families import Cut, Placement, piece_ranges, placements
from trainer.megatron.model import bare
from trainer.megatron.optimizer import gather_parameters
from trainer.process_groups import Mesh

_INDEX = "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")


class HfTensor(NamedTuple):
    """Name, dtype and shape of a Hugging Face tensor, without its values."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def load(chunks: Sequence[torch.nn.Module], shape: ModelShape, mesh: Mesh, folder: str | Path) -> None:
    """Fills every parameter of this rank from the folder, and converts the values to the dtype of the parameters."""
    with ExitStack() as stack:
        stored = open_tensors(Path(folder), stack)
        if faults := tensor_faults(stored, shape):
            raise ModelError(f"{folder}: {faults[0]}")
        filled = set()
        for placement in placements(shape, mesh.layout, mesh.stage):
            parameter = parameter_of(chunks, placement)
            _fill(parameter.data, placement, shape, mesh, stored)
            filled.add(parameter)
    left = [name for chunk in chunks for name, parameter in chunk.named_parameters() if parameter not in filled]
    if left:
        raise ModelError(f"no entry of the {shape.architecture} table fills {', '.join(left)}")


def open_tensors(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Opens the weight files, until the stack closes them: slices, not yet read, by the names of the tensors."""
    stored: dict[str, Any] = {}
    for path in _weight_files(folder):
        try:
            opened = stack.enter_context(safe_open(path, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path} cannot be read as safetensors: {error}") from error
        stored |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (it is no mapping)
    return stored


def _weight_files(folder: Path) -> list[Path]:
    """The weight files. If there is an index, only its files count: a folder may hold copies under other names."""
    index = folder / _INDEX
    if index.is_file():
        try:
            return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index} is damaged ({error!r}); download it again") from error
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ModelError(f"no *.safetensors files in {folder}; convert the model's weights to safetensors first")
    return paths


def tensor_faults(stored: Mapping[str, Any], shape: ModelShape) -> list[str]:
    """Why these tensors are not the model that config.json describes; empty if they are."""
    pieces = (piece for placement in placements(shape, Layout(), 0) for piece in placement.pieces)
    wanted = {piece.name: piece.sizes(shape) for piece in pieces}
    faults = []
    for name, sizes in wanted.items():
        if name not in stored:
            faults.append(f"lacks the tensor {name!r}")
        elif stored[name].get_dtype() not in _FLOATS:
            faults.append(f"{name!r} has the dtype {stored[name].get_dtype()}: {QUANTISED}")
        elif (found := tuple(stored[name].get_shape())) != sizes:
            faults.append(f"{name!r} has shape {found}, but config.json makes it {sizes}")
    faults += [
        f"{name!r} belongs to a model that the trainer does not know; it would train without this tensor"
        for name in sorted(stored.keys() - wanted.keys())
        if name.startswith("model.") and not name.endswith(".rotary_emb.inv_freq")
    ]
    return faults


def parameter_of(chunks: Sequence[torch.nn.Module], placement: Placement) -> torch.nn.Parameter:
    """The Megatron parameter of an entry, under the name that the layers of this model use."""
    chunk = bare(chunks[placement.chunk])
    if placement.fused_name is not None:
        with suppress(AttributeError):
            return chunk.get_parameter(placement.fused_name)
    return chunk.get_parameter(placement.name)


def _fill(target: Tensor, placement: Placement, shape: ModelShape, mesh: Mesh, stored: Mapping[str, Any]) -> None:
    """Copies this rank's ranges of the pieces into `target`, and zeros into the padding behind them."""
    dim = 1 if placement.cut is Cut.COLUMNS else 0
    slices = [stored[piece.name] for piece in placement.pieces]
    position = 0
    for piece, start, stop in piece_ranges(placement, shape, mesh.layout.tp, mesh.tp_rank):
        part = slices[piece][start:stop] if dim == 0 else slices[piece][:, start:stop]
        target.narrow(dim, position, stop - start).copy_(part)
        position += stop - start
    target.narrow(dim, position, target.size(dim) - position).zero_()


def hf_manifest(shape: ModelShape, layout: Layout, stage: int, dtype: torch.dtype) -> list[HfTensor]:
    """What `hf_tensors` yields for a stage, in its order."""
    return [
        HfTensor(piece.name, dtype, piece.sizes(shape))
        for placement in placements(shape, layout, stage)
        if placement.exported
        for piece in placement.pieces
    ]


def hf_tensors(chunks: Sequence[torch.nn.Module], shape: ModelShape, mesh: Mesh) -> Iterator[tuple[str, Tensor | None]]:
    """Yields the Hugging Face tensors of this rank's stage, one by one, in the order of `hf_manifest`.

    All tensor-parallel ranks of the stage with data-parallel rank 0 iterate in lock-step. Only the weight source gets
    values; the others get None. The first stage yields a tied embedding, once. After training with overlapped
    gathers call `optimizer.gather_parameters` on every rank first.
    """
    if not mesh.is_weight_replica_zero:
        raise RuntimeError(f"rank {mesh.rank} is not in the tensor-parallel group that exports its stage")
    for placement in placements(shape, mesh.layout, mesh.stage):
        if not placement.exported:
            continue
        shards = _gather(parameter_of(chunks, placement).data, placement, mesh)
        if shards is None:
            yield from ((piece.name, None) for piece in placement.pieces)
        else:
            yield from _assemble(shards, placement, shape)


def _gather(shard: Tensor, placement: Placement, mesh: Mesh) -> list[Tensor] | None:
    """The shards of all tensor-parallel ranks, on the first; None on the others."""
    if mesh.layout.tp == 1 or placement.cut is Cut.WHOLE:
        return [shard] if mesh.tp_rank == 0 else None
    shard = shard.contiguous()
    shards = [torch.empty_like(shard) for _ in range(mesh.layout.tp)] if mesh.tp_rank == 0 else None
    dist.gather(shard, shards, group=mesh.tp_group, group_dst=0)
    return shards


def _assemble(shards: list[Tensor], placement: Placement, shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    dim = 1 if placement.cut is Cut.COLUMNS else 0
    pieces = [shards[0].new_empty(piece.sizes(shape)) for piece in placement.pieces]
    for rank, shard in enumerate(shards):
        position = 0
        for number, start, stop in piece_ranges(placement, shape, len(shards), rank):
            pieces[number].narrow(dim, start, stop - start).copy_(shard.narrow(dim, position, stop - start))
            position += stop - start
    for piece, values in zip(placement.pieces, pieces, strict=True):
        yield piece.name, values


def save(
    chunks: Sequence[torch.nn.Module],
    shape: ModelShape,
    mesh: Mesh,
    folder: str | Path,
    *,
    description: str | Path,
    file_bytes: int = 4 * 2**30,
) -> None:
    """Writes a Hugging Face folder: weights from the model, everything else from `description`. All ranks call it.

    description: the model's folder without its weights (conf/compose/model_description.py). The written folder appears
    under its name only when it is complete, and replaces one that is there already.
    """
    gather_parameters(chunks)
    folder = Path(folder)
    partial = folder.with_name(folder.name + ".partial")
    dtype = next(bare(chunks[0]).parameters()).dtype
    files = _files(shape, mesh.layout, dtype, file_bytes)
    if mesh.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write_metadata(partial, Path(description), files, dtype)
    dist.barrier()
    if mesh.is_weight_replica_zero:
        _write_tensors(chunks, shape, mesh, partial, files)
    dist.barrier()
    if mesh.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    dist.barrier()


def _files(shape: ModelShape, layout: Layout, dtype: torch.dtype, file_bytes: int) -> dict[str, list[HfTensor]]:
    """Assigns the tensors to files. No file holds tensors of two stages, or exceeds `file_bytes` unless a single tensor does."""
    groups: list[list[HfTensor]] = []
    for stage in range(layout.pp):
        room = 0
        for tensor in hf_manifest(shape, layout, stage, dtype):
            size = tensor_bytes(tensor)
            if size > room or not groups:
                groups.append([])
                room = file_bytes
            groups[-1].append(tensor)
            room -= size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{n:05d}-of-{len(groups):05d}.safetensors": group for n, group in enumerate(groups, start=1)}


def tensor_bytes(tensor: HfTensor) -> int:
    """The bytes of its values."""
    return torch.Size(tensor.shape).numel() * tensor.dtype.itemsize


def _write_tensors(
    chunks: Sequence[torch.nn.Module], shape: ModelShape, mesh: Mesh, folder: Path, files: dict[str, list[HfTensor]]
) -> None:
    file_of = {tensor.name: name for name, tensors in files.items() for tensor in tensors}
    pending: dict[str, Tensor] = {}
    for name, values in hf_tensors(chunks, shape, mesh):
        if values is None:
            continue
        # On a CPU a tensor that was not gathered is the parameter itself, and safetensors refuses shared storage.
        pending[name] = values.detach().to("cpu").contiguous()
        file = file_of[name]
        if len(pending) == len(files[file]):
            save_file(pending, folder / file, metadata={"format": "pt"})
            pending = {}


def _write_metadata(folder: Path, description: Path, files: dict[str, list[HfTensor]], dtype: torch.dtype) -> None:
    """Writes the description, with the dtype of the weights in it, and the index if there is more than one weight file."""
    copy_description(description, folder)
    config = json.loads((folder / "config.json").read_text())
    config["dtype" if "dtype" in config else "torch_dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(tensor_bytes(t) for tensors in files.values() for t in tensors)},
            "weight_map": {tensor.name: file for file, tensors in files.items() for tensor in tensors},
        }
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
