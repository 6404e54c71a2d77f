"""The system calls a job may make: an allowlist in BPF, written by hand because libseccomp's Python binding is not on PyPI.

What is not listed fails with EPERM. Left out on purpose, because a job could misuse them:

- new processes (fork, vfork, clone without CLONE_THREAD, exec), so that a job is one process and its memory limit holds;
- namespaces, mounts, capabilities, ids, ptrace, bpf, io_uring, keyctl, userfaultfd, perf, pidfd, other processes' memory;
- sockets other than an AF_UNIX pair (asyncio needs one), and sendmsg, which can carry open files;
- memory that no limit counts: memfd, System V and POSIX shared memory, shared memory without a file, and sockets with larger
  buffers (setsockopt);
- channels between jobs over shared read-only files: file locks (`fcntl` says that one is taken, and takes none), leases, inotify,
  and what tells or changes whether a page of a file is in memory (mincore, preadv2, fadvise64).

Filters only add up, and installing a long one costs a job more than forking. So a zygote confines itself to what its jobs and
itself need (`zygote_program`), once; each job inherits that and adds a short filter that takes away what only the zygote needs
(`job_program`). A job that starts as a process of its own gets the whole at once (`program`).

A filter is a pure list of instructions, so that tests can read it; `Filter.install` hands it to the kernel.
"""

import ctypes
import errno
import struct
from collections.abc import Iterable

from reward.jail import linux

# name, number on x86-64, number on arm64 ("-": the call does not exist there)
_ALLOWED = """
    read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, preadv 295 69, pwritev 296 70,
    lseek 8 62, close 3 57, close_range 436 436, open 2 -, openat 257 56,
    openat2 437 437, access 21 -, faccessat 269 48, faccessat2 439 439, stat 4 -, lstat 6 -, fstat 5 80,
    newfstatat 262 79, statx 332 291, statfs 137 43, fstatfs 138 44, getdents 78 -, getdents64 217 61, getcwd 79 17,
    chdir 80 49, fchdir 81 50, mkdir 83 -, mkdirat 258 34, rmdir 84 -, unlink 87 -, unlinkat 263 35, rename 82 -,
    renameat 264 38, renameat2 316 276, link 86 -, linkat 265 37, symlink 88 -, symlinkat 266 36, readlink 89 -,
    readlinkat 267 78, chmod 90 -, fchmod 91 52, fchmodat 268 53, truncate 76 45, ftruncate 77 46, fallocate 285 47,
    utime 132 -, utimes 235 -, futimesat 261 -, utimensat 280 88, umask 95 166, dup 32 23, dup2 33 -, dup3 292 24,
    pipe 22 -, pipe2 293 59, fsync 74 82, fdatasync 75 83, sendfile 40 71, copy_file_range 326 285,
    splice 275 76, tee 276 77, munmap 11 215, mprotect 10 226, mremap 25 216, madvise 28 233, brk 12 214,
    msync 26 227, poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, epoll_create 213 -, epoll_create1 291 20,
    epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22, eventfd 284 -, eventfd2 290 19, sendto 44 206,
    recvfrom 45 207, shutdown 48 210, getsockname 51 204, getpeername 52 205,
    getsockopt 55 209, futex 202 98, set_robust_list 273 99, get_robust_list 274 100,
    set_tid_address 218 96, rseq 334 293, membarrier 324 283, gettid 186 178, exit 60 93, exit_group 231 94,
    arch_prctl 158 -, sched_yield 24 124, sched_getaffinity 204 123, sched_getparam 143 121, sched_getscheduler 145 120,
    sched_get_priority_max 146 125, sched_get_priority_min 147 126, getpriority 140 141, rt_sigaction 13 134,
    rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136, rt_sigtimedwait 128 137, rt_sigsuspend 130 133,
    sigaltstack 131 132, kill 62 129, tkill 200 130, tgkill 234 131, pause 34 -, alarm 37 -, restart_syscall 219 128,
    getitimer 36 102, setitimer 38 103, timer_create 222 107, timer_settime 223 110, timer_gettime 224 108,
    timer_getoverrun 225 109, timer_delete 226 111, timerfd_create 283 85, timerfd_settime 286 86,
    timerfd_gettime 287 87, signalfd4 289 74, nanosleep 35 101, clock_nanosleep 230 115, clock_gettime 228 113,
    clock_getres 229 114, gettimeofday 96 169, time 201 -, times 100 153, getrusage 98 165, sysinfo 99 179, uname 63 160,
    getrandom 318 278, getcpu 309 168, getpid 39 172, getppid 110 173, getuid 102 174, geteuid 107 175, getgid 104 176,
    getegid 108 177, getresuid 118 148, getresgid 120 150, getgroups 115 158, getpgid 121 155, getpgrp 111 -,
    getsid 124 156, getrlimit 97 163, setrlimit 160 164, prlimit64 302 261, wait4 61 260, waitid 247 95,
"""

