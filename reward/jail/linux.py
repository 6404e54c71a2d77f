"""The kernel calls that Python 3.11 lacks, through ctypes: namespaces, mounts, capabilities, prctl.

Owns nothing but the calling conventions. Every call raises `OSError` with the call's name when the kernel refuses.
"""

import ctypes
import os

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_REMOUNT = 0x20
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MNT_DETACH = 0x2

_MS_NOATIME = 0x400
_MS_NODIRATIME = 0x800
_MS_RELATIME = 0x200000
_MS_STRICTATIME = 0x1000000
_ST_RELATIME = 0x1000

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
CAPABILITY_VERSION_3 = 0x20080522

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> int:
    """`result`, or the kernel's error as an OSError that names the call."""
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


_keeping_the_lock = ctypes.PyDLL(None)


def fork() -> int:
    """The C library's `fork` without Python's hooks around it, which cost a child more than all else that it does: they give
    each child new random seeds and new locks. For a parent of one thread that wants neither."""
    return check(int(_keeping_the_lock.fork()), "fork")


def unshare(flags: int) -> None:
    check(libc.unshare(ctypes.c_int(flags)), f"unshare({flags:#x})")


def setns(fd: int, kind: int) -> None:
    check(libc.setns(ctypes.c_int(fd), ctypes.c_int(kind)), f"setns({kind:#x})")


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    check(
        libc.mount(source.encode(), target.encode(), kind.encode() if kind else None, ctypes.c_ulong(flags), options.encode()),
        f"mount({target})",
    )


def detach(target: str) -> None:
    check(libc.umount2(target.encode(), ctypes.c_int(MNT_DETACH)), f"umount2({target})")


def pivot_root(new_root: str, old_root: str) -> None:
    check(libc.pivot_root(new_root.encode(), old_root.encode()), f"pivot_root({new_root})")


def locked_mount_flags(statvfs_flags: int) -> int:
    """The flags that a read-only remount has to repeat, because an outer user namespace locked them."""
    flags = statvfs_flags & (MS_NOSUID | MS_NODEV | MS_NOEXEC | _MS_NOATIME | _MS_NODIRATIME)
    if statvfs_flags & _ST_RELATIME:
        flags |= _MS_RELATIME
    elif not statvfs_flags & _MS_NOATIME:
        flags |= _MS_STRICTATIME
    return flags


def no_new_privileges() -> None:
    one, zero = ctypes.c_ulong(1), ctypes.c_ulong(0)
    check(libc.prctl(_PR_SET_NO_NEW_PRIVS, one, zero, zero, zero), "prctl(PR_SET_NO_NEW_PRIVS)")


def die_with_parent(signal_number: int) -> None:
    zero = ctypes.c_ulong(0)
    check(libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal_number), zero, zero, zero), "prctl(PR_SET_PDEATHSIG)")
