"""Runs a command as user 65534, who owns nothing and may read only what everyone may.

    python tests/reward/sandbox/as_ordinary_user.py COMMAND ...

Where the interpreter lies in a folder that others cannot enter (such as /root), it is shown at the same path in a mount
namespace of the command's own, so that the user can run it at all.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from reward.jail import linux

NOBODY = 65534


def main() -> None:
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
    for needed in (Path(sys.base_prefix).resolve(), Path(__file__).resolve().parents[3], Path(sys.prefix).resolve()):
        _make_reachable(needed)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    os.execv(sys.argv[1], sys.argv[1:])


def _make_reachable(folder: Path) -> None:
    closed = [parent for parent in reversed(folder.parents) if not parent.stat().st_mode & 0o001]
    if not closed:
        return
    fd = os.open(folder, os.O_PATH)
    linux.mount("open", str(closed[0]), "tmpfs", 0, "mode=755")
    folder.mkdir(parents=True)
    linux.mount(f"/proc/self/fd/{fd}", str(folder), None, linux.MS_BIND)


if __name__ == "__main__":
    main()