# Calls that are allowed for some values of one argument: name -> (numbers, argument, values, errno otherwise)
_CHOSEN: dict[str, tuple[tuple[int, int], int, tuple[int, ...], int]] = {
    # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC, F_GETPIPE_SZ
    "fcntl": ((72, 25), 1, (0, 1, 2, 3, 4, 1030, 1032), errno.EPERM),
    # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
    "ioctl": ((16, 29), 1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451), errno.ENOTTY),
    "prctl": ((157, 167), 0, (15, 16), errno.EPERM),  # PR_SET_NAME, PR_GET_NAME
    "socketpair": ((53, 199), 0, (1,), errno.EPERM),  # AF_UNIX
}
# Values of that argument for which the kernel does nothing and the caller hears of success. F_SETLK and F_SETLKW take locks that
# another process can see, and that never keep out the process that has them: so a job, which is one process, misses nothing.
_PRETENDED: dict[str, tuple[int, ...]] = {"fcntl": (6, 7)}
# What a zygote needs to start a job and a job does not; `clone`, and `prctl` with any argument, besides.
_ZYGOTES = """
    setsid 112 157, unshare 272 97, setns 308 268, mount 165 40, setresuid 117 147, setresgid 119 149, capset 126 91,
    recvmsg 47 212, sendmsg 46 211, pidfd_open 434 434, pidfd_send_signal 424 424,
"""
_CLONE = (56, 220)
_CLONE3 = (435, 435)
_MMAP = (9, 222)
_MAP_SHARED, _MAP_ANONYMOUS = 0x01, 0x20  # MAP_SHARED_VALIDATE has the bit of MAP_SHARED too
_CLONE_THREAD = 0x00010000
_CLONE_NEW_ANY = 0x7E020080  # every CLONE_NEW* flag, the time namespace included

_ARCHES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column in the table, AUDIT_ARCH

_LD_W_ABS, _JEQ_K, _JGE_K, _JSET_K, _RET_K = 0x20, 0x15, 0x35, 0x45, 0x06
_RET_KILL, _RET_ALLOW, _RET_ERRNO = 0x80000000, 0x7FFF0000, 0x00050000
_OFFSET_NR, _OFFSET_ARCH, _OFFSET_ARGS = 0, 4, 16

PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2

Instruction = tuple[int, int, int, int]
"""code, jump if true, jump if false, constant: one `struct sock_filter`."""


class UnsupportedArch(RuntimeError):
    """There is no table of system calls for this machine."""


def allowed(machine: str) -> dict[str, int]:
    """Name and number of each call that is allowed whatever its arguments."""
    return _table(_ALLOWED, machine)


def numbers(machine: str) -> dict[str, int]:
    """The number of each call that is known here by name."""
    column, _ = _arch(machine)
    return {**allowed(machine), **only_zygotes(machine), **{name: chosen[0][column] for name, chosen in _CHOSEN.items()}}


def only_zygotes(machine: str) -> dict[str, int]:
    """Name and number of each call that a zygote may make and a job may not."""
    return _table(_ZYGOTES, machine)


def program(machine: str) -> list[Instruction]:
    """All that holds a job on `machine` (as `platform.machine()` calls it)."""
    column, _ = _arch(machine)
    code = [*_head(machine), *_clone3(column), *_clone(column), *_mmap(column)]
    for name in _CHOSEN:
        code += _chosen(name, column)
    return code + _search(_borders(allowed(machine).values()), inside=False)


def zygote_program(machine: str) -> list[Instruction]:
    column, _ = _arch(machine)
    code = [*_head(machine), *_clone3(column), *_mmap(column)]
    for name in _CHOSEN:
        code += [] if name == "prctl" else _chosen(name, column)
    also = (_CLONE[column], _CHOSEN["prctl"][0][column], *only_zygotes(machine).values())
    return code + _search(_borders((*allowed(machine).values(), *also)), inside=False)


def job_program(machine: str) -> list[Instruction]:
    """What is added to `zygote_program`: both together say what `program` says."""
    column, _ = _arch(machine)
    code = [*_head(machine), *_clone(column), *_chosen("prctl", column)]
    return code + _search(_borders(only_zygotes(machine).values()), inside=True)


