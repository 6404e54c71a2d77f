"""The ledger's journal: one SQLite file, one writer, every acknowledged change on disk.

Changes are buffered by `append` and made durable together by `commit` (one transaction, `synchronous=FULL`: they survive
kill -9 and a power loss). A `Durable` deletes what it forgets, so the file holds what is not yet covered by a checkpoint
and no more. A rollback journal and not a WAL: what is committed lies in the one file, so that damage to it is seen and
not taken for an earlier end, and it needs no shared memory, so the folder may be on a network file system that locks files.
"""

import json
import logging
import os
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from rollout.ledger.changes import CHANGES, Change, Durable, Taken
from rollout.ledger.file_system import is_network, kind_of, locks_work, sync_folder
from rollout.ledger.rules import Rules
from rollout.ledger.wire import WireError, pack, unpack

FORMAT = "kestrel-ledger-4"
FIXED_RULES = ("groups_per_step", "completions_per_group", "max_staleness", "window", "max_completion_tokens")
PAGE_BYTES = 16384  # a segment's row in one or two
SETTINGS = (
    "PRAGMA locking_mode=EXCLUSIVE",
    "PRAGMA journal_mode=TRUNCATE",
    "PRAGMA synchronous=FULL",
    "PRAGMA cache_size=-65536",
)
TABLES = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    """CREATE TABLE changes (
        seq INTEGER PRIMARY KEY, kind TEXT NOT NULL, group_index INTEGER, step INTEGER,
        crc INTEGER NOT NULL, body BLOB NOT NULL)""",
    "CREATE INDEX changes_by_group ON changes (group_index)",
)
ROWS = "UPDATE meta SET value = CAST(value AS INTEGER) + ? WHERE key = 'rows'"
DATABASE_ERRORS = (sqlite3.Error, UnicodeDecodeError)  # the second where SQLite would name something whose name is damaged
log = logging.getLogger("queue")


class JournalError(RuntimeError):
    """A journal that cannot be read or written; the message names the file and what to do."""


class JournalUnavailable(JournalError):
    """It cannot be read or written now: a full disk, another server that has not ended yet."""


class JournalDamaged(JournalError):
    """Its contents are not what was written."""


