"""Runs a command that cannot outlive its parent.

    guard.py COMMAND [ARGUMENT …]           becomes the command
    guard.py --group COMMAND [ARGUMENT …]   stays, as the leader of a process group that ends as a whole

The kernel kills the command (SIGKILL) when the process that started the guard is gone, however it went, so that not
even a `kill -9` of the launcher or of torchrun leaves anything behind. The wish survives exec, so the command needs no
thread or wrapper of its own. For a command whose children have no such wish, as SGLang's, there is `--group`: when the
command ends, or the parent is gone, all of the group is killed.

A parent may die before the kernel knows the wish. So whoever starts a guard tells its own process id by KESTREL_PARENT,
and a guard with another parent ends. Torchrun cannot tell, so the guard does that for the command that it becomes.

The kernel ties the command to the *thread* that started it: start it from one that lives as long as the process.

SIGUSR1 means "save and end" and goes to every process of a trainer, torchrun's own among them. So it is held back from
the command and all its descendants; whoever wants to know looks for it among the pending signals.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

PR_SET_PDEATHSIG = 1
PARENT_VARIABLE = "KESTREL_PARENT"  # "" or unset: the parent cannot tell
GROUP = "--group"


def guarded(command: Sequence[str], *, python: str = sys.executable, group: bool = False) -> list[str]:
    """The command line of a guarded command. Isolated, since modules of this folder are named like Python's own."""
    return [python, "-I", "-S", os.path.abspath(__file__), *([GROUP] if group else []), *command]


def main() -> None:
    group = sys.argv[1:2] == [GROUP]
    if not (command := sys.argv[2 if group else 1 :]):
        sys.exit(f"usage: guard.py [{GROUP}] COMMAND [ARGUMENT …]")
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # were it ignored, it would not stay pending
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    parent = int(os.environ.get(PARENT_VARIABLE) or os.getppid())
    if group:
        parent = _lead_group(parent, command)
    _die_with(parent, signal.SIGKILL)
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"guard: cannot run {command[0]}: {error.strerror}")


def _die_with(parent: int, number: signal.Signals) -> None:
    """Has the kernel send this process a signal when its parent dies; ends it if that is dead already."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0):
            sys.exit(f"guard: prctl failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:
        sys.exit(f"guard: the parent is gone: it was process {parent} ({PARENT_VARIABLE}), and is {os.getppid()} now")


def _lead_group(parent: int, command: Sequence[str]) -> int:
    """Returns in a new process, which is to become the command, and there the id of this one."""
    if os.getpgid(0) != os.getpid():
        sys.exit("guard: start me as the leader of a process group: I end the whole group")
    signal.signal(signal.SIGTERM, _end_group)
    _die_with(parent, signal.SIGTERM)
    guard, child = os.getpid(), os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return guard
    _, status = os.waitpid(child, 0)
    print(f"{command[0]} ended with exit code {os.waitstatus_to_exitcode(status)}", flush=True)
    _end_group()


def _end_group(*_: object) -> NoReturn:
    os.killpg(0, signal.SIGKILL)
    raise AssertionError("unreachable: this process is in the group")


if __name__ == "__main__":
    main()
