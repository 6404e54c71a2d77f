"""Weight groups in which no wait is without an end; for both sides of a push.

Cause (torch 2.14, SGLang 0.5.23): SGLang makes its side of a weight group with torch's limit of 30 minutes. With NCCL a broadcast
only enqueues a kernel, the first one makes the communicator without any limit, and `destroy_process_group` waits for the kernels.
So one engine that dies or refuses in a push would hold every other engine in its kernel, and all of them would be lost.

Here a weight group has a limit of its own. Waits block, so that they raise at the limit (by default a thread of torch would end
the process). The communicator is made without blocking, so that torch watches the limit, and a group is left by `abort`, which
ends its kernels. With gloo the limits are seen to work (tests/trainer/push). For NCCL all of this is read in torch's source and
tested with a model of NCCL (tests/trainer/push/nccl_model.py); it has not run on a GPU.

Remove when: SGLang takes a limit for a weight group, and leaves it by `abort`.
"""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

PREFIX = "push-"
"""The name of every weight group begins so."""

GLOO_CONNECTS_FOR = 5
"""gloo waits this many times a group's timeout for a peer to connect."""


def make_bounded(make: Callable[..., Any], *arguments: Any, limit_s: float, **options: Any) -> Any:
    """What `make`, torch's `_new_process_group_helper`, returns; no step of the group takes longer than the limit."""
    backend, limit = str(arguments[3]), timedelta(seconds=limit_s)
    options["timeout"] = limit / GLOO_CONNECTS_FOR if backend == "gloo" else limit
    if backend == "nccl":
        options["backend_options"] = nccl = dist.ProcessGroupNCCL.Options()
        nccl.config.blocking, nccl._timeout = 0, limit
    with _raising_waits():
        made = make(*arguments, **options)
    if backend in ("gloo", "nccl"):
        distributed_c10d._set_pg_timeout(limit, made[0])
    return made


@contextmanager
def _raising_waits() -> Iterator[None]:
    """torch reads this variable when it makes an NCCL group. Can be removed when a group can be created with blocking waits."""
    name = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def leave(group: dist.ProcessGroup, destroy: Callable[[dist.ProcessGroup], None] = dist.destroy_process_group) -> None:
    """Leaves a weight group at once, whatever its other members do."""
    if dist.get_backend(group) == "gloo":
        destroy(group)  # waits for nothing, and closes the connections
    else:
        distributed_c10d._abort_process_group(group)


def limit_weight_groups(limit_s: float) -> None:
    """Applies to the weight groups that SGLang makes and leaves in this process from now on."""
    make, destroy = distributed_c10d._new_process_group_helper, dist.destroy_process_group
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(math.ceil(limit_s)))

    def make_mended(*arguments: Any, **options: Any) -> Any:
        if str(options.get("group_name", "")).startswith(PREFIX):
            return make_bounded(make, *arguments, limit_s=limit_s, **options)
        return make(*arguments, **options)

    def destroy_mended(group: dist.ProcessGroup | None = None) -> None:
        if group is not None and str(group.group_name).startswith(PREFIX):
            leave(group, destroy)
        else:
            destroy(group)

    distributed_c10d._new_process_group_helper = make_mended
    dist.destroy_process_group = destroy_mended
