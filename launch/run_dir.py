"""The run's folder: it holds no other run, and one launcher at a time holds it."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from conf.schema import ConfigError

LOCK_FILE = ".lock"


def check_run_dir(run_dir: Path, *, resumed: bool) -> None:
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError(f"{run_dir} is not a folder: choose another name or output")
    if not resumed and run_dir.is_dir() and any(not entry.name.startswith(".") for entry in run_dir.iterdir()):
        raise ConfigError(f"{run_dir} holds a run already: go on with it by resume={run_dir}, or choose another name")


@contextmanager
def held(run_dir: Path) -> Iterator[None]:
    """Holds the run's folder: two launchers on one run would tear it apart. Raises ConfigError."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / LOCK_FILE).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"{run_dir} is being run by another launcher: end that one first") from error
        except OSError as error:  # Lustre without `-o flock` is such a file system
            raise ConfigError(f"{run_dir} cannot be locked ({error.strerror}): choose an output=… where files can be") from error
        yield
