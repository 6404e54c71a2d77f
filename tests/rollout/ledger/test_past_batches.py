"""What a run's ledger keeps can be read when the run is over: whole batches, or why not."""

from pathlib import Path

import pytest

from conf.schema import AlgoConfig, RolloutConfig, RunConfig, TrainerConfig
from rollout.ledger import past_batches
from rollout.ledger.journal import Journal
from rollout.ledger.ledger import Ledger
from rollout.ledger.past_batches import NoSuchBatch
from rollout.ledger.records import Batch
from rollout.ledger.rules import Rules
from tests.rollout.builders import prompt, segment, verdict

CONFIG = RunConfig(
    algo=AlgoConfig(groups_per_step=2, completions_per_group=2),
    rollout=RolloutConfig(max_staleness=1, segment_tokens=4, max_completion_tokens=8),
    trainer=TrainerConfig(steps=4),
)


def record(run: Path, steps: int, forgotten: int) -> list[Batch]:
    """A run of so many steps whose checkpoint covers the first ones; one more group is left half done."""
    ledger = Ledger(Rules.of(CONFIG))
    batches = []
    with Journal(run / "ledger.db", ledger.rules) as journal:

        def do(changes) -> None:
            ledger.apply(*changes)
            journal.append(changes)
            journal.commit()

        do(ledger.published(0, ["e0@1"]))
        for step in range(steps):
            while ledger.may_admit():
                do(ledger.admit(prompt(ledger.admitted)))
            for lease in ledger.lease_segments("e0@1", 4):
                do(ledger.report(lease.position, segment([step, step], first_token=10 * step))[1])
            for lease in ledger.lease_grading("judge", 100):
                do(ledger.grade(lease.position, verdict(step))[1])
            do(ledger.take(step) or ())
            batches.append(ledger.batch(step))
            do(ledger.advance(step + 1, ["e0@1"]))
        if forgotten:
            do(ledger.durable(forgotten))
    return batches


def same(a: Batch, b: Batch) -> bool:
    pairs = zip(a.trajectories, b.trajectories, strict=True)
    return [g.index for g in a.groups] == [g.index for g in b.groups] and all(
        (x.tokens == y.tokens).all() and (x.versions == y.versions).all() and x.reward == y.reward for x, y in pairs
    )


def test_batches_are_read_as_they_were_trained_on(tmp_path: Path) -> None:
    made = record(tmp_path, steps=4, forgotten=0)
    assert past_batches.steps(tmp_path, CONFIG) == [0, 1, 2, 3]
    assert [same(a, b) for a, b in zip(made, past_batches.batches(tmp_path, CONFIG, [0, 1, 2, 3]), strict=True)] == [True] * 4
    (third,) = past_batches.batches(tmp_path, CONFIG, [2])
    assert same(third, made[2])


def test_what_a_checkpoint_covers_is_forgotten(tmp_path: Path) -> None:
    made = record(tmp_path, steps=4, forgotten=2)
    assert past_batches.steps(tmp_path, CONFIG) == [2, 3]
    assert same(past_batches.batches(tmp_path, CONFIG, [3])[0], made[3])
    with pytest.raises(NoSuchBatch, match="holds no batch of step 1"):
        past_batches.batches(tmp_path, CONFIG, [3, 1])


def test_a_run_that_is_alive_or_recorded_nothing_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(NoSuchBatch, match="has recorded no batch"):
        past_batches.steps(tmp_path, CONFIG)
    with Journal(tmp_path / "ledger.db", Rules.of(CONFIG)), pytest.raises(NoSuchBatch, match=r"in use.*after its queue server"):
        past_batches.steps(tmp_path, CONFIG)
