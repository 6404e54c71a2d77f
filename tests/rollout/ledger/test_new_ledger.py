"""A run whose ledger is damaged goes on from its checkpoint; what is lost is counted and said."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from rollout.checkpoint_files import write_sums
from rollout.ledger.changes import DropKind
from rollout.ledger.journal import Journal, JournalDamaged, JournalError
from rollout.ledger.ledger import Ledger
from rollout.ledger.new_ledger import NewLedgerError, newest_checkpoint, renew
from tests.rollout.builders import prompt, rules, segment, verdict

GROUPS = rules().groups_per_step


class Story:
    """A run of a few steps, its checkpoint, and steps after it."""

    def __init__(self, run: Path) -> None:
        self.run, self.path, self.rules = run, run / "ledger.db", rules()
        self.ledger = Ledger(self.rules)
        with Journal(self.path, self.rules) as self.journal:
            self.do(self.ledger.published(0, ["e@1"]))
            self.step(0)
            self.step(1)
            self.fill()
            self.account = self.ledger.summary()
            self.save(2)
            self.step(2)

    def do(self, changes) -> None:
        self.ledger.apply(*changes)
        self.journal.append(changes)
        self.journal.commit()

    def fill(self, finish: str = "cut") -> None:
        """All that may be admitted, each trajectory a token longer."""
        while self.ledger.may_admit():
            self.do(self.ledger.admit(prompt(self.ledger.admitted)))
        for lease in self.ledger.lease_segments("e@1", 1000):
            self.do(self.ledger.report(lease.position, segment([self.ledger.version], finish), "e@1")[1])

    def step(self, step: int) -> None:
        self.fill()
        self.fill("stop")
        for lease in self.ledger.lease_grading("judge", 1000):
            self.do(self.ledger.grade(lease.position, verdict())[1])
        self.do(self.ledger.take(step))
        self.do(self.ledger.advance(step + 1, ["e@1"]))

    def save(self, version: int) -> None:
        folder = self.run / "checkpoints" / f"version-{version}"
        folder.mkdir(parents=True)
        (folder / "kestrel.json").write_text(json.dumps({"version": version, "extra": {"ledger": self.account}}))
        (folder / "shard").write_bytes(b"weights")
        write_sums(folder, {})

    def damage(self) -> None:
        data = bytearray(self.path.read_bytes())
        data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
        self.path.write_bytes(data)


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path)


def test_a_run_goes_on_from_its_checkpoint_and_what_is_lost_is_counted(story: Story) -> None:
    account, run = story.account, story.run
    lost = account["admitted_groups"] - 2 * GROUPS
    assert lost > 0 and account["waiting_tokens"] > 0
    story.damage()
    with (
        pytest.raises(JournalDamaged, match=f"rollout.ledger.new_ledger --run {run}"),
        Journal(story.path, story.rules) as journal,
    ):
        list(journal.read())
    said = renew(run, story.rules)
    assert f"{lost} groups that were admitted" in said and f"{account['waiting_tokens']} tokens" in said
    assert f"make run resume={run}" in said
    assert (run / "ledger.db.damaged-0").exists()
    with Journal(story.path, story.rules) as journal:
        ledger = Ledger.replay(story.rules, journal.read())
        counts = ledger.summary()
        assert counts["trained_tokens"] == account["trained_tokens"]
        assert counts["dropped_groups"] == {DropKind.LEDGER_LOST: lost}
        assert counts["dropped_tokens"] == {DropKind.LEDGER_LOST: account["waiting_tokens"]}
        # The trainer goes on from its checkpoint, and no prompt that it was trained on comes again.
        assert ledger.rewind(2) == () and ledger.admitted == account["admitted_groups"]
        story.ledger, story.journal = ledger, journal
        story.do(ledger.published(2, ["e@1"]))
        story.step(2)
        story.step(3)
        assert min(ledger.state.batches[2]) >= 2 * GROUPS
        assert ledger.batch(3).step == 3


def test_a_ledger_that_is_whole_is_left_alone(story: Story) -> None:
    before = story.path.read_bytes()
    with pytest.raises(NewLedgerError, match="is undamaged"):
        renew(story.run, story.rules)
    assert story.path.read_bytes() == before


def test_a_ledger_in_use_is_left_alone(story: Story) -> None:
    with Journal(story.path, story.rules), pytest.raises(JournalError, match="in use"):
        renew(story.run, story.rules)


@pytest.mark.parametrize("was", ["gone", "older than the checkpoint", "of another format"])
def test_a_ledger_that_lacks_what_the_checkpoint_knows_is_replaced(story: Story, was: str) -> None:
    if was == "of another format":
        with closing(sqlite3.connect(story.path)) as db, db:
            db.execute("UPDATE meta SET value = 'kestrel-ledger-0' WHERE key = 'format'")
        with pytest.raises(JournalError, match=r"'kestrel-ledger-0'.*rollout.ledger.new_ledger"):
            Journal(story.path, story.rules)
    else:
        story.path.unlink()
    if was == "older than the checkpoint":
        Journal(story.path, story.rules).close()
    assert "starts again at version 2" in renew(story.run, story.rules)
    with Journal(story.path, story.rules) as journal:
        assert Ledger.replay(story.rules, journal.read()).version == 2


def test_without_a_checkpoint_there_is_nothing_to_go_on_from(tmp_path: Path) -> None:
    with pytest.raises(NewLedgerError, match="start a new run"):
        newest_checkpoint(tmp_path)


@pytest.mark.parametrize("damage", ["{", "[]", '{"version": 2}', None])
def test_a_checkpoint_whose_record_is_damaged_is_named(story: Story, damage: str | None) -> None:
    story.damage()
    record = story.run / "checkpoints/version-2/kestrel.json"
    record.unlink()
    if damage is not None:
        record.write_text(damage)
    write_sums(record.parent, {})
    with pytest.raises(NewLedgerError, match=r"version-2/kestrel.json has no account of the ledger"):
        renew(story.run, story.rules)


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(story: Story) -> None:
    story.save(3)
    (story.run / "checkpoints/version-3/kestrel.json").write_text("flipped")
    story.damage()
    assert "starts again at version 2" in renew(story.run, story.rules)


def test_damage_in_every_checkpoint_is_named(story: Story) -> None:
    (story.run / "checkpoints/version-2/kestrel.json").unlink()
    with pytest.raises(NewLedgerError, match=r"version-2/kestrel.json cannot be read .* holds no undamaged checkpoint"):
        newest_checkpoint(story.run)
