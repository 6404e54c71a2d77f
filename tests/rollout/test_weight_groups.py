"""What SGLang's own code for weight groups does in a process in which they are limited."""

import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from rollout.patched import weight_groups
from tests.ports import free_port

LIMIT_S = 2.0
CPU = torch.device("cpu")


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(distributed_c10d, "_new_process_group_helper", distributed_c10d._new_process_group_helper)
    monkeypatch.setattr(dist, "destroy_process_group", dist.destroy_process_group)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("TORCH_NCCL_NONBLOCKING_TIMEOUT", "1")  # so that it is put back
    weight_groups.limit_weight_groups(LIMIT_S)
    yield


def as_sglang_does(name: str, size: int) -> Any:
    """The end of SGLang's `init_custom_process_group`, in a world without the other ranks."""
    store = dist.TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
    group, _ = distributed_c10d._new_process_group_helper(
        size, 0, [], dist.Backend("gloo"), dist.PrefixStore(name, store),
        group_name=name, backend_options=None, timeout=timedelta(minutes=30), device_id=None,
    )  # fmt: skip
    distributed_c10d._world.pg_group_ranks[group] = {n: n for n in range(size)}
    return group


@pytest.mark.usefixtures("limited")
def test_an_engine_waits_for_the_members_of_a_weight_group_no_longer_than_the_limit() -> None:
    began_s = time.monotonic()
    with pytest.raises(RuntimeError):
        as_sglang_does("push-1-0-stage-0", 2)
    assert time.monotonic() - began_s < 4 * LIMIT_S


@pytest.mark.usefixtures("limited")
def test_only_weight_groups_are_limited() -> None:
    limits = {name: as_sglang_does(name, 1)._get_backend(CPU).options._timeout for name in ("push-1", "tp")}
    assert limits == {"push-1": timedelta(seconds=LIMIT_S), "tp": timedelta(minutes=30)}


@pytest.mark.usefixtures("limited")
def test_sglang_can_leave_a_weight_group_and_make_it_again() -> None:
    for _ in range(2):
        dist.destroy_process_group(as_sglang_does("push-again", 1))
