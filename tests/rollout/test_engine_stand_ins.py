"""What the CPU stand-ins compute, against plain restatements of what SGLang asks of its kernels."""

import importlib.util
import os
import struct
import subprocess
import sys
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout.engine_process import CPU_STAND_INS


def load_sgl_kernel() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sgl_kernel", CPU_STAND_INS / "sgl_kernel" / "__init__.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sgl_kernel = load_sgl_kernel()
MASK = 0xFFFFFFFF


def murmur3(data: bytes) -> int:
    """MurmurHash3 x86 32, seed 0, of whole 4-byte blocks."""
    hashed = 0
    for (block,) in struct.iter_unpack("<I", data):
        block = block * 0xCC9E2D51 & MASK
        block = (block << 15 | block >> 17) & MASK
        hashed ^= block * 0x1B873593 & MASK
        hashed = (hashed << 13 | hashed >> 19) & MASK
        hashed = (hashed * 5 + 0xE6546B64) & MASK
    hashed ^= len(data)
    hashed = (hashed ^ hashed >> 16) * 0x85EBCA6B & MASK
    hashed = (hashed ^ hashed >> 13) * 0xC2B2AE35 & MASK
    return hashed ^ hashed >> 16


@given(
    st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**31 - 1)), min_size=1, max_size=4),
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4),
)
def test_the_hash_is_murmur3_of_seed_position_and_column(rows: list[tuple[int, int]], columns: list[int]) -> None:
    seeds, positions = zip(*rows, strict=True)
    hashed = torch.ops.sgl_kernel.murmur_hash32_cpu(torch.tensor(seeds), torch.tensor(positions), torch.tensor(columns))
    expected = [[murmur3(struct.pack("<QII", seed, at, column)) for column in columns] for seed, at in rows]
    assert hashed.tolist() == expected


def test_each_request_gets_its_slice_of_the_new_cache_locations() -> None:
    table = torch.zeros(3, 6, dtype=torch.int32)
    rows, starts, ends = torch.tensor([2, 0]), torch.tensor([1, 3]), torch.tensor([4, 5])
    sgl_kernel.assign_req_to_token_pool_cpu(rows, table, starts, ends, torch.tensor([10, 11, 12, 13, 14]), 6)
    assert table.tolist() == [[0, 0, 0, 13, 14, 0], [0] * 6, [0, 10, 11, 12, 0, 0]]


def test_cache_rows_move_in_every_layer_even_where_source_and_target_overlap() -> None:
    layers = [torch.arange(12.0).view(4, 3) + 100 * layer for layer in range(2)]
    expected = [layer.clone() for layer in layers]
    for layer in expected:
        layer[[1, 2]] = layer[[0, 1]]
    pointers = torch.tensor([layer.data_ptr() for layer in layers])
    strides = torch.tensor([12, 12])
    sgl_kernel.copy_all_layer_kv_cache_cpu(pointers, strides, torch.tensor([1, 2]), torch.tensor([0, 1]))
    assert all(torch.equal(found, wanted) for found, wanted in zip(layers, expected, strict=True))


def test_another_kernel_imports_but_does_not_run() -> None:
    with pytest.raises(NotImplementedError, match="rotate_input_ids_cpu"):
        sgl_kernel.rotate_input_ids_cpu()
    with pytest.raises(AttributeError):
        _ = sgl_kernel.silu_and_mul


def test_sglang_takes_its_plain_path_even_on_a_processor_with_amx() -> None:
    assert not hasattr(torch.ops.sgl_kernel, "convert_weight_packed")


@pytest.mark.slow
def test_sglang_itself_finds_no_amx_kernels() -> None:
    env = os.environ | {"PYTHONPATH": str(CPU_STAND_INS), "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    code = "from sglang.srt.utils.common import cpu_has_amx_support; print('amx', cpu_has_amx_support())"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=True)
    assert "amx False" in done.stdout
