"""Hugging Face weights in and out.

`load` reads safetensors shard-wise: each rank reads its own slices, and no rank ever holds the model. `hf_tensors` is
the way out, for pushing and for saving: tensor by tensor, gathered over the tensor-parallel group of each stage;
`hf_manifest` is the list of what it will yield, known to every rank without communication. `save` writes a folder that
transformers and SGLang load. All go by the tables in `families`.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from conf.shapes import Layout, ModelError, ModelShape
from trainer.megatron.families import Cut, Placement, placements, segments
from trainer.megatron.model import bare, gather_parameters, parameter_of
from trainer.process_groups import Mesh

_INDEX = "model.safetensors.index.json"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")


class HfTensor(NamedTuple):
    """What a Hugging Face tensor is, without its values."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def load(chunks: Sequence[torch.nn.Module], shape: ModelShape, mesh: Mesh, folder: str | Path) -> None:
    """Fills every parameter of this rank from the folder, converting to the parameters' dtype."""
    with ExitStack() as stack:
        files = _open_tensors(Path(folder), stack)
        filled = set()
        for placement in placements(shape, mesh.layout, mesh.stage):
            parameter = parameter_of(chunks, placement)
            _fill(parameter.data, placement, shape, mesh, files)
            filled.add(parameter)
    left = [name for chunk in chunks for name, parameter in bare(chunk).named_parameters() if parameter not in filled]
    if left:
        raise ModelError(f"no entry of the {shape.architecture} table fills {', '.join(left)}")


def _open_tensors(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Maps each tensor's name to the open file that holds it."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ModelError(f"no *.safetensors files in {folder}; convert the model's weights to safetensors first")
    files: dict[str, Any] = {}
    for path in paths:
        try:
            opened = stack.enter_context(safe_open(path, framework="pt"))
        except SafetensorError as error:
            raise ModelError(f"{path} cannot be read as safetensors: {error}") from error
        files.update(dict.fromkeys(opened.keys(), opened))
    return files


def _fill(target: Tensor, placement: Placement, shape: ModelShape, mesh: Mesh, files: dict[str, Any]) -> None:
    """Copies this rank's segments of the pieces into `target`, and zeros into padding behind them."""
    dim = 1 if placement.cut is Cut.COLUMNS else 0
    slices = [_slice(piece.name, piece.sizes(shape), files) for piece in placement.pieces]
    position = 0
    for piece, start, stop in segments(placement, shape, mesh.layout.tp, mesh.tp_rank):
        part = slices[piece][start:stop] if dim == 0 else slices[piece][:, start:stop]
        target.narrow(dim, position, stop - start).copy_(part)
        position += stop - start
    target.narrow(dim, position, target.size(dim) - position).zero_()


def _slice(name: str, shape: tuple[int, ...], files: dict[str, Any]) -> Any:
    if name not in files:
        raise ModelError(f"the model's folder lacks the tensor {name!r}")
    found = files[name].get_slice(name)
    if tuple(found.get_shape()) != shape:
        raise ModelError(f"{name!r} has shape {tuple(found.get_shape())}, but config.json makes it {shape}")
    return found


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

    All tensor-parallel ranks of the stage with data-parallel rank 0 iterate in lock-step; only the weight source gets
    values, the others get None. A tied embedding is yielded once, by the first stage. After training with overlapped
    gathers call `model.gather_parameters` on every rank first.
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
        for number, start, stop in segments(placement, shape, len(shards), rank):
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
    source_folder: str | Path,
    file_bytes: int = 4 * 2**30,
) -> None:
    """Writes a Hugging Face folder: weights from the model, everything else from `source_folder`. All ranks call it.

    The folder appears under its name only when it is complete; one that is there already is replaced.
    """
    gather_parameters(chunks)
    folder = Path(folder)
    partial = folder.with_name(folder.name + ".partial")
    dtype = next(bare(chunks[0]).parameters()).dtype
    files = _files(shape, mesh.layout, dtype, file_bytes)
    if mesh.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write_metadata(partial, Path(source_folder), files, dtype)
    dist.barrier()
    if mesh.is_weight_replica_zero:
        _write_tensors(chunks, shape, mesh, partial, files)
    dist.barrier()
    if mesh.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    dist.barrier()


def _files(shape: ModelShape, layout: Layout, dtype: torch.dtype, file_bytes: int) -> dict[str, list[HfTensor]]:
    """Which tensors go into which file: no file mixes stages, none is larger than `file_bytes` unless one tensor is."""
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
    """Bytes of the values."""
    return torch.Size(tensor.shape).numel() * tensor.dtype.itemsize


def _write_tensors(
    chunks: Sequence[torch.nn.Module], shape: ModelShape, mesh: Mesh, folder: Path, files: dict[str, list[HfTensor]]
) -> None:
    file_of = {tensor.name: name for name, tensors in files.items() for tensor in tensors}
    pending: dict[str, Tensor] = {}
    for name, values in hf_tensors(chunks, shape, mesh):
        if values is None:
            continue
        # On a CPU a tensor that was not gathered is the parameter itself, and safetensors wants no shared storage.
        pending[name] = values.detach().to("cpu").contiguous()
        file = file_of[name]
        if len(pending) == len(files[file]):
            save_file(pending, folder / file, metadata={"format": "pt"})
            pending = {}


def _write_metadata(folder: Path, source: Path, files: dict[str, list[HfTensor]], dtype: torch.dtype) -> None:
    """Configuration and tokenizer from the source, the dtype of the weights, and the index of more than one file."""
    for path in source.iterdir():
        if path.is_file() and path.suffix not in _WEIGHT_SUFFIXES and not path.name.endswith(".index.json"):
            shutil.copy(path, folder / path.name)
    config = json.loads((source / "config.json").read_text())
    config["dtype" if "dtype" in config else "torch_dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(tensor_bytes(t) for tensors in files.values() for t in tensors)},
            "weight_map": {tensor.name: file for file, tensors in files.items() for tensor in tensors},
        }
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
