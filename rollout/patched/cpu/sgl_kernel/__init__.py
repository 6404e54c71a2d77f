"""Stand-in for SGLang's compiled kernels, on the engine's PYTHONPATH only when the engine runs on CPU.

Cause: SGLang imports `sgl_kernel` on every device, but the wheel on PyPI holds CUDA builds only; without it the
server does not start on a CPU. The model itself needs none of the kernels: SGLang computes each layer in plain torch
as long as `torch.ops.sgl_kernel.convert_weight_packed` does not exist, so that op must never be registered here, AMX
or not.

What is real: the few calls that the scheduler makes on CPU. Any other `*_cpu` name imports, and raises when called.

Remove when: PyPI's `sgl-kernel` carries a CPU build for the pinned SGLang version.
"""

import ctypes
from collections.abc import Callable
from typing import NoReturn

import torch

__version__ = "0.0.0+cpu.standin"

_MASK = 0xFFFFFFFF


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if not name.endswith("_cpu"):
        raise AttributeError(f"the CPU stand-in of sgl_kernel has no {name!r}")

    def missing(*_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is not in the CPU stand-in: start the engine without what needs it")

    return missing


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Writes each request's next run of `out_cache_loc` into its row of `req_to_token`, at [start, end)."""
    taken = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        req_to_token[row, start:end] = out_cache_loc[taken : taken + end - start].to(req_to_token.dtype)
        taken += end - start


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Moves KV rows in every layer's buffer, by address. All sources are read first, since the two sets may overlap."""
    targets, sources = tgt_loc.tolist(), src_loc.tolist()
    for base, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(base + source * stride, stride) for source in sources]
        for target, row in zip(targets, rows, strict=True):
            ctypes.memmove(base + target * stride, row, stride)


def _rotate_left(value: torch.Tensor, bits: int) -> torch.Tensor:
    return ((value << bits) | (value >> (32 - bits))) & _MASK


def _times(value: torch.Tensor, factor: int) -> torch.Tensor:
    """Product modulo 2**32 in int64, by halves: the whole product would overflow."""
    low, high = value & 0xFFFF, value >> 16
    return (low * factor + (((high * factor) & 0xFFFF) << 16)) & _MASK


def _mix(hashed: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    block = _times(_rotate_left(_times(block & _MASK, 0xCC9E2D51), 15), 0x1B873593)
    return (_times(_rotate_left(hashed ^ block, 13), 5) + 0xE6546B64) & _MASK


def _murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 (32 bit) of the 16 bytes (seed low, seed high, position, column), as a [rows, columns] table."""
    seed, positions = seed.long()[:, None], positions.long()[:, None]
    hashed = torch.zeros_like(seed)
    for block in (seed, seed >> 32, positions, col_indices.long()[None, :]):
        hashed = _mix(hashed, block)
    hashed = hashed ^ 16
    hashed = _times(hashed ^ (hashed >> 16), 0x85EBCA6B)
    hashed = _times(hashed ^ (hashed >> 13), 0xC2B2AE35)
    return (hashed ^ (hashed >> 16)).to(torch.uint32)


_library = torch.library.Library("sgl_kernel", "DEF")
_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
_library.impl("murmur_hash32_cpu", _murmur_hash32, "CPU")
