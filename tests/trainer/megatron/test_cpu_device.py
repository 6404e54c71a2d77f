"""Megatron's requests for CUDA are answered by the CPU, and nothing else changes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: nothing is redirected")


@pytest.mark.parametrize("factory", ["zeros", "ones", "empty", "tensor", "arange"])
def test_a_tensor_asked_for_on_cuda_is_made_on_the_cpu(factory):
    made = getattr(torch, factory)(3, device="cuda")
    assert made.device.type == "cpu"


def test_other_devices_are_left_alone():
    assert torch.zeros(2, device="meta").device.type == "meta"
    assert torch.empty_like(torch.zeros(2, device="meta")).device.type == "meta"


def test_a_device_context_still_places_what_names_no_device():
    with torch.device("meta"):
        assert torch.zeros(2).device.type == "meta"
        assert torch.arange(2).device.type == "meta"


def test_pinned_memory_is_plain_memory():
    assert torch.empty(2, pin_memory=True).shape == (2,)


def test_moving_to_cuda_moves_nothing():
    tensor, module = torch.zeros(2), torch.nn.Linear(2, 2)
    assert tensor.cuda() is tensor
    assert module.cuda() is module


def test_only_the_optimizer_sees_cpu_tensors_named_as_cuda():
    tensor = torch.zeros(2)
    seen_by_optimizer = eval("tensor.type()", {"tensor": tensor, "__name__": "megatron.core.optimizer.clip_grads"})
    assert seen_by_optimizer == "torch.cuda.FloatTensor"
    assert tensor.type() == "torch.FloatTensor"
    assert tensor.type(torch.float64).dtype is torch.float64


def test_the_random_state_tracker_draws_from_its_own_state_and_puts_the_old_one_back():
    model_parallel_cuda_manual_seed(7, tp_rank=0, ep_rank=0, etp_rank=0, force_reset_rng=True)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with get_cuda_rng_tracker().fork():
        first = torch.rand(4)
    assert torch.equal(torch.get_rng_state(), before)
    with get_cuda_rng_tracker().fork():
        second = torch.rand(4)
    assert not torch.equal(first, second)
    model_parallel_cuda_manual_seed(7, tp_rank=0, ep_rank=0, etp_rank=0, force_reset_rng=True)
    with get_cuda_rng_tracker().fork():
        assert torch.equal(torch.rand(4), first)


def test_packages_of_gpus_are_not_used_where_they_are_installed(tmp_path: Path) -> None:
    """As on a login node: they are there, and importing them fails because there is no driver."""
    for package in ("transformer_engine", "apex", "flash_mla"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise OSError('libcuda.so.1: cannot open shared object file')")
    program = "import trainer.megatron.policy; from megatron.core.optimizer import Adam; print(Adam.__module__)"
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["torch.optim.adamw"]


def test_a_gpu_without_transformer_engine_is_refused_and_does_not_get_the_attention_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from conf.shapes import ModelError
    from trainer.megatron.model import has_transformer_engine

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ModelError, match="Transformer Engine is not installed"):
        has_transformer_engine()


@pytest.mark.slow
def test_importing_megatron_first_is_refused_because_it_would_half_work():
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "import megatron.core; import trainer"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 1
    assert "import trainer first" in ran.stderr
