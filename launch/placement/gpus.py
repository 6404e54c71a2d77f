"""Which GPUs this process may use."""

import os
from itertools import takewhile
from pathlib import Path


def cuda_devices(value: str) -> tuple[str, ...]:
    """The names in a value of CUDA_VISIBLE_DEVICES, up to the first that names no device, as CUDA reads it."""
    return tuple(takewhile(lambda name: name not in ("", "-1", "NoDevFiles"), (name.strip() for name in value.split(","))))


def gpus_found() -> int:
    visible = visible_gpus()
    return len(visible if visible is not None else list(Path("/proc/driver/nvidia/gpus").glob("*")))


def visible_gpus() -> tuple[str, ...] | None:
    """The names in CUDA_VISIBLE_DEVICES, if it was set to give this process a part of the machine; None if it is not set."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if value is None else cuda_devices(value)
