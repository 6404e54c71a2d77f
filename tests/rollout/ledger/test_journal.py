"""What was committed is there after any death; what is damaged is an error."""

import errno
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.ledger.changes import Durable, Extended
from rollout.ledger.file_system import is_network, kind_of
from rollout.ledger.journal import Journal, JournalDamaged, JournalError
from rollout.ledger.ledger import Ledger
from tests.rollout.builders import prompt, rules, segment
from tests.rollout.ledger.ledger_world import EVENTS, Walk, comparable

REPOSITORY = Path(__file__).resolve().parents[3]
WRITER = """
import sys
from rollout.ledger.changes import Lost, LostKind
from rollout.ledger.journal import Journal, JournalDamaged
from tests.rollout.builders import rules

journal = Journal(sys.argv[1], rules())
for n in range(1, 1_000_000):
    journal.append([Lost(kind=LostKind.STALE, tokens=n)])
    journal.commit()
    print(n, flush=True)
"""


def admitted(ledger: Ledger, journal: Journal, groups: int) -> None:
    for _ in range(groups):
        changes = ledger.admit(prompt(ledger.admitted))
        ledger.apply(*changes)
        journal.append(changes)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


@pytest.mark.parametrize("seed", range(1, 5))
def test_ledger_of_a_long_history_comes_back_equal_after_every_restart(path, seed):
    walk = Walk(random.Random(seed))
    world, journal, written = walk.world, Journal(path, walk.world.rules), 0
    for name in walk.chance.choices([*EVENTS], [*EVENTS.values()], k=250):
        getattr(walk, name)()
        journal.append(world.made[written:])
        journal.commit()
        written = len(world.made)
        if walk.chance.random() < 0.2:
            journal.close()
            journal = Journal(path, world.rules)
            replayed = Ledger.replay(world.rules, journal.read())
            assert repr(comparable(replayed.state)) == repr(comparable(world.ledger.state))
            assert not replayed.state.loaded, "a batch is read when it is asked for"
            for step in replayed.state.batches:
                for group in replayed.unloaded(step):
                    replayed.load(group, journal.group(group))
                world.check_batch(replayed.batch(step))
    assert sum(isinstance(change, Durable) for change in world.made) > 0
    journal.close()


def test_changes_that_were_not_committed_are_not_there(path):
    ledger = Ledger(rules())
    with Journal(path, ledger.rules) as journal:
        admitted(ledger, journal, 1)
        assert journal.commit() == 1
        admitted(ledger, journal, 1)
    with Journal(path, ledger.rules) as journal:
        assert Ledger.replay(ledger.rules, journal.read()).admitted == 1


def test_every_commit_that_was_announced_survives_kill_9(path):
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if int(line) >= 50:
            break
    process.send_signal(signal.SIGKILL)
    announced = int(line)
    for rest in process.stdout.read().split():
        announced = int(rest)
    process.wait()
    with Journal(path, rules()) as journal:
        found = [change.tokens for change in journal.read()]
    assert found == list(range(1, len(found) + 1))
    assert len(found) in (announced, announced + 1)  # it may have died between the commit and the announcement


def test_second_server_on_the_same_journal_is_refused(path):
    with Journal(path, rules()), pytest.raises(JournalError, match="another queue server of this run is alive"):
        Journal(path, rules())


def test_rules_that_the_bound_rests_on_cannot_change_in_a_run(path):
    Journal(path, rules()).close()
    with pytest.raises(JournalError, match="max_staleness was 1 and is 2"):
        Journal(path, rules(max_staleness=2))
    Journal(path, rules(total_steps=99, segment_tokens=3)).close()  # these may


def filled(path: Path) -> None:
    ledger = Ledger(rules(max_staleness=9))
    with Journal(path, ledger.rules) as journal:
        admitted(ledger, journal, 20)
        for _ in range(20):
            lease = ledger.leases.grant_segments("e", 1)[0]
            changes = ledger.report(lease.position, segment([0] * 8))[1]
            ledger.apply(*changes)
            journal.append(changes)
        journal.commit()


def test_truncated_file_is_an_error(path):
    filled(path)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(JournalError, match="damaged"), Journal(path, rules(max_staleness=9)) as journal:
        list(journal.read())


@pytest.mark.parametrize("where", [0.02, 0.3, 0.5, 0.7, 0.9])
def test_damaged_bytes_are_an_error_or_not_part_of_any_change(path, where):
    filled(path)
    with Journal(path, rules(max_staleness=9)) as journal:
        before = repr(list(journal.read()))
    with open(path, "r+b") as file:
        file.seek(int(where * path.stat().st_size))
        file.write(bytes(b ^ 0xFF for b in os.pread(file.fileno(), 64, file.tell())))
    try:
        with Journal(path, rules(max_staleness=9)) as journal:
            assert repr(list(journal.read())) == before
    except JournalError as error:
        assert str(path) in str(error)


@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM changes WHERE seq = 7",
        "UPDATE changes SET body = x'00' WHERE seq = 7",
        "UPDATE changes SET kind = 'X'",
        # the last byte of the engine's name: only the checksum can tell
        "UPDATE changes SET body = CAST(substr(body, 1, length(body) - 1) || x'37' AS BLOB) WHERE kind = 'Extended'",
    ],
)
def test_missing_or_altered_change_is_an_error(path, damage):
    filled(path)
    with sqlite3.connect(path) as db:
        db.execute(damage)
    db.close()
    with pytest.raises(JournalError, match="damaged"), Journal(path, rules(max_staleness=9)) as journal:
        list(journal.read())


def test_file_that_is_no_journal_is_an_error(path):
    path.write_text("not a database, but long enough to be taken for one" * 100)
    with pytest.raises(JournalError, match="damaged"):
        Journal(path, rules())


