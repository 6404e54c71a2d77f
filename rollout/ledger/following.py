"""Reads the ledger of a run that may be running, and never disturbs its queue server.

The queue server holds an exclusive lock on `ledger.db`, so the file is read without a lock. A read counts only if nobody wrote
meanwhile: SQLite's rollback journal is empty, and both files have the same times before and after. Otherwise it is tried again.
Each row is checked against its checksum, too.
"""

import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from rollout.ledger.changes import CHANGES, Change
from rollout.ledger.journal import DATABASE_ERRORS, FORMAT, checksum
from rollout.ledger.wire import WireError, unpack

CLOCK_S = 0.02  # a file's time may lag behind the clock by this much, so a younger time proves nothing
RETRY_S = 0.005
PATIENCE_S = 5.0
COLUMNS = "SELECT seq, kind, group_index, step, crc, body FROM changes"
Row = tuple[int, str, int | None, int | None, int, bytes]


class FollowError(RuntimeError):
    """The ledger cannot be read now. The message says why."""


class Numbered(NamedTuple):
    seq: int  # its place in the journal
    change: Change


class _Times(NamedTuple):
    inode: int
    ledger_ns: int
    rollback_ns: int
    rollback_bytes: int


class FollowedLedger:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._rollback = path.with_name(f"{path.name}-journal")

    def inode(self) -> int:
        """Differs when the file was replaced. 0 if there is no file."""
        times = self._times()
        return times.inode if times else 0

    def after(self, seq: int, most: int) -> list[Numbered]:
        """The changes after `seq`, in order, but at most so many. Raises FollowError."""
        return self._read(f"{COLUMNS} WHERE seq > ? ORDER BY seq LIMIT ?", (seq, most))

    def last(self) -> int:
        """The number of the newest change, or 0. It falls only when the file is replaced. Raises FollowError."""
        newest = self._read(f"{COLUMNS} ORDER BY seq DESC LIMIT 1", ())
        return newest[0].seq if newest else 0

    def group(self, index: int) -> list[Change]:
        """All changes of a group, in order; none if the ledger has forgotten it. Raises FollowError."""
        return [found.change for found in self._read(f"{COLUMNS} WHERE group_index = ? ORDER BY seq", (index,))]

    def _read(self, query: str, values: Sequence[int]) -> list[Numbered]:
        deadline_s = time.monotonic() + PATIENCE_S
        problem = "it is being written all the time"
        while time.monotonic() < deadline_s:
            before = self._times()
            if before is None:
                return []
            if self._is_quiet(before):
                try:
                    found = _query(self.path, query, values)
                except (*DATABASE_ERRORS, WireError) as error:
                    problem = str(error)
                    found = None
                if found is not None and self._times() == before:
                    return found
            elif before.rollback_bytes:
                problem = (
                    f"its server is writing, or ended while it wrote (then {self._rollback.name} is not empty: resume the run)"
                )
            time.sleep(RETRY_S)
        raise FollowError(f"{self.path} cannot be read now: {problem}")

    def _times(self) -> _Times | None:
        try:
            ledger = self.path.stat()
        except FileNotFoundError:
            return None
        try:
            rollback = self._rollback.stat()
        except FileNotFoundError:
            return _Times(ledger.st_ino, ledger.st_mtime_ns, 0, 0)
        return _Times(ledger.st_ino, ledger.st_mtime_ns, rollback.st_mtime_ns, rollback.st_size)

    def _is_quiet(self, times: _Times) -> bool:
        age_s = time.time() - max(times.ledger_ns, times.rollback_ns) / 1e9
        return not times.rollback_bytes and not 0 <= age_s < CLOCK_S


def _query(path: Path, query: str, values: Sequence[int]) -> list[Numbered]:
    """A new connection for each query, because a connection that takes no lock would keep pages that have changed since."""
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?immutable=1", uri=True)) as db:
        found = db.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()
        if found is None or found[0] != FORMAT:
            raise FollowError(
                f"{path} has another format ({found and found[0]!r}, not {FORMAT!r}): use the version that wrote it"
            )
        return [_change(row) for row in db.execute(query, values)]


def _change(row: Row) -> Numbered:
    *place, crc, body = row
    if not isinstance(body, bytes) or checksum(place, body) != crc:
        raise WireError(f"change {place[0]} ({place[1]}) does not match its checksum")
    return Numbered(row[0], unpack(CHANGES[row[1]], body))
