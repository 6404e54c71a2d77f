"""The secrets of one run: who may speak to its queue server and to its engines.

Made once, in `<run>/keys/` (folder 0700, files 0600): two CURVE key pairs, one for the server and one that all clients of the run
share, and the API key of the engines. Whoever can read that folder has access to the run; nobody else gets past the handshake.
"""

import os
import secrets
import shutil
import stat
from dataclasses import dataclass, field, fields
from pathlib import Path

import zmq

from conf.compose.run_folder import KEYS


class KeysError(RuntimeError):
    """Keys that are missing, incomplete, or readable by others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunKeys:
    """CURVE keys are Z85 text, 40 characters. Secrets stay out of `repr`, so they cannot reach a log."""

    server_public: str
    server_secret: str = field(repr=False)
    client_public: str
    client_secret: str = field(repr=False)
    engine_api_key: str = field(repr=False)

    @classmethod
    def create(cls, run_dir: str | Path) -> "RunKeys":
        """The keys of this run, made if the run has none yet."""
        folder = Path(run_dir) / KEYS
        if folder.exists():
            return cls.load(run_dir)
        server_public, server_secret = (key.decode() for key in zmq.curve_keypair())
        client_public, client_secret = (key.decode() for key in zmq.curve_keypair())
        keys = cls(
            server_public=server_public,
            server_secret=server_secret,
            client_public=client_public,
            client_secret=client_secret,
            engine_api_key=secrets.token_urlsafe(32),
        )
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = folder.with_name(f".keys-{os.getpid()}")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(mode=0o700)
        for item in fields(cls):
            file = os.open(unfinished / item.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(file, "w") as out:
                out.write(getattr(keys, item.name))
        try:
            unfinished.rename(folder)  # whole or not at all
        except OSError:  # another process of the run was first
            shutil.rmtree(unfinished)
        return cls.load(run_dir)

    @classmethod
    def load(cls, run_dir: str | Path) -> "RunKeys":
        folder = Path(run_dir) / KEYS
        if not folder.is_dir():
            raise KeysError(f"{folder} does not exist: the launcher makes a run's keys, or `RunKeys.create(run_dir)` does")
        if others := stat.S_IMODE(folder.stat().st_mode) & 0o077:
            raise KeysError(f"{folder} is open to others (mode bits {others:03o}): run `chmod 700 {folder}`")
        values = {}
        for item in fields(cls):
            file = folder / item.name
            try:
                values[item.name] = file.read_text().strip()
            except OSError as error:
                raise KeysError(f"cannot read {file}: {error.strerror}; remove {folder} to have new keys made") from error
            if not values[item.name]:
                raise KeysError(f"{file} is empty: remove {folder} to have new keys made")
        return cls(**values)