def test_folder_that_is_not_there_is_an_error_that_names_it(tmp_path):
    with pytest.raises(JournalError, match="no/such"):
        Journal(tmp_path / "no/such/ledger.db", rules())


def test_full_disk_is_an_error_and_what_was_committed_before_stays(path):
    ledger = Ledger(rules(max_staleness=9))
    with Journal(path, ledger.rules) as journal:
        admitted(ledger, journal, 1)
        journal.commit()
        pages = journal._db.execute("PRAGMA page_count").fetchone()[0]
        journal._db.execute(f"PRAGMA max_page_count={pages + 2}")
        admitted(ledger, journal, 19)
        journal.append(ledger.report(ledger.leases.grant_segments("e", 1)[0].position, segment([0] * 8))[1] * 1000)
        with pytest.raises(JournalError, match="full"):
            journal.commit()
    with Journal(path, ledger.rules) as journal:
        assert Ledger.replay(ledger.rules, journal.read()).admitted == 1


@pytest.mark.parametrize("word", [b"CREATE TABLE meta", b"CREATE TABLE changes", b"CREATE INDEX", b"kind TEXT", b"value TEXT"])
def test_damaged_names_of_tables_and_columns_are_an_error_that_names_the_file(path, word):
    filled(path)
    data = path.read_bytes()
    assert word in data
    path.write_bytes(data.replace(word, word[:3] + b"\xe8" + word[4:]))
    with pytest.raises(JournalDamaged, match="is damaged"), Journal(path, rules(max_staleness=9)) as journal:
        list(journal.read())


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[bytes, str]:
    """The bytes of a filled journal, and what it says."""
    path = tmp_path_factory.mktemp("journal") / "ledger.db"
    filled(path)
    with Journal(path, rules(max_staleness=9)) as journal:
        return path.read_bytes(), repr(list(journal.read()))


def said_by(data: bytes, rollback: bytes = b"") -> str | None:
    """What a journal with these bytes says; None if it is refused as damaged or unreadable."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.db"
        path.write_bytes(data)
        path.with_name("ledger.db-journal").write_bytes(rollback)
        try:
            with Journal(path, rules(max_staleness=9)) as journal:
                return repr(list(journal.read()))
        except JournalError as error:
            assert str(path) in str(error)
            return None


@settings(deadline=None, max_examples=60)
@given(share=st.floats(0, 1, exclude_max=True))
def test_file_cut_anywhere_is_an_error(whole, share):
    data, _ = whole
    assert said_by(data[: int(share * len(data))]) is None


@settings(deadline=None, max_examples=150)
@given(flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 7)), min_size=1, max_size=3))
def test_flipped_bits_are_an_error_or_in_no_change(whole, flips):
    data, said = bytearray(whole[0]), whole[1]
    for share, bit in flips:
        data[int(share * len(data))] ^= 1 << bit
    assert said_by(bytes(data)) in (None, said)


@pytest.fixture(scope="module")
def died_writing(tmp_path_factory) -> tuple[bytes, bytes, str]:
    """The file and its rollback journal when a server died in a commit, half of which is in the file; and what was committed."""
    path = tmp_path_factory.mktemp("journal") / "ledger.db"
    filled(path)
    with Journal(path, rules(max_staleness=9)) as journal:
        said, written = repr(list(journal.read())), path.read_bytes()
        journal._db.execute("PRAGMA cache_size=2")  # pages: so it writes before the commit
        journal._db.execute("BEGIN IMMEDIATE")
        journal._write([Extended(group, 0, segment([0] * 500, "cut")) for group in range(10)] * 20)
        found = path.read_bytes(), path.with_name("ledger.db-journal").read_bytes()
        assert found[0] != written and found[1]
    return *found, said


def test_commit_that_a_server_died_in_did_not_happen(died_writing):
    data, rollback, said = died_writing
    assert said_by(data, rollback) == said


@settings(deadline=None, max_examples=100)
@given(share=st.floats(0, 1, exclude_max=True), kept=st.floats(0, 1), bit=st.integers(0, 7))
def test_damaged_rollback_journal_is_an_error_or_nothing_is_lost(died_writing, share, kept, bit):
    data, rollback, said = died_writing
    rollback = bytearray(rollback)
    rollback[int(share * len(rollback))] ^= 1 << bit
    assert said_by(data, bytes(rollback[: int(kept * len(rollback))])) in (None, said)
    assert said_by(data, bytes(rollback)) in (None, said)


def test_rollback_journal_whose_file_is_gone_is_an_error(path, died_writing):
    path.with_name("ledger.db-journal").write_bytes(died_writing[1])
    with pytest.raises(JournalError, match=r"only ledger\.db-journal is left"):
        Journal(path, rules())
    assert not path.exists()


def test_file_system_is_told_by_the_longest_mount():
    mounts = "\n".join(
        [
            "1 0 8:1 / / rw - ext4 /dev/sda rw",
            "2 1 0:1 / /scratch rw - lustre mds:/x rw",
            "3 2 0:2 / /scratch/my\\040home rw shared:1 - nfs4 host:/y rw",
            "4 1 0:3 / /projects rw - fuse.glusterfs host:/z rw",
        ]
    )
    found = [kind_of(Path(p), mounts) for p in ("/tmp", "/scratch/run", "/scratch/my home/run", "/projects", "/scratchy")]
    assert found == ["ext4", "lustre", "nfs4", "fuse.glusterfs", "ext4"]
    assert [is_network(kind) for kind in found] == [False, True, True, True, False]


def test_folder_without_locks_is_refused_with_what_to_do(path, monkeypatch):
    def no_lock(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.lockf", no_lock)
    with pytest.raises(JournalError, match="-o flock"):
        Journal(path, rules())
