"""Runs a command that cannot outlive its parent.

    python launch/guard.py COMMAND [ARGUMENT …]

The kernel kills the command (SIGKILL) when the process that started the guard is gone, however it went, so that not
even a `kill -9` of the launcher or of torchrun leaves anything behind. The wish survives exec, so the command needs no
thread or wrapper of its own. With KESTREL_PARENT set, the guard also notices a parent that died before the wish.

SIGUSR1 means "save and end" and goes to every process of a trainer, torchrun's own among them. So it is held back from
the command and all its descendants; whoever wants to know looks for it among the pending signals.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
PARENT_VARIABLE = "KESTREL_PARENT"


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("usage: guard.py COMMAND [ARGUMENT …]")
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
            sys.exit(f"guard: prctl failed: {os.strerror(ctypes.get_errno())}")
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # were it ignored, it would not stay pending
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    # Popped: the command's own children have other parents.
    if (parent := os.environ.pop(PARENT_VARIABLE, "")) and int(parent) != os.getppid():
        sys.exit("guard: the parent is gone")
    try:
        os.execvp(sys.argv[1], sys.argv[1:])
    except OSError as error:
        sys.exit(f"guard: cannot run {sys.argv[1]}: {error.strerror}")


if __name__ == "__main__":
    main()
