"""SGLang's own server with fixes; runs in place of `-m sglang.launch_server`.

Its stores listen at its host only (tcp_store.py), its weight groups have a limit (weight_groups.py), and on CPU it forks. SGLang
spawns its child processes, and a spawned process imports this module too, so all of them are mended.

Cause of the fork: each spawned process imports torch, transformers and SGLang again: three times 12 s of one core before the
server of a tiny model is up. Forked processes start at once and share the server's memory. On a GPU that would break, since CUDA
does not survive a fork; on CPU nothing is running yet when the server starts them.

Remove the fork when: the server starts in a few seconds by itself.
"""

import multiprocessing
import os
import runpy
import sys
from typing import Any

from rollout.patched.tcp_store import listen_at_the_host_only
from rollout.patched.weight_groups import limit_weight_groups

# Both are set by rollout/engine_process.py.
ON_CPU = "SGLANG_USE_CPU_ENGINE"
WEIGHT_GROUP_S = "KESTREL_WEIGHT_GROUP_S"

listen_at_the_host_only()
if limit_s := os.environ.get(WEIGHT_GROUP_S):
    limit_weight_groups(float(limit_s))


def keep_fork(_method: str | None, **_: Any) -> None:
    """Stands in for `multiprocessing.set_start_method`, which SGLang calls with "spawn"."""


if __name__ == "__main__":
    if os.environ.get(ON_CPU):
        multiprocessing.set_start_method("fork")
        multiprocessing.set_start_method = keep_fork  # type: ignore[assignment]  # its own sets nothing
    sys.argv[0] = "sglang"
    runpy.run_module("sglang.launch_server", run_name="__main__")
