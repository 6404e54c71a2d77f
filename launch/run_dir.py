"""The run's folder: it holds no other run, and one launcher at a time holds it."""

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from conf.schema import ConfigError

LOCK_FILE = ".lock"
LOOK_S = 0.5


def check_run_dir(run_dir: Path, *, resumed: bool) -> None:
    """Raises ConfigError."""
    there = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    if not there.is_dir():
        raise ConfigError(f"{there} is not a folder: choose another name or output")
    if not resumed and run_dir.is_dir() and any(not entry.name.startswith(".") for entry in run_dir.iterdir()):
        raise ConfigError(f"{run_dir} holds a run already: go on with it by resume={run_dir}, or choose another name")


@contextmanager
def held(run_dir: Path, *, patience_s: float = 0.0, say: Callable[[str], None] = print) -> Iterator[None]:
    """Holds the run's folder: two launchers on one run would tear it apart. Raises ConfigError.

    patience_s: for whoever holds it. NFS gives up the lock of a node that died only when its lease has run out.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / LOCK_FILE).open("w") as lock:
        began_s, told = time.monotonic(), False
        while not _locked(run_dir, lock):
            if time.monotonic() - began_s >= patience_s:
                raise ConfigError(
                    f"{run_dir} is being run by another launcher: end that one first, or give a new run a name=… of its own"
                )
            if not told:
                say(f"{run_dir} is held by a launcher that should be gone; waiting for it, {patience_s:.0f} s at most")
                told = True
            time.sleep(LOOK_S)
        yield


def _locked(run_dir: Path, lock: TextIO) -> bool:
    """Whether it could be locked. Raises ConfigError."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # Lustre without `-o flock` is such a file system
        raise ConfigError(f"{run_dir} cannot be locked ({error.strerror}): choose an output=… where files can be") from error
    return True
