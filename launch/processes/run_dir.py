"""The run's folder: it holds no other run, and one launcher at a time holds it."""

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from conf.schema import ConfigError
from launch.processes.lock import locked


def check_run_dir(run_dir: Path, *, resumed: bool) -> None:
    """Raises ConfigError."""
    there = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    if not there.is_dir():
        raise ConfigError(f"{there} is not a folder: choose another name or output")
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        raise ConfigError(f"{there} cannot be written ({error.strerror}): choose another output=…") from error
    if not resumed and run_dir.is_dir() and any(not entry.name.startswith(".") for entry in run_dir.iterdir()):
        raise ConfigError(f"{run_dir} holds a run already: go on with it by resume={run_dir}, or choose another name")


def held(run_dir: Path, *, patience_s: float = 0.0, say: Callable[[str], None] = print) -> AbstractContextManager[None]:
    """Holds the run's folder: two launchers on one run would tear it apart. Raises ConfigError.

    patience_s: for whoever holds it. NFS gives up the lock of a node that died only when its lease has run out.
    """
    return locked(
        run_dir,
        other=f"the launcher that holds {run_dir} and should be gone",
        refused=f"{run_dir} is being run by another launcher: end that one first, or give a new run a name=… of its own",
        patience_s=patience_s,
        say=say,
    )
