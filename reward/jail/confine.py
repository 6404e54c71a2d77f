"""What confines a job: its files, namespaces, rlimits, a user id of its own, no capabilities, few system calls.

All of it is computed before the fork as a list of system calls (`Steps`), which are made after the fork. Every page that a child
writes to is copied, so ordinary Python code would cost the child several times as much.
"""

import ctypes
import math
import os
import platform
import resource
import struct
from collections.abc import Sequence

from reward.jail import harness, linux, seccomp
from reward.jail.limits import Limits

FILES = 4096  # in a job's /tmp
JOB_FDS = (0, 1, harness.CHANNEL_FD, harness.LINK_FD)  # stdin, stdout, channel, and for some a link to another job
OPEN_MAX = os.sysconf("SC_OPEN_MAX")
FOLDER_FLAGS = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
SAME_FOR_ALL = {
    resource.RLIMIT_NOFILE: 256,
    resource.RLIMIT_CORE: 0,
    resource.RLIMIT_MEMLOCK: 0,
    resource.RLIMIT_MSGQUEUE: 0,
    resource.RLIMIT_SIGPENDING: 256,
}
STACK_BYTES = 120 << 20  # the main thread's stack; programs for contests may ask for more
STACK_ROOM_BYTES = 1 << 30
"""Address space beyond the memory limit, because a thread reserves the whole stack that it asks for and uses little of it. The
judge holds a job to the memory that it uses (`reward.sandbox.job`); this bounds it until the judge looks."""
_NUMBERS = seccomp.numbers(platform.machine())
_syscall = linux.libc.syscall
_CAPABILITY_HEADER = struct.pack("=Ii", linux.CAPABILITY_VERSION_3, 0)


class Steps:
    """System calls to be made one after another."""

    def __init__(self) -> None:
        self._calls: list[tuple[ctypes.c_long, ...]] = []
        self._names: list[str] = []
        self._kept: list[object] = []  # what the kernel will read

    def add(self, name: str, *arguments: int | bytes | seccomp.Filter) -> tuple[ctypes.c_long, ...]:
        """Bytes and filters are passed as a pointer to them; bytes have a null byte after. Returns the number and arguments."""
        self._names.append(name)
        self._calls.append(tuple(ctypes.c_long(value) for value in (_NUMBERS[name], *map(self._address, arguments))))
        return self._calls[-1]

    def take(self) -> OSError | None:
        """Makes the calls. Returns the error of the first that fails, with its name."""
        for index, call in enumerate(self._calls):
            if _syscall(*call) < 0:
                code = ctypes.get_errno()
                return OSError(code, f"{self._names[index]}: {os.strerror(code)}")
        return None

    def _address(self, value: int | bytes | seccomp.Filter) -> int:
        if isinstance(value, int):
            return value
        if isinstance(value, seccomp.Filter):
            self._kept.append(value)
            return value.address
        self._kept.append(buffer := ctypes.create_string_buffer(value))
        return ctypes.addressof(buffer)


def confine_for_all() -> None:
    """The limits that are the same for every job, set on this process and so on all that it starts."""
    os.umask(0o022)
    for kind, wanted in SAME_FOR_ALL.items():
        bound = _bound(kind, wanted)
        resource.setrlimit(kind, (bound, bound))
    _, ceiling = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (_bound(resource.RLIMIT_STACK, STACK_BYTES), ceiling))
    linux.no_new_privileges()


class ForkSteps(Steps):
    """The steps of every fork of a zygote with the same limits. One fork uses them at a time."""

    def __init__(self, limits: Limits, files: int, virtual_bytes: int, syscalls: seccomp.Filter) -> None:
        super().__init__()
        self._files = [self.add("dup3", 0, target, 0)[1] for target in JOB_FDS[:files]]
        self.add("close_range", first_unused_fd(files), (1 << 31) - 1, 0)
        self.add("close", 2)  # a file that jobs share would carry its flags from one to the next
        self.add("openat", -100, b"/dev/null", os.O_WRONLY, 0)  # -100: AT_FDCWD
        self.add("setsid")  # `kill(0, 9)` reaches the whole process group, in whatever pid namespace its members are
        self.add("unshare", linux.CLONE_NEWNS | linux.CLONE_NEWIPC)
        self.add("mount", b"job", b"/tmp", b"tmpfs", FOLDER_FLAGS, folder_options(limits.disk_bytes).encode())
        self.add("chdir", b"/tmp")
        self._ids = _add_limits(self, limits, 0, virtual_bytes, syscalls)

    def aim(self, fds: Sequence[int], uid: int) -> None:
        """Sets the files of the next job, which this process holds at `fds`, and its user id."""
        for place, fd in zip(self._files, fds, strict=True):
            place.value = fd
        for place in self._ids:
            place.value = uid


def wrapped(limits: Limits, uid: int, virtual_bytes: int, syscalls: seccomp.Filter) -> Steps:
    """The steps of a job that bubblewrap has started, with its files and namespaces in place."""
    steps = Steps()
    _add_limits(steps, limits, uid, virtual_bytes, syscalls)
    return steps


def folder_options(disk_bytes: int) -> str:
    return f"size={disk_bytes},nr_inodes={FILES},mode=1777"


def first_unused_fd(files: int) -> int:
    return JOB_FDS[files - 1] + 1


def _add_limits(steps: Steps, limits: Limits, uid: int, virtual_bytes: int, syscalls: seccomp.Filter) -> list[ctypes.c_long]:
    """Returns where the user id stands in them."""
    for kind, wanted in (
        (resource.RLIMIT_CPU, math.ceil(limits.cpu_s) + 1),  # the judge ends a job at the exact limit; this if it cannot
        (resource.RLIMIT_AS, virtual_bytes + limits.memory_bytes + STACK_ROOM_BYTES),
        (resource.RLIMIT_FSIZE, limits.disk_bytes),
        (resource.RLIMIT_NPROC, limits.threads),
    ):
        bound = _bound(kind, wanted)
        steps.add("prlimit64", 0, kind, struct.pack("=QQ", bound, bound), 0)
    ids = [*steps.add("setresgid", uid, uid, uid)[1:], *steps.add("setresuid", uid, uid, uid)[1:]]
    steps.add("capset", _CAPABILITY_HEADER, bytes(24))
    steps.add("prctl", seccomp.PR_SET_SECCOMP, seccomp.SECCOMP_MODE_FILTER, syscalls, 0, 0)
    return ids


def _bound(kind: int, wanted: int) -> int:
    _, ceiling = resource.getrlimit(kind)
    return wanted if ceiling == resource.RLIM_INFINITY else min(wanted, ceiling)
