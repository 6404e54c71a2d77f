"""Runs a program that ends, with all its children, when the process that started it dies, kill -9 included.

    python -I -S die_with_parent.py PARENT_PID PROGRAM ARGUMENTS…

Start it as the leader of a process group. It waits for two things, the program's end and the parent's death, and then kills
the group: killing the program alone would leave those of its children that have not yet asked the kernel to die with it. If
the guard itself is killed, the kernel kills the program.

The kernel ties it to the *thread* that started it: start it from one that lives as long as the process.
"""

import ctypes
import os
import signal
import sys
from typing import NoReturn

PR_SET_PDEATHSIG = 1


def tell_when_parent_dies(parent: int, number: signal.Signals) -> None:
    """Has the kernel send this process the signal `number` when its parent dies, or sends it now if it is dead already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, number) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def end_group(*_: object) -> NoReturn:
    os.killpg(0, signal.SIGKILL)
    raise AssertionError("unreachable: this process is in the group")


def main() -> None:
    parent, program = int(sys.argv[1]), sys.argv[2:]
    if os.getpgid(0) != os.getpid():
        sys.exit("start me as the leader of a process group: I end the whole group")
    signal.signal(signal.SIGTERM, end_group)
    tell_when_parent_dies(parent, signal.SIGTERM)
    guard, child = os.getpid(), os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        tell_when_parent_dies(guard, signal.SIGKILL)
        os.execvp(program[0], program)
    _, status = os.waitpid(child, 0)
    print(f"{program[0]} ended with exit code {os.waitstatus_to_exitcode(status)}", flush=True)
    end_group()


if __name__ == "__main__":
    main()
