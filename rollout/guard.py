"""Runs a command that cannot outlive its parent.

    guard.py COMMAND [ARGUMENT …]           becomes the command
    guard.py --group COMMAND [ARGUMENT …]   stays, as the leader of a process group that ends as a whole

The guard sets PR_SET_PDEATHSIG: the kernel then kills the command (SIGKILL) when the process that started the guard ends for
any reason. So even a `kill -9` of the launcher or of torchrun leaves no process behind. The setting survives exec, so the
command needs no thread or wrapper. The command's own children do not have it. For commands that have children, such as SGLang's
server, use `--group`: when the command ends or the parent is gone, the whole process group is killed.

The parent may die before PR_SET_PDEATHSIG is set. So the process that starts a guard passes its own process id in
KESTREL_PARENT, and a guard with another parent ends. Torchrun does not pass it, so the guard sets it for the command.

The kernel ties the command to the *thread* that started it, so start it from a thread that lives as long as the process.

SIGUSR1 means "save and end". It is sent to every process of a trainer, torchrun included, so it is blocked in the command and all
its descendants. A process that wants to save looks for it among its pending signals.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

PR_SET_PDEATHSIG = 1
PARENT_VARIABLE = "KESTREL_PARENT"  # "" or unset: the parent did not pass its process id
GROUP = "--group"


def guarded(command: Sequence[str], *, python: str = sys.executable, group: bool = False) -> list[str]:
    """The command line of a guarded command. Python is isolated: modules in this folder have names of its own library."""
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
    """Makes the kernel send this process a signal when its parent dies. Ends the process if the parent is dead already."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0):
            sys.exit(f"guard: prctl failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:
        sys.exit(f"guard: the parent is gone: it was process {parent} ({PARENT_VARIABLE}), and is {os.getppid()} now")


def _lead_group(parent: int, command: Sequence[str]) -> int:
    """Forks. The child returns with the id of this process, and becomes the command; this process waits and kills the group."""
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