def _head(machine: str) -> list[Instruction]:
    _, audit_arch = _arch(machine)
    return [_load(_OFFSET_ARCH), (_JEQ_K, 1, 0, audit_arch), _ret(_RET_KILL), _load(_OFFSET_NR)]


def _clone3(column: int) -> list[Instruction]:
    return _when(_CLONE3[column], [_ret(_RET_ERRNO | errno.ENOSYS)])  # the C library then uses clone, which can be read


def _clone(column: int) -> list[Instruction]:
    body: list[Instruction] = [_load(_OFFSET_ARGS), (_JSET_K, 2, 0, _CLONE_NEW_ANY), (_JSET_K, 0, 1, _CLONE_THREAD)]
    return _when(_CLONE[column], [*body, _ret(_RET_ALLOW), _ret(_RET_ERRNO | errno.EPERM)])


def _mmap(column: int) -> list[Instruction]:
    """Everything but shared memory without a file, which stays in use when it is no longer resident."""
    refused = [(_JSET_K, 0, 2, _MAP_ANONYMOUS), (_JSET_K, 0, 1, _MAP_SHARED), _ret(_RET_ERRNO | errno.EPERM)]
    return _when(_MMAP[column], [_load(_OFFSET_ARGS + 8 * 3), *refused, _ret(_RET_ALLOW)])


def _chosen(name: str, column: int) -> list[Instruction]:
    numbers, argument, values, otherwise = _CHOSEN[name]
    pretended = _PRETENDED.get(name, ())
    to_allow, to_pretend = len(values) + len(pretended) + 1, len(pretended)
    tests: list[Instruction] = [(_JEQ_K, to_allow - i, 0, value) for i, value in enumerate(values)]
    tests += [(_JEQ_K, to_pretend - i, 0, value) for i, value in enumerate(pretended)]
    ends = [_ret(_RET_ERRNO | otherwise), _ret(_RET_ERRNO), _ret(_RET_ALLOW)]
    body = [_load(_OFFSET_ARGS + 8 * argument), *tests, *ends]
    return _when(numbers[column], body)


def _table(text: str, machine: str) -> dict[str, int]:
    column, _ = _arch(machine)
    rows = [row.split() for row in text.replace("\n", " ").split(",") if row.strip()]
    return {name: int(numbers[column]) for name, *numbers in rows if numbers[column] != "-"}


class Filter:
    """A filter ready to be installed: made once in the zygote, used by every job."""

    def __init__(self, instructions: list[Instruction]) -> None:
        code = b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)
        self._code = ctypes.create_string_buffer(code, len(code))
        fprog = struct.pack("@HxxxxxxP", len(code) // 8, ctypes.addressof(self._code))
        self._fprog = ctypes.create_string_buffer(fprog, len(fprog))
        self.address = ctypes.addressof(self._fprog)

    def install(self) -> None:
        """Confines the calling thread and all that it starts, for good. Needs no_new_privs."""
        pointer = ctypes.c_void_p(self.address)
        linux.check(linux.libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(SECCOMP_MODE_FILTER), pointer), "prctl(PR_SET_SECCOMP)")


def _arch(machine: str) -> tuple[int, int]:
    if machine not in _ARCHES:
        raise UnsupportedArch(f"no system call table for {machine!r}: this sandbox runs on {', '.join(_ARCHES)}")
    return _ARCHES[machine]


def _load(offset: int) -> Instruction:
    return (_LD_W_ABS, 0, 0, offset)


def _ret(value: int) -> Instruction:
    return (_RET_K, 0, 0, value)


def _borders(numbers: Iterable[int]) -> list[int]:
    """Where allowed numbers begin and end, in turn: 3, 4, 5, 9 become 3, 6, 9, 10."""
    listed = set(numbers)
    return sorted(edge for edge in listed | {number + 1 for number in listed} if (edge in listed) != (edge - 1 in listed))


def _search(borders: list[int], *, inside: bool) -> list[Instruction]:
    """A binary search, because the kernel runs the filter for each of some 900 numbers when it is installed."""
    if not borders:
        return [_ret(_RET_ALLOW if inside else _RET_ERRNO | errno.EPERM)]
    middle = len(borders) // 2
    below = _search(borders[:middle], inside=inside)
    above = _search(borders[middle + 1 :], inside=inside ^ (middle % 2 == 0))
    return [(_JGE_K, len(below), 0, borders[middle]), *below, *above]


def _when(number: int, body: list[Instruction]) -> list[Instruction]:
    """`body`, which must end in a return, for one call number (in the accumulator)."""
    return [(_JEQ_K, 0, len(body), number), *body]
