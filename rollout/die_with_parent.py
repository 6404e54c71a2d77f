"""Becomes another program that the kernel kills when the starting process dies, kill -9 included.

    python -I -S die_with_parent.py PARENT_PID PROGRAM ARGUMENTS…

The kernel ties the child to the *thread* that started it: start it from one that lives as long as the process. It is a
program of its own, and not a hook between fork and exec, because Python may not run there once there are threads.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, program = int(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before the line above
        sys.exit("the starting process is gone")
    os.execvp(program[0], program)


if __name__ == "__main__":
    main()
