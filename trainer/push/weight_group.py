"""The collective group over which a trainer rank sends weights to engines, and the checksums that prove their arrival.

A weight group is separate from the trainer's own groups: its rank 0 is one trainer rank, and the other ranks are engine
ranks, which join when asked over HTTP (`EngineClient.init_push_group`). It must match what SGLang makes on its side: a
TCP store on rank 0, a prefix named after the group, and torch's own helper. Joining blocks until all ranks have come, so
ask the engines first.

A bucket is the bytes of some tensors, one after the other, in one uint8 array, which rank 0 broadcasts.

The weights of an engine are compared through checksums: `expected_checksums` computes from Hugging Face tensors what
`EngineClient.checksum` must answer, on CPU and on GPU, for families whose layers SGLang fuses according to `FUSED`.
"""

import hashlib
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Backend, _new_process_group_helper, _set_pg_timeout, _world

from rollout.patched.tcp_store import listen
from rollout.patched.weight_groups import leave, make_bounded

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""SGLang's fused parameters and their parts, in the order of the rows."""

SPLIT_BY_COLUMNS = ("o_proj", "down_proj")
SPLIT_BY_VOCABULARY = ("embed_tokens", "lm_head")
VOCABULARY_MULTIPLE = 64

T = TypeVar("T")
_MASK32 = (1 << 32) - 1
_MASK64 = (1 << 64) - 1


class WeightGroupError(RuntimeError):
    """A weight group that could not be made, or a broadcast that failed."""


