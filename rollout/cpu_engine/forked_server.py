"""SGLang's own server, its child processes forked instead of spawned; runs in place of `-m sglang.launch_server` on CPU.

Cause: scheduler and detokenizer are spawned, so each imports all of torch, transformers and SGLang again: three times 12 s of
one core before a server of a tiny model is up. Forked they start at once and share the server's memory. On a GPU that would
break (CUDA does not survive a fork); on CPU nothing is running yet when the server starts them.

Remove when: the server starts in a few seconds by itself.
"""

import multiprocessing
import runpy
import sys
from typing import Any


def keep_fork(_method: str | None, **_: Any) -> None:
    """Stands in for `multiprocessing.set_start_method`, which SGLang calls with "spawn"."""


if __name__ == "__main__":
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = keep_fork
    sys.argv[0] = "sglang"
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
