"""The run's folder: it holds one run, and one launcher at a time works on it."""

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from conf.schema import ConfigError
from launch.processes.lock import locked


def check_run_dir(run_dir: Path, *, resumed: bool) -> None:
    """Raises ConfigError."""
    existing = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise ConfigError(f"{existing} is not a folder: choose another name or output")
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise ConfigError(f"{existing} cannot be written ({error.strerror}): choose another output=…") from error
    if not resumed and run_dir.is_dir() and any(not entry.name.startswith(".") for entry in run_dir.iterdir()):
        raise ConfigError(f"{run_dir} holds a run already: go on with it by resume={run_dir}, or choose another name")


def locked_run_dir(run_dir: Path, *, patience_s: float = 0.0, say: Callable[[str], None] = print) -> AbstractContextManager[None]:
    """Locks the run's folder, since two launchers would damage the run. Raises ConfigError.

    patience_s: how long to wait for the present holder. NFS releases the lock of a dead node only when its lease expires.
    """
    return locked(
        run_dir,
        holder=f"the lock on {run_dir}: an earlier launcher still holds it",
        refusal=f"{run_dir} is in use by another launcher: end that one first, or give a new run a name=… of its own",
        patience_s=patience_s,
        say=say,
    )
