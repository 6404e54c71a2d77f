"""Child processes that do not outlive this one: each in a session of its own, tied to this process by the guard."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress

from rollout.guard import PARENT_VARIABLE, guarded


def start_guarded(argv: Sequence[str], env: Mapping[str, str], output: int) -> subprocess.Popen[bytes]:
    """Starts a command; `output` is the file descriptor that gets what it prints."""
    return subprocess.Popen(
        guarded(argv),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**os.environ, **env, PARENT_VARIABLE: str(os.getpid())},
        start_new_session=True,
    )


def end_group(popen: subprocess.Popen[bytes]) -> None:
    """Ends a process that `start_guarded` started, and what it started, at once."""
    signal_group(popen.pid, signal.SIGKILL)
    popen.wait()


def signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
