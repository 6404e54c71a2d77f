"""Which GPUs this process may use."""

import os
from itertools import takewhile
from pathlib import Path


def cuda_devices(said: str) -> tuple[str, ...]:
    """The names in a CUDA_VISIBLE_DEVICES, up to the first that is none, as CUDA reads it."""
    return tuple(takewhile(lambda name: name not in ("", "-1", "NoDevFiles"), (name.strip() for name in said.split(","))))


def gpus_found() -> int:
    visible = visible_gpus()
    return len(visible if visible is not None else list(Path("/proc/driver/nvidia/gpus").glob("*")))


def visible_gpus() -> tuple[str, ...] | None:
    """The names in CUDA_VISIBLE_DEVICES, by which whoever started this gave it a share of the machine; None: no word of it."""
    said = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if said is None else cuda_devices(said)
