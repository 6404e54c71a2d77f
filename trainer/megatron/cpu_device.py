"""Lets megatron-core 0.16.1 run on a machine without a GPU.

`install` does nothing where a GPU is present, so that GPUs run an unchanged Megatron. Elsewhere it redirects device
placement and random-number state from "cuda" to the CPU; it replaces no arithmetic of Megatron. Each item names its
cause, and when it can be removed.
"""

import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._device import _device_constructors

CPU = torch.device("cpu")
_META = torch.device("meta")
_OF_GPUS = ("transformer_engine", "apex", "flash_mla")
_FACTORIES = ("arange", "empty", "empty_like", "full", "ones", "rand", "randn", "tensor", "zeros", "zeros_like")
_installed = False
_placed = CPU  # the device on which Megatron creates its tensors


def install() -> None:
    """Redirects what megatron-core assumes about CUDA. Must be called before the first import of megatron."""
    global _installed
    if _installed or torch.cuda.is_available():
        return
    if any(name.startswith("megatron.core") for name in sys.modules):
        raise RuntimeError("megatron.core was imported before trainer.megatron.cpu_device.install(); import trainer first")
    _without_packages_of_gpus()
    _without_compilation()
    # The missing packages belong to GPUs, and Megatron warns once per module. `full scope` is a default of Megatron itself.
    warnings.filterwarnings("ignore", message=r"(Transformer Engine and )?Apex (is|are) not installed|full scope is deprecated")
    _redirect_placement()
    _redirect_random_state()
    _name_cpu_tensors_as_cuda()
    _installed = True


@contextmanager
def on_meta() -> Iterator[None]:
    """Within it Megatron's tensors have shapes but no memory, so that one rank's share of any model can be built and examined."""
    global _placed
    if not _installed:
        raise RuntimeError("a GPU is present, and Megatron would allocate on it: set CUDA_VISIBLE_DEVICES= (empty)")
    _placed = _META
    try:
        with _META:
            yield
    finally:
        _placed = CPU


def _replace(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)


def _without_packages_of_gpus() -> None:
    # Where these are installed Megatron imports them: its optimizer then takes fused CUDA kernels on the CPU too, and flash_mla,
    # which SGLang brings, raises OSError without a driver, where Megatron expects ImportError. A login node has no driver.
    # Can be removed when Megatron chooses its kernels by the device of the parameters, and catches any failure of an import.
    for name in _OF_GPUS:
        sys.modules[name] = None  # type: ignore[assignment]  # importing it raises ImportError


def _without_compilation() -> None:
    # Megatron decorates small functions with torch.compile; on a CPU each would start a C++ compiler at first use.
    # Can be removed when jit_fuser can be switched off by configuration.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].config.disable = True


def _redirect_placement() -> None:
    # Gradient buffers, rotary embedding, pipeline communication, tensor-parallel layers and the distributed optimizer
    # place tensors on torch.cuda.current_device(). Can be removed when they use the device of the model's parameters.
    _replace(torch.cuda, "current_device", lambda: _placed)
    # Pipeline communication and the checkpoint writer wait for the device; on a CPU there is nothing to wait for.
    _replace(torch.cuda, "synchronize", lambda device=None: None)
    # Token counts in the schedules, norms in the optimizer and in clipping, and tensors exchanged while loading ask for "cuda".
    # `with torch.device(...)` recognises the factories by identity and collects them once, so it must collect the real ones.
    _device_constructors()
    for name in _FACTORIES:
        _replace(torch, name, _on_cpu(getattr(torch, name)))
    # The tied embedding and the distributed optimizer call .cuda() on tensors that are already on the right device.
    for kind in (torch.Tensor, torch.nn.Module):
        _replace(kind, "cuda", lambda self, *args, **kwargs: self)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def placed(*args: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs and str(kwargs["device"]).startswith("cuda"):
            kwargs["device"] = _placed
        # Page-locked memory needs a GPU driver.
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return placed


class _CpuGenerators:
    """Replaces torch.cuda.default_generators: the CPU generator under every index."""

    def __getitem__(self, index: Any) -> torch.Generator:
        return torch.default_generator


def _redirect_random_state() -> None:
    # megatron.core.tensor_parallel.random keeps one state per parallel group, reads and writes it through torch.cuda, and
    # queues writes until CUDA is initialised, which never happens here. Can be removed when the tracker takes a generator.
    for module in (torch.cuda, torch.cuda.random):
        _replace(module, "get_rng_state", lambda device=None: torch.get_rng_state())
        _replace(module, "set_rng_state", lambda state, device=None: torch.set_rng_state(state))
        _replace(module, "manual_seed", lambda seed: torch.manual_seed(seed))
    _replace(torch.cuda, "default_generators", _CpuGenerators())
    _replace(torch.cuda, "_lazy_call", lambda call, **kwargs: call())
    _replace(torch.cuda, "_lazy_init", lambda: None)


def _name_cpu_tensors_as_cuda() -> None:
    # The optimizer sorts parameters by comparing Tensor.type() with names such as "torch.cuda.FloatTensor". Only its
    # modules see the CUDA name. Can be removed when they compare dtypes.
    plain = torch.Tensor.type

    @functools.wraps(plain)
    def named(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = plain(self, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if isinstance(result, str) and caller.startswith("megatron.core.optimizer"):
            return result.replace("torch.meta.", "torch.").replace("torch.", "torch.cuda.", 1)
        return result

    _replace(torch.Tensor, "type", named)