class Journal:
    def __init__(self, path: str | Path, rules: Rules) -> None:
        """Opens or makes the journal and locks it for this process. Raises JournalError."""
        self.path = Path(path)
        self._file = self.path.resolve()
        self._pending: list[Change] = []
        self._check_folder()
        try:
            if not self._file.exists():
                self._check_nothing_is_left()
                self._make(rules)
            elif not self._file.stat().st_size:
                raise self._damaged("it is empty")
            self._db = sqlite3.connect(self._file, isolation_level=None, timeout=1.0)
        except (*DATABASE_ERRORS, OSError) as error:
            raise self._error("open", error) from error
        try:
            self._open(rules)
        except DATABASE_ERRORS as error:
            self.close()
            raise self._error("open", error) from error
        except JournalError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self) -> Iterator[Change]:
        """What `Ledger.replay` needs: the last `Durable` first, and of the groups in a batch no more than the batch says.

        All that is there is checked before any of it is given. Raises JournalError for any damage.
        """
        with self._errors("read"):
            self._check()
            yield from self._changes("WHERE group_index IS NULL AND kind = 'Durable'")
            batches = self._changes("WHERE group_index IS NULL AND kind = 'Taken'")
            taken = [account.group for batch in batches if isinstance(batch, Taken) for account in batch.groups]
            others = "group_index IS NULL OR group_index NOT IN (SELECT value FROM json_each(?))"
            yield from self._changes(f"WHERE kind != 'Durable' AND ({others}) ORDER BY seq", json.dumps(taken))

    def _check(self) -> None:
        """Each change by its checksum, all by their number, and what finds them by SQLite's own check."""
        expected, found = self._rows(), sum(1 for _ in self._checked("ORDER BY seq"))
        if found != expected:
            raise self._damaged(f"{expected} changes were written, {found} are there")
        damage = self._db.execute("PRAGMA integrity_check(1)").fetchone()[0]
        if damage != "ok":
            raise self._damaged(str(damage).splitlines()[-1])

    def group(self, index: int) -> Iterator[Change]:
        """All that is recorded of a group, in order. Raises JournalError."""
        with self._errors("read"):
            yield from self._changes("WHERE group_index = ? ORDER BY seq", index)

    def _changes(self, where: str, *values: int | str) -> Iterator[Change]:
        for kind, body in self._checked(where, *values):
            yield unpack(CHANGES[kind], body)

    def _checked(self, where: str, *values: int | str) -> Iterator[tuple[str, bytes]]:
        """The kind and body of changes, each as it was written."""
        for *place, crc, body in self._db.execute(f"SELECT seq, kind, group_index, step, crc, body FROM changes {where}", values):
            if not isinstance(body, bytes) or _checksum(place, body) != crc:
                raise self._damaged(f"change {place[0]} ({place[1]}) does not match its checksum")
            yield place[1], body

    def append(self, changes: Iterable[Change]) -> None:
        self._pending.extend(changes)

    def commit(self) -> int:
        """Writes what was appended, in one transaction; how many changes. Raises JournalError, and then nothing is written."""
        pending, self._pending = self._pending, []
        if not pending:
            return 0
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._write(pending)
            self._db.execute("COMMIT")
        except DATABASE_ERRORS as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise self._error("write", error) from error
        return len(pending)

    def belong_to(self, prompts: str) -> None:
        """Ties it to the stream of prompts in which its groups have their places. Raises JournalError if it has another."""
        with self._errors("write"):
            self._db.execute("INSERT OR IGNORE INTO meta VALUES ('prompts', ?)", (prompts,))
            found = self._db.execute("SELECT value FROM meta WHERE key = 'prompts'").fetchone()[0]
        if found != prompts:
            raise JournalError(
                f"{self.path} began with other prompts: some would be skipped, and others come again. Bring back data.train, "
                "data.seed, data.max_prompt_tokens and the tokenizer in model.path as they were, or start a new run"
            )

    def close(self) -> None:
        self._db.close()

    def _check_folder(self) -> None:
        folder = self._file.parent
        try:
            kind, locks = kind_of(folder), locks_work(folder)
        except OSError as error:
            raise self._error("open", error) from error
        if not locks:
            raise JournalError(
                f"cannot open {self.path}: {folder} is on {kind or 'a file system'} that does not lock files, so nothing would "
                "keep two queue servers apart. Mount it with locks (Lustre: -o flock; NFS: version 4, or a running lock daemon), "
                f"or make {self.path} a link to a file on another disk"
            )
        if is_network(kind):
            log.warning("%s is on %s: a commit waits for its server, and locks must hold on all nodes", self.path, kind)

    def _check_nothing_is_left(self) -> None:
        rollback = self._file.with_name(f"{self._file.name}-journal")  # SQLite's own; it would be taken for the new file's
        if rollback.exists() and rollback.stat().st_size:
            raise self._damaged(f"it is gone: only {rollback.name} is left")

    def _make(self, rules: Rules) -> None:
        """The file is whole or not there: an empty one is what a truncation leaves."""
        unfinished = self._file.with_name(f".{self._file.name}.{os.getpid()}")
        unfinished.unlink(missing_ok=True)
        db = sqlite3.connect(unfinished, isolation_level=None)
        try:
            for statement in (
                f"PRAGMA page_size={PAGE_BYTES}",
                "PRAGMA journal_mode=OFF",
                "PRAGMA synchronous=FULL",
                "BEGIN",
                *TABLES,
            ):
                db.execute(statement)
            rows = [("format", FORMAT), ("rules", json.dumps(_fixed(rules))), ("rows", "0")]
            db.executemany("INSERT INTO meta VALUES (?, ?)", rows)
            db.execute("COMMIT")
        finally:
            db.close()
        unfinished.rename(self._file)
        sync_folder(self._file.parent)

    def _open(self, rules: Rules) -> None:
        for setting in SETTINGS:
            self._db.execute(setting)
        self._db.execute("BEGIN EXCLUSIVE")
        self._check_meta(rules)
        self._db.execute("COMMIT")
        self._seq = self._db.execute("SELECT coalesce(max(seq), 0) FROM changes").fetchone()[0]

    def _write(self, changes: Sequence[Change]) -> None:
        rows: list[tuple[Any, ...]] = []
        for change in changes:
            if isinstance(change, Durable):
                self._insert(rows)
                rows = []
                self._forget(change)
            self._seq += 1
            body = pack(change)
            place = (self._seq, type(change).__name__, getattr(change, "group", None), getattr(change, "step", None))
            rows.append((*place, _checksum(place, body), body))
        self._insert(rows)

    def _insert(self, rows: Sequence[tuple[Any, ...]]) -> None:
        self._db.executemany("INSERT INTO changes VALUES (?, ?, ?, ?, ?, ?)", rows)
        self._db.execute(ROWS, (len(rows),))

    def _forget(self, durable: Durable) -> None:
        """Deletes what does not outlive it (`changes.outlives`)."""
        deleted = self._db.execute("DELETE FROM changes WHERE group_index IS NULL AND step IS NULL").rowcount
        deleted += self._db.execute("DELETE FROM changes WHERE step < ?", (durable.totals.oldest_step,)).rowcount
        groups = [(group,) for group in durable.forgotten]
        deleted += max(self._db.executemany("DELETE FROM changes WHERE group_index = ?", groups).rowcount, 0)
        self._db.execute(ROWS, (-deleted,))

    def _check_meta(self, rules: Rules) -> None:
        meta = dict(self._db.execute("SELECT key, value FROM meta").fetchall())
        if meta.get("format") != FORMAT:
            raise JournalError(
                f"{self.path} has another format ({meta.get('format')!r}, not {FORMAT!r}): go on with the kestrel that "
                f"began the run, or give up what the newest checkpoint does not cover: {self._new_ledger}"
            )
        try:
            made_with = dict(json.loads(meta["rules"]))
        except (KeyError, TypeError, ValueError) as error:
            raise self._damaged(f"its rules cannot be read: {error!r}") from error
        fixed = _fixed(rules)
        changed = [
            f"{name} was {made_with.get(name)} and is {fixed[name]}" for name in fixed if made_with.get(name) != fixed[name]
        ]
        if changed:
            raise JournalError(f"{self.path} belongs to a run with other rules ({'; '.join(changed)}): start a new run")

    def _rows(self) -> int:
        found = self._db.execute("SELECT value FROM meta WHERE key = 'rows'").fetchone()
        if found is None or not str(found[0]).isdecimal():
            raise self._damaged("it does not say how many changes it holds")
        return int(found[0])

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except DATABASE_ERRORS as error:
            raise self._error(what, error) from error
        except WireError as error:
            raise self._damaged(str(error)) from error

    @property
    def _new_ledger(self) -> str:
        return f"python -m rollout.ledger.new_ledger --run {self.path.parent}"

    def _damaged(self, what: str) -> JournalDamaged:
        return JournalDamaged(
            f"{self.path} is damaged ({what}): nothing of it was used. Put it aside with its -journal, and bring back a copy "
            "that is at least as new as the newest checkpoint; or give up what that does not cover, which is counted and "
            f"said: {self._new_ledger}"
        )

    def _error(self, what: str, error: Exception) -> JournalError:
        text = str(error)
        if "locked" in text:
            return JournalUnavailable(f"{self.path} is in use: another queue server of this run is alive")
        if any(sign in text for sign in ("malformed", "not a database", "no such table", "no such column", "decode")):
            return self._damaged(text)
        return JournalUnavailable(
            f"cannot {what} {self.path}: {text}; look for free space and rights in {self.path.parent}, and on a network "
            "file system for its server"
        )


def _fixed(rules: Rules) -> dict[str, int]:
    return {name: value for name, value in asdict(rules).items() if name in FIXED_RULES}


def _checksum(place: Sequence[Any], body: bytes) -> int:
    """Of a change and of where it stands."""
    return zlib.crc32(body, zlib.crc32(repr(tuple(place)).encode()))