def within(call: Callable[[], T], timeout_s: float, device: torch.device | None = None) -> T:
    """The result of `call`. Raises WeightGroupError if there is none in time; the thread that runs it is then left behind.

    Neither torch nor NCCL bounds every step of joining a group: NCCL's first broadcast waits for all ranks.
    """
    outcome: queue.SimpleQueue[tuple[list[T], Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        if device is not None and device.type == "cuda":
            torch.cuda.set_device(device)  # each thread has a current device of its own
        try:
            outcome.put(([call()], None))
        except (RuntimeError, ValueError) as error:  # all that torch raises here
            outcome.put(([], error))

    threading.Thread(target=run, name="weight group", daemon=True).start()
    try:
        result, failure = outcome.get(timeout=timeout_s)
    except queue.Empty:
        raise WeightGroupError(f"it did not end within {timeout_s:.1f} s") from None
    if failure is None:
        return result[0]
    try:
        raise failure
    finally:
        del failure  # a frame that holds its own exception is never freed, nor is the group: its engines would wait for it


def join(
    master_address: str,
    master_port: int,
    *,
    rank: int,
    world_size: int,
    group_name: str,
    timeout_s: float,
    backend: str = "gloo",
) -> dist.ProcessGroup:
    """Joins the group, which rank 0 hosts; returns when all ranks have joined. `timeout_s` holds for its broadcasts too.

    The name must be new in this process, and the same on all ranks.
    """
    ends_s, timeout = time.monotonic() + timeout_s, timedelta(seconds=timeout_s)
    try:
        # Not through torch's rendezvous: under torchrun that would look for the store of torchrun's own agent.
        listener = listen(master_address, master_port) if rank == 0 else None
        store = dist.TCPStore(
            master_address, master_port, world_size, is_master=rank == 0, timeout=timeout, master_listen_fd=listener
        )
        left_s = max(ends_s - time.monotonic(), 1.0)
        with _independent():
            group, _ = make_bounded(
                _new_process_group_helper,
                world_size,
                rank,
                [],
                Backend(backend),
                dist.PrefixStore(group_name, store),
                group_name=group_name,
                limit_s=left_s,
            )
    except (RuntimeError, ValueError) as error:
        where = f"{group_name!r} at {master_address}:{master_port}"
        raise WeightGroupError(f"rank {rank} of {world_size} cannot join weight group {where}: {error}") from error
    _world.pg_group_ranks[group] = {index: index for index in range(world_size)}
    return cast(dist.ProcessGroup, group)


@contextmanager
def _independent() -> Iterator[None]:
    """Within it torch makes an NCCL group that is independent of the trainer's groups.

    If the default group is bound to a device, torch (2.13) makes every later group by splitting it, which needs a call from all
    ranks of the trainer. Only the source calls, so its first broadcast would wait forever. Can be removed when splitting is
    optional.
    """
    default = dist.group.WORLD
    device = default.bound_device_id if default is not None else None
    if default is not None:
        default.bound_device_id = None
    try:
        yield
    finally:
        if default is not None:
            default.bound_device_id = device


def limit(group: dist.ProcessGroup, timeout_s: float) -> None:
    """Sets the timeout of the broadcasts that begin from now on."""
    _set_pg_timeout(timedelta(seconds=max(timeout_s, 1.0)), group)


def destroy(group: dist.ProcessGroup) -> None:
    """Leaves the group, whether the other members are alive or not; its name and port are free again."""
    leave(group)


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of the tensors as one uint8 array. Wider types must come first: the engine refuses an unaligned tensor."""
    offset = 0
    for tensor in tensors:
        if offset % tensor.dtype.itemsize:
            raise ValueError(f"a {tensor.dtype} tensor at byte {offset} of its bucket: put wider types first")
        offset += tensor.numel() * tensor.dtype.itemsize
    return torch.cat([tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors])


def broadcast(bucket: Tensor, group: dist.ProcessGroup) -> None:
    """Sends `bucket` from rank 0, or receives into `bucket` on the other ranks. Blocks, up to the timeout of the group."""
    try:
        dist.broadcast(bucket, group_src=0, group=group)
    except RuntimeError as error:
        raise WeightGroupError(f"broadcast of {bucket.numel()} bytes failed: {error}") from error


def dtype_name(dtype: torch.dtype) -> str:
    """The name that the engines expect, such as `float32`."""
    return str(dtype).removeprefix("torch.")


def expected_checksums(
    tensors: Iterable[tuple[str, Tensor]],
    *,
    tp: int = 1,
    kv_heads: int | None = None,
    engine_device: Literal["cpu", "cuda"] = "cpu",
) -> list[dict[str, str]]:
    """The answer of `EngineClient.checksum`, rank by rank, when the engine holds exactly these Hugging Face tensors.

    Tensors must have the engine's dtype. For a tied model leave out `lm_head.weight`. The parts of a fused parameter need not
    be adjacent, but all of them must come. Each stage of a pipeline may compute its own dicts, to be merged afterwards.
    `kv_heads`, the number in the whole model, is needed if `tp` exceeds it.

    Does not hold for an engine on CPU with tp > 1 whose MLP width is not a multiple of 32 * tp, because SGLang pads it.
    """
    checksum = sha256_checksum if engine_device == "cpu" else cuda_checksum
    ranks: list[dict[str, str]] = [{} for _ in range(tp)]
    for name, parts in _fuse(tensors):
        shards = [_shards(part_name, part, tp, kv_heads) for part_name, part in parts]
        for rank, checksums in enumerate(ranks):
            checksums[name] = checksum(torch.cat([shard[rank] for shard in shards]))
    return ranks


def _fuse(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, list[tuple[str, Tensor]]]]:
    """Yields each engine parameter with its parts, as soon as all of them have come."""
    waiting: dict[str, dict[str, Tensor]] = {}
    fused_of = {part: fused for fused, parts in FUSED.items() for part in parts}
    for name, tensor in tensors:
        prefix, _, kind = name.rpartition(".")  # model.layers.0.self_attn.q_proj, weight
        module = prefix.rpartition(".")[2]
        if module not in fused_of:
            yield name, [(module, tensor)]
            continue
        fused = fused_of[module]
        target = f"{prefix.removesuffix(module)}{fused}.{kind}"
        waiting.setdefault(target, {})[module] = tensor
        if len(waiting[target]) == len(FUSED[fused]):
            parts = waiting.pop(target)
            yield target, [(part, parts[part]) for part in FUSED[fused]]
    if waiting:
        missing = {target: sorted(set(FUSED[target.split(".")[-2]]) - set(parts)) for target, parts in waiting.items()}
        raise ValueError(f"fused parameters lack parts: {missing}")


def _shards(module: str, tensor: Tensor, tp: int, kv_heads: int | None) -> Sequence[Tensor]:
    """The part of one Hugging Face tensor that each tensor-parallel rank of an engine holds."""
    if module in SPLIT_BY_VOCABULARY:
        multiple = math.lcm(VOCABULARY_MULTIPLE, tp)
        padding = -len(tensor) % multiple
        tensor = torch.cat([tensor, tensor.new_zeros(padding, *tensor.shape[1:])])
        return tensor.chunk(tp)
    if module in SPLIT_BY_COLUMNS:
        return [tensor] * tp if tensor.dim() == 1 else tensor.chunk(tp, dim=1)
    if module in ("k_proj", "v_proj") and kv_heads is not None and kv_heads < tp:
        return [head for head in tensor.chunk(kv_heads) for _ in range(tp // kv_heads)]
    if any(module in parts for parts in FUSED.values()):
        return tensor.chunk(tp)
    return [tensor] * tp


def sha256_checksum(tensor: Tensor) -> str:
    """SGLang's checksum of a parameter in CPU memory."""
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().data).digest()[:8].hex()


def cuda_checksum(tensor: Tensor, *, tiles_at_once: int = 512) -> str:
    """SGLang's checksum of a parameter in GPU memory, in plain torch on the tensor's own device.

    Every 32-bit word is hashed with its position. A tile of words adds up to two 32-bit sums, and the tiles to one 64-bit sum.
    Products may overflow int64, but only the low bits are kept, and these stay right.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if padding := -len(data) % 4:
        data = torch.cat([data, data.new_zeros(padding)])
    words = data.view(torch.int32)
    tile_words = 8192
    seed = 0x243F6A88
    keys = ((seed, 0x27D4EB2D, 15), ((seed * 0x9E3779B1 ^ 0xDEADBEEF) & _MASK32, 0x165667B1, 13))
    total = 0
    for start in range(0, len(words), tile_words * tiles_at_once):
        chunk = words[start : start + tile_words * tiles_at_once].long() & _MASK32
        at = torch.arange(start, start + len(chunk), device=chunk.device) & _MASK32
        sums = []
        for key, factor, turn in keys:
            place = ((at * factor + key) & _MASK32) ^ (((at << turn) | (at >> (32 - turn))) & _MASK32)
            hashed = torch.nn.functional.pad(_fmix32(chunk ^ place), (0, -len(chunk) % tile_words))
            sums.append(_fmix32((hashed.view(-1, tile_words).sum(1) ^ (4 * len(words))) & _MASK32))
        total += int(((sums[0] << 32) | sums[1]).sum().item())
    return f"{_splitmix64(total & _MASK64):016x}" if len(words) else f"{0:016x}"


def _fmix32(x: Tensor) -> Tensor:
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK32
    return x ^ (x >> 16)


def _splitmix64(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)
