"""Whoever looks at a run reads its ledger while the queue server writes it, and disturbs nobody."""

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from rollout.ledger import following
from rollout.ledger.changes import Extended, Lost, LostKind
from rollout.ledger.following import FollowedLedger, FollowError
from rollout.ledger.journal import Journal, JournalError
from tests.rollout.builders import rules, segment
from tests.rollout.ledger.test_journal import REPOSITORY, WRITER


def lost(tokens: int) -> Lost:
    return Lost(kind=LostKind.STALE, tokens=tokens)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


def test_committed_changes_are_read_while_the_queue_server_holds_its_lock(path: Path) -> None:
    with closing(Journal(path, rules())) as journal:
        ledger = FollowedLedger(path)
        journal.append([lost(1), Extended(5, 0, segment([0, 0]))])
        journal.commit()
        journal.append([lost(2)])  # not committed yet
        assert [found.seq for found in ledger.after(0, 10)] == [1, 2]
        journal.commit()
        assert [found.change for found in ledger.after(2, 10)] == [lost(2)]
        assert ledger.after(3, 10) == []
        assert [type(change) for change in ledger.group(5)] == [Extended]
        with pytest.raises(JournalError, match="is in use"):
            Journal(path, rules())


def test_no_read_sees_half_of_what_a_busy_server_writes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "PATIENCE_S", 0.05)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", WRITER, str(path)]
    with subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        ledger, seen, reads = FollowedLedger(path), 0, 0
        end_s = time.monotonic() + 2.0
        while time.monotonic() < end_s:
            if reads % 3 == 0:  # a server pauses between its turns; this writer has no turns
                writer.send_signal(signal.SIGSTOP)
                time.sleep(2 * following.CLOCK_S)
            try:
                found = ledger.after(seen, 100)
            except FollowError:
                continue
            finally:
                writer.send_signal(signal.SIGCONT)
                reads += 1
            assert [(n.seq, n.change) for n in found] == [(n, lost(n)) for n in range(seen + 1, seen + 1 + len(found))]
            seen += len(found)
        writer.kill()
    assert seen


def test_ledger_that_is_not_there_yet_is_empty(path: Path) -> None:
    assert FollowedLedger(path).after(0, 10) == []


def test_ledger_that_cannot_be_read_says_why(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "PATIENCE_S", 0.1)
    path.write_bytes(b"no database" * 100)
    with pytest.raises(FollowError, match="not a database"):
        FollowedLedger(path).after(0, 10)
    path.with_name("ledger.db-journal").write_bytes(b"unfinished")
    with pytest.raises(FollowError, match="ended while it wrote"):
        FollowedLedger(path).after(0, 10)
