"""Child processes that do not outlive this one: each has a session of its own, and the guard ties it to this process."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress

from rollout.guard import PARENT_VARIABLE, guarded


def start_guarded(argv: Sequence[str], env: Mapping[str, str], output: int) -> subprocess.Popen[bytes]:
    """Starts a command whose output goes to the file descriptor `output`."""
    return subprocess.Popen(
        guarded(argv),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**os.environ, **env, PARENT_VARIABLE: str(os.getpid())},
        start_new_session=True,
    )


def kill_group(popen: subprocess.Popen[bytes]) -> None:
    """Kills a process that `start_guarded` started, with its children, and waits for it."""
    signal_group(popen.pid, signal.SIGKILL)
    popen.wait()


def signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
