"""The journal of the ledger: one SQLite file with one writer. Every acknowledged change is on disk.

`append` buffers changes, and `commit` writes them in one transaction with `synchronous=FULL`, so they survive kill -9 and a
power loss. A `Durable` deletes what it forgets, so the file holds only what no checkpoint covers yet. SQLite uses a rollback
journal here, not a WAL, for two reasons: all committed data is in one file, so a damaged file cannot pass for a shorter one;
and no shared memory is needed, so the folder may be on a network file system that locks files.
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

FORMAT = "kestrel-ledger-5"
FIXED_RULES = ("groups_per_step", "completions_per_group", "max_staleness", "window", "max_completion_tokens")
PAGE_BYTES = 16384  # the row of one segment then fits into one or two pages
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
DATABASE_ERRORS = (sqlite3.Error, UnicodeDecodeError)  # SQLite raises the second when its error message quotes damaged text
log = logging.getLogger("queue")


class JournalError(RuntimeError):
    """The journal cannot be read or written. The message names the file and what to do."""


class JournalUnavailable(JournalError):
    """It cannot be read or written now: the disk is full, or another server still uses it."""


class JournalDamaged(JournalError):
    """Its contents differ from what was written."""


class Journal:
    def __init__(self, path: str | Path, rules: Rules) -> None:
        """Opens or creates the journal, and locks it for this process. Raises JournalError."""
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
        """The changes that `Ledger.replay` needs: the last `Durable` first, and only the account of groups that are in a batch.

        The whole file is checked before the first change is returned. Raises JournalError for any damage.
        """
        with self._errors("read"):
            self._check()
            yield from self._changes("WHERE group_index IS NULL AND kind = 'Durable'")
            batches = self._changes("WHERE group_index IS NULL AND kind = 'Taken'")
            taken = [account.group for batch in batches if isinstance(batch, Taken) for account in batch.groups]
            others = "group_index IS NULL OR group_index NOT IN (SELECT value FROM json_each(?))"
            yield from self._changes(f"WHERE kind != 'Durable' AND ({others}) ORDER BY seq", json.dumps(taken))

    def _check(self) -> None:
        """Checks the checksum of each change, the number of changes, and the structure of the file with SQLite's own check."""
        expected, found = self._rows(), sum(1 for _ in self._checked("ORDER BY seq"))
        if found != expected:
            raise self._damaged(f"{expected} changes were written, but {found} were found")
        damage = self._db.execute("PRAGMA integrity_check(1)").fetchone()[0]
        if damage != "ok":
            raise self._damaged(str(damage).splitlines()[-1])

    def group(self, index: int) -> Iterator[Change]:
        """All changes of a group, in order. Raises JournalError."""
        with self._errors("read"):
            yield from self._changes("WHERE group_index = ? ORDER BY seq", index)

    def _changes(self, where: str, *values: int | str) -> Iterator[Change]:
        for kind, body in self._checked(where, *values):
            yield unpack(CHANGES[kind], body)

    def _checked(self, where: str, *values: int | str) -> Iterator[tuple[str, bytes]]:
        """The kind and the body of each selected change, after its checksum was checked."""
        for *place, crc, body in self._db.execute(f"SELECT seq, kind, group_index, step, crc, body FROM changes {where}", values):
            if not isinstance(body, bytes) or checksum(place, body) != crc:
                raise self._damaged(f"change {place[0]} ({place[1]}) does not match its checksum")
            yield place[1], body

    def append(self, changes: Iterable[Change]) -> None:
        self._pending.extend(changes)

    def commit(self) -> int:
        """Writes all appended changes in one transaction, or none. Returns their number. Raises JournalError."""
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
        """Binds the journal to a stream of prompts, given by its digest. Raises JournalError if it is bound to another stream."""
        with self._errors("write"):
            self._db.execute("INSERT OR IGNORE INTO meta VALUES ('prompts', ?)", (prompts,))
            found = self._db.execute("SELECT value FROM meta WHERE key = 'prompts'").fetchone()[0]
        if found != prompts:
            raise JournalError(
                f"{self.path} began with other prompts, so some would be skipped and others repeated. Restore data.train, "
                "data.seed, data.max_prompt_tokens and the tokenizer in model.path, or start a new run"
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
                f"cannot open {self.path}: {folder} is on {kind or 'a file system'} that does not lock files, so two queue "
                "servers could write at once. Mount it with locks (Lustre: -o flock; NFS: version 4, or a running lock daemon), "
                f"or make {self.path} a link to a file on another disk"
            )
        if is_network(kind):
            log.warning("%s is on %s: commits wait for its server, and file locks must work across nodes", self.path, kind)

    def _check_nothing_is_left(self) -> None:
        rollback = self._file.with_name(f"{self._file.name}-journal")  # made by SQLite, which would apply it to the new file
        if rollback.exists() and rollback.stat().st_size:
            raise self._damaged(f"it is missing, and only {rollback.name} is left")

    def _make(self, rules: Rules) -> None:
        """Writes the file under another name and renames it, so an empty journal can only come from damage."""
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
            rows.append((*place, checksum(place, body), body))
        self._insert(rows)

    def _insert(self, rows: Sequence[tuple[Any, ...]]) -> None:
        self._db.executemany("INSERT INTO changes VALUES (?, ?, ?, ?, ?, ?)", rows)
        self._db.execute(ROWS, (len(rows),))

    def _forget(self, durable: Durable) -> None:
        """Deletes every change but those whose group or batch is not forgotten."""
        deleted = self._db.execute("DELETE FROM changes WHERE group_index IS NULL AND step IS NULL").rowcount
        deleted += self._db.execute("DELETE FROM changes WHERE step < ?", (durable.totals.oldest_step,)).rowcount
        groups = [(group,) for group in durable.forgotten]
        deleted += max(self._db.executemany("DELETE FROM changes WHERE group_index = ?", groups).rowcount, 0)
        self._db.execute(ROWS, (-deleted,))

    def _check_meta(self, rules: Rules) -> None:
        meta = dict(self._db.execute("SELECT key, value FROM meta").fetchall())
        if meta.get("format") != FORMAT:
            raise JournalError(
                f"{self.path} has another format ({meta.get('format')!r}, not {FORMAT!r}): resume with the version of kestrel "
                f"that started the run, or give up what the newest checkpoint does not cover: {self._new_ledger}"
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
            raise self._damaged("its number of changes is missing")
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
            f"{self.path} is damaged ({what}), and nothing in it was used. Move it and its -journal file away and restore a copy "
            "that is at least as new as the newest checkpoint; or give up what that checkpoint does not cover, which is counted "
            f"and printed: {self._new_ledger}"
        )

    def _error(self, what: str, error: Exception) -> JournalError:
        text = str(error)
        if "locked" in text:
            return JournalUnavailable(f"{self.path} is in use: another queue server of this run is alive")
        if any(sign in text for sign in ("malformed", "not a database", "no such table", "no such column", "decode")):
            return self._damaged(text)
        return JournalUnavailable(
            f"cannot {what} {self.path}: {text}; check the free space and the permissions of {self.path.parent}, and on a "
            "network file system its server"
        )


def _fixed(rules: Rules) -> dict[str, int]:
    return {name: value for name, value in asdict(rules).items() if name in FIXED_RULES}


def checksum(place: Sequence[Any], body: bytes) -> int:
    """A checksum over a change and its place in the journal."""
    return zlib.crc32(body, zlib.crc32(repr(tuple(place)).encode()))
