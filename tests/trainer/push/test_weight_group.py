"""Weight groups between real processes over gloo, and the checksums against a small model of what an engine does with a push."""

import contextlib
import gc
import hashlib
import multiprocessing
import os
import socket
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.ports import free_port
from trainer.push import weight_group

TIMEOUT_S = 30.0


def member(rank: int, world_size: int, ports: Sequence[int]) -> list[list[int]]:
    """Joins one group after the other, each named alike on all ranks, and returns what each broadcast brought."""
    torch.set_num_threads(1)
    got = []
    for index, port in enumerate(ports):
        group = weight_group.join("127.0.0.1", port, rank=rank, world_size=world_size, group_name="weights", timeout_s=TIMEOUT_S)
        bucket = torch.arange(8, dtype=torch.uint8) + 10 * index if rank == 0 else torch.zeros(8, dtype=torch.uint8)
        weight_group.broadcast(bucket, group)
        got.append(bucket.tolist())
        weight_group.destroy(group)
    return got


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessPoolExecutor]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # as under torchrun, which must not matter
    with ProcessPoolExecutor(3, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.mark.slow
def test_what_rank_0_sends_reaches_all_and_a_destroyed_groups_name_can_be_used_again(
    processes: ProcessPoolExecutor,
) -> None:
    ports = [free_port(), free_port()]
    calls = [processes.submit(member, rank, 3, ports) for rank in range(3)]
    expected = [list(range(8)), list(range(10, 18))]
    assert [call.result(timeout=120) for call in calls] == [expected] * 3


def test_a_trainer_bound_to_a_device_joins_a_group_that_is_no_part_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch goes by when it makes an NCCL group, on a machine without NCCL: no default group to split, waits that raise."""
    make, seen = weight_group._new_process_group_helper, []

    def recording(*arguments: Any, **options: Any) -> Any:
        seen.append((dist.group.WORLD.bound_device_id, os.environ.get("TORCH_NCCL_BLOCKING_WAIT")))
        return make(*arguments, **options)

    monkeypatch.setattr(weight_group, "_new_process_group_helper", recording)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    device = torch.device("cuda", 0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.group.WORLD.bound_device_id = device
        weight_group.join("127.0.0.1", free_port(), rank=0, world_size=1, group_name="apart", timeout_s=TIMEOUT_S)
        assert dist.group.WORLD.bound_device_id == device
    finally:
        dist.destroy_process_group()
    assert seen == [(None, "1")]
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ


def test_a_group_that_nobody_joins_is_an_error_within_its_timeout() -> None:
    with pytest.raises(weight_group.WeightGroupError, match="rank 0 of 2 cannot join weight group 'lonely'"):
        weight_group.join("127.0.0.1", free_port(), rank=0, world_size=2, group_name="lonely", timeout_s=1.0)


def test_group_of_a_call_that_failed_is_freed_at_once() -> None:
    """Only then are its connections closed, and the engines at their other ends stop waiting."""

    class Group:
        def broadcast(self) -> None:
            raise RuntimeError("connection closed by peer")

    def send(group: Group) -> None:
        with contextlib.suppress(RuntimeError):
            weight_group.within(group.broadcast, TIMEOUT_S)

    group = Group()
    freed = weakref.ref(group)
    gc.disable()
    try:
        send(group)
        del group
        assert freed() is None
    finally:
        gc.enable()


def test_a_port_in_use_is_an_error() -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(weight_group.WeightGroupError, match="in use"):
            weight_group.join("127.0.0.1", port, rank=0, world_size=2, group_name="x", timeout_s=1.0)


def test_a_bucket_is_the_tensors_bytes_in_order() -> None:
    tensors = [torch.randn(3, 2), torch.randn(4, 2).T, torch.arange(5, dtype=torch.bfloat16)]
    flat = weight_group.pack(tensors)
    parts = flat.split([24, 32, 10])
    assert torch.equal(parts[0].view(torch.float32).view(3, 2), tensors[0])
    assert torch.equal(parts[1].view(torch.float32).view(2, 4), tensors[1])
    assert torch.equal(parts[2].view(torch.bfloat16), tensors[2])


def test_a_tensor_out_of_alignment_is_refused() -> None:
    with pytest.raises(ValueError, match="put wider types first"):
        weight_group.pack([torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1)])


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).digest()[:8].hex()


def layer() -> dict[str, Tensor]:
    """Eight heads, two KV heads, head dimension 4, hidden size 6, vocabulary 70: Hugging Face's tensors."""
    torch.manual_seed(0)
    shapes = {
        "model.embed_tokens.weight": (70, 6),
        "model.layers.0.self_attn.q_proj.weight": (32, 6),
        "model.layers.0.self_attn.k_proj.weight": (8, 6),
        "model.layers.0.self_attn.v_proj.weight": (8, 6),
        "model.layers.0.self_attn.q_proj.bias": (32,),
        "model.layers.0.self_attn.k_proj.bias": (8,),
        "model.layers.0.self_attn.v_proj.bias": (8,),
        "model.layers.0.self_attn.o_proj.weight": (6, 32),
        "model.layers.0.mlp.gate_proj.weight": (12, 6),
        "model.layers.0.mlp.up_proj.weight": (12, 6),
        "model.layers.0.mlp.down_proj.weight": (6, 12),
        "model.norm.weight": (6,),
    }
    return {name: torch.randn(shape) for name, shape in shapes.items()}


LAYER = layer()


@given(st.permutations(sorted(LAYER)))
def test_checksums_do_not_depend_on_the_order_of_the_tensors(names: list[str]) -> None:
    found = weight_group.expected_checksums((name, LAYER[name]) for name in names)
    assert found == weight_group.expected_checksums(LAYER.items())


def test_a_fused_parameter_is_its_parts_one_after_the_other() -> None:
    (found,) = weight_group.expected_checksums(LAYER.items())
    q, k, v = (LAYER[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv")
    assert found["model.layers.0.self_attn.qkv_proj.weight"] == digest(torch.cat([q, k, v]))
    assert found["model.norm.weight"] == digest(LAYER["model.norm.weight"])
    assert len(found) == 7


def test_a_fused_parameter_without_one_of_its_parts_is_an_error() -> None:
    incomplete = [(name, tensor) for name, tensor in LAYER.items() if "up_proj" not in name]
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.gate_up_proj\.weight.*up_proj"):
        weight_group.expected_checksums(incomplete)


def test_each_rank_holds_its_heads_rows_columns_and_its_part_of_the_padded_vocabulary() -> None:
    ranks = weight_group.expected_checksums(LAYER.items(), tp=4, kv_heads=2)
    q, k, v = (LAYER[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv")
    embedding = torch.cat([LAYER["model.embed_tokens.weight"], torch.zeros(58, 6)])
    for rank, found in enumerate(ranks):
        kv = slice(4 * (rank // 2), 4 * (rank // 2) + 4)  # two ranks share a KV head
        qkv = torch.cat([q[8 * rank : 8 * rank + 8], k[kv], v[kv]])
        assert found["model.layers.0.self_attn.qkv_proj.weight"] == digest(qkv)
        columns = LAYER["model.layers.0.self_attn.o_proj.weight"][:, 8 * rank : 8 * rank + 8]
        assert found["model.layers.0.self_attn.o_proj.weight"] == digest(columns)
        assert found["model.embed_tokens.weight"] == digest(embedding[32 * rank : 32 * rank + 32])
        assert found["model.norm.weight"] == digest(LAYER["model.norm.weight"])


@pytest.mark.parametrize(
    ("size", "dtype", "checksum"),
    [
        (1, torch.float32, "0e050dc3519cf76f"),
        (7, torch.bfloat16, "66822581b9884c94"),
        (8192, torch.float32, "aae8fe9e5bf610bc"),
        (20001, torch.float32, "45a7957c95de6a67"),
    ],
)
def test_the_gpu_checksum_is_the_one_that_sglangs_kernel_gives(size: int, dtype: torch.dtype, checksum: str) -> None:
    """The values are what SGLang 0.5.23's Triton kernel gives, run by Triton's interpreter."""
    tensor = (torch.arange(size) % 251 - 125).to(dtype) / 8
    assert weight_group.cuda_checksum(tensor) == checksum
    assert weight_group.cuda_checksum(tensor, tiles_at_once=1) == checksum
