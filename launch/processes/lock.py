"""A folder that one process at a time holds, by a lock on a file in it: given up when its holder dies, however it does."""

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from conf.schema import ConfigError

LOCK_FILE = ".lock"
LOOK_S = 0.5
SAID_EVERY_S = 30.0


@contextmanager
def locked(folder: Path, *, other: str, refused: str, patience_s: float, say: Callable[[str], None]) -> Iterator[None]:
    """Waits `patience_s` for the `other` that may hold it. Raises ConfigError: then it is `refused`."""
    with _lock_file(folder) as lock:
        began_s = due_s = time.monotonic()
        while not _is_locked(folder, lock):
            now_s = time.monotonic()
            if now_s - began_s >= patience_s:
                raise ConfigError(refused)
            if now_s >= due_s:
                say(f"waiting for {other} ({now_s - began_s:.0f} s of {patience_s:.0f} s at most)")
                due_s = now_s + SAID_EVERY_S
            time.sleep(LOOK_S)
        yield


def _lock_file(folder: Path) -> TextIO:
    """Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / LOCK_FILE).open("w")
    except OSError as error:
        raise ConfigError(f"{folder.absolute()} cannot be written ({error.strerror}): have it where it can be") from error


def _is_locked(folder: Path, lock: TextIO) -> bool:
    """Whether it could be locked. Raises ConfigError."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # Lustre without `-o flock` is such a file system
        raise ConfigError(f"{folder} cannot be locked ({error.strerror}): have it on a file system where files can be") from error
    return True
