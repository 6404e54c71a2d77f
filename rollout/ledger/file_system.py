"""On what kind of file system a path lies, and whether it can lock files: a journal must not be written by two servers."""

import errno
import fcntl
import os
import tempfile
from pathlib import Path

NETWORK = (
    "nfs", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb", "glusterfs", "orangefs", "9p", "afs", "wekafs", "sshfs", "mfs",
    "juicefs",
)  # fmt: skip
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def kind_of(path: Path, mounts: str = "") -> str:
    """As the kernel names it (`ext4`, `lustre`, …); "" if it does not say. `mounts`: the text of /proc/self/mountinfo."""
    try:
        lines = (mounts or Path("/proc/self/mountinfo").read_text()).splitlines()
    except OSError:
        return ""
    found = ("", "")
    for line in lines:
        mount, _, source = line.partition(" - ")
        point = mount.split()[4].encode().decode("unicode_escape")  # a blank is written \040
        if path.resolve().is_relative_to(point) and len(point) >= len(found[0]):
            found = (point, source.split()[0])
    return found[1]


def is_network(kind: str) -> bool:
    return kind.removeprefix("fuse.").startswith(NETWORK)


def locks_work(folder: Path) -> bool:
    """Whether a file there can be locked. Raises OSError if none can be made."""
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in NO_LOCKS:
                return False
            raise
    return True


def sync_folder(folder: Path) -> None:
    """Makes the names in it last."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
