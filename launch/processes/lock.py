"""A lock on a folder that one process at a time holds. The kernel releases it when its holder dies."""

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from conf.schema import ConfigError

LOCK_FILE = ".lock"
POLL_S = 0.5
SAY_EVERY_S = 30.0


@contextmanager
def locked(folder: Path, *, holder: str, refusal: str, patience_s: float, say: Callable[[str], None]) -> Iterator[None]:
    """Waits up to `patience_s` for the present `holder`. Raises ConfigError with the text `refusal` after that."""
    with _open_lock(folder) as lock:
        began_s = say_at_s = time.monotonic()
        while not _try_lock(folder, lock):
            now_s = time.monotonic()
            if now_s - began_s >= patience_s:
                raise ConfigError(refusal)
            if now_s >= say_at_s:
                say(f"waiting for {holder} ({now_s - began_s:.0f} s of {patience_s:.0f} s at most)")
                say_at_s = now_s + SAY_EVERY_S
            time.sleep(POLL_S)
        yield


def _open_lock(folder: Path) -> TextIO:
    """Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / LOCK_FILE).open("w")
    except OSError as error:
        raise ConfigError(f"{folder.absolute()} cannot be written ({error.strerror}): choose a folder that can be") from error


def _try_lock(folder: Path, lock: TextIO) -> bool:
    """Raises ConfigError."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # for example Lustre that is mounted without `-o flock`
        raise ConfigError(
            f"{folder} cannot be locked ({error.strerror}): choose a folder on a file system that supports locks"
        ) from error
    return True
