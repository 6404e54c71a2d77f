"""A run whose trainer is killed and started again is the run that nobody touched: weights, prompts, figures."""

import asyncio
import random
import signal
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from rollout.checkpoint_files import complete, newest_version
from rollout.ledger import past_batches
from rollout.ledger.records import Position
from rollout.ledger.wire import pack
from tests.rollout.stage import free_ports
from tests.trainer import ranks
from tests.trainer.stand_in_run import CONCURRENCY, Run, make_run
from trainer.metrics.table import find

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def finish(run: Run, *deaths: tuple[int, float]) -> Run:
    """Runs to the end, killed on the way: the trainer so many seconds after a step; then the queue server too."""
    for death in deaths:
        with run.queue(), pytest.raises(ranks.RankFailed, match=ranks.ONE_WAS_KILLED):
            run.train(strike=(*death, signal.SIGKILL))
    with run.queue():
        run.train()
    return run


def prompts(run: Run) -> dict[int, tuple[int, ...]]:
    """The prompt of each training group, as it was sent to the engine."""
    return {position.group: tokens for position, tokens in run.generated if position.offset == 0 and position.group >= 0}


def figures(run: Run) -> list[dict[str, float]]:
    """Those of each step that do not depend on the clock."""
    families = ("reward/", "lag/", "loss/", "kl/", "clip/", "entropy/", "completion/", "trajectories/", "reference/", "grad_norm")
    return [{k: v for k, v in line.items() if k.startswith(families)} | {"step": line["step"]} for line in run.metrics()]


def by_schedule(run: Run) -> Run:
    """The version a group is admitted at samples it; of every other completion the later tokens are the next version's."""
    steps_ahead, groups, half = run.config.rollout.max_staleness, run.config.algo.groups_per_step, 8

    def sampled_by(position: Position) -> int:
        step = position.group // groups
        later = position.trajectory % 2 == 1 and position.offset >= half
        return min(step, max(0, step - steps_ahead) + later)

    run.sampled_by = sampled_by
    return run


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_a_killed_and_resumed_run_ends_with_the_same_weights(tmp_path: Path, max_staleness: int) -> None:
    """With a bound of 0 on any clock; with more where no clock decides which version samples a token."""
    chance = random.Random()
    deaths = [(chance.randint(1, 3), chance.uniform(0.0, 0.6)), (chance.randint(4, 5), chance.uniform(0.0, 0.6))]
    print(f"killed at (step, s later): {deaths}")
    changes = {"data__heldout": [], "algo__reference_refresh_steps": 3, "trainer__steps": 9}
    runs = [make_run(tmp_path / name, free_ports(40), rollout__max_staleness=max_staleness, **changes) for name in ("a", "b")]
    plain, killed = map(by_schedule, runs) if max_staleness else runs
    finish(plain)
    finish(killed, *deaths)
    before, after = plain.weights(), killed.weights()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert figures(plain) == figures(killed)
    assert {name for line in plain.metrics() for name in line if find(name) is None} == set()
    lines = plain.metrics()[-3:]
    assert [line["lag/max_versions"] for line in lines] == [max_staleness] * 3
    assert all((line["trajectories/multi_version"] > 0) == (max_staleness > 0) for line in lines)
    # The stream of prompts skips and repeats nothing.
    steps, groups = plain.config.trainer.steps, plain.config.algo.groups_per_step
    assert prompts(plain) == prompts(killed) and set(prompts(plain)) == set(range(steps * groups))
    # What was recorded is not sampled again: at most what was in flight when the engine was stopped.
    again = [count - 1 for count in Counter(position for position, _ in killed.generated).values()]
    assert sum(again) <= CONCURRENCY * len(deaths)
    assert set(Counter(position for position, _ in plain.generated).values()) == {1}
    assert Position(group=0, trajectory=0, offset=plain.config.rollout.segment_tokens) in dict(plain.generated)


def test_a_run_whose_newest_checkpoint_is_damaged_goes_on_from_the_one_before(tmp_path: Path) -> None:
    plain, damaged = (make_run(tmp_path / name, free_ports(40), data__heldout=[]) for name in ("a", "b"))
    finish(plain)
    with damaged.queue(), pytest.raises(ranks.RankFailed, match=ranks.ONE_WAS_KILLED):
        damaged.train(strike=(5, 0.2, signal.SIGKILL))
    _, newest = complete(damaged.path / "checkpoints")[-1]
    shard = max(newest.glob("*.distcp"), key=lambda file: file.stat().st_size)
    shard.write_bytes(shard.read_bytes()[:-8] + b"\x80" * 8)
    finish(damaged)
    assert newest.with_name(f"{newest.name}.damaged").exists() and newest.exists()  # written again, whole
    before, after = plain.weights(), damaged.weights()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert figures(plain) == figures(damaged)


@pytest.mark.parametrize(("max_staleness", "window"), [(1, 0), (2, 1)])
def test_batches_taken_before_a_kill_are_served_again_token_for_token(tmp_path: Path, max_staleness: int, window: int) -> None:
    """On any clock: here it has pushes fall into completions."""
    settings = {"rollout__max_staleness": max_staleness, "rollout__window": window, "trainer__checkpoint_every": 3}
    run = make_run(tmp_path, free_ports(40), data__heldout=[], **settings)
    run.token_s = 0.05
    with run.queue(), pytest.raises(ranks.RankFailed, match=ranks.ONE_WAS_KILLED):
        run.train(strike=(5, 0.1, signal.SIGKILL))
    taken = past_batches.steps(run.path, run.config)
    before = dict(zip(taken, past_batches.batches(run.path, run.config, taken), strict=True))
    assert any(np.ptp(t.versions[t.sampled]) for batch in before.values() for t in batch.trajectories)
    lines = {line["step"]: line for line in figures(run)}
    resumed_from = newest_version(run.path / "checkpoints")
    finish(run)
    served = [step for step in past_batches.steps(run.path, run.config) if step in before and step >= resumed_from]
    assert served
    for step, batch in zip(served, past_batches.batches(run.path, run.config, served), strict=True):
        assert pack(batch) == pack(before[step])
    # And they are what the trainer was served, as their losses and gradients show.
    again = [line for line in figures(run) if line["step"] in lines and line["step"] > resumed_from]
    assert again and again == [lines[line["step"]] for line in again]


def test_told_to_leave_while_it_waits_for_a_batch_that_does_not_come_the_trainer_saves_and_goes(tmp_path: Path) -> None:
    run = make_run(tmp_path, free_ports(40), data__heldout=[], trainer__checkpoint_every=0)
    nothing_more = asyncio.Event()

    async def until_the_trainer_has_left(position: Position) -> None:
        if position.group >= 3 * run.config.algo.groups_per_step:
            await nothing_more.wait()

    run.hold = until_the_trainer_has_left
    with run.queue():
        run.train(strike=(3, 0.5, signal.SIGUSR1))
    assert [line["step"] for line in run.metrics()] == [1, 2, 3]
    assert complete(run.path / "checkpoints")[0][0] == 3
    run.hold = None
    finish(run)
    assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4, 5, 6]


def test_a_run_whose_model_folder_is_moved_away_still_saves_its_last_weights(tmp_path: Path) -> None:
    run = make_run(tmp_path, free_ports(40), data__heldout=[])
    model = Path(run.config.model.path)
    files = {path.name for path in model.iterdir()}

    async def move_the_model_away(position: Position) -> None:
        if position.group >= 2 * run.config.algo.groups_per_step and model.exists():
            model.rename(tmp_path / "elsewhere")

    run.hold = move_the_model_away
    finish(run)
    assert not model.exists()
    assert {path.name for path in (run.path / "hf").iterdir()} >= files - {"model.safetensors"}
    assert run.weights()


def test_training_goes_on_while_an_evaluation_is_answered(tmp_path: Path) -> None:
    run = make_run(tmp_path, free_ports(40), trainer__eval_every=2, trainer__steps=10)

    def last_step() -> int:
        return max((line["step"] for line in run.metrics()), default=-1)

    async def until_training_has_gone_on(position: Position) -> None:
        """Keeps the first evaluation that is not waited for back for two steps."""
        asked = last_step()
        while position.group < 0 and position.offset == 0 and 1 <= asked <= 2 and last_step() < asked + 2:
            await asyncio.sleep(0.01)

    run.hold = until_training_has_gone_on
    finish(run)
    lines = {line["step"]: line for line in run.metrics()}
    assert list(lines) == list(range(11))
    evaluated = {step: line["eval/version"] for step, line in lines.items() if "eval/version" in line}
    assert evaluated.pop(0) == 0 and evaluated.pop(10) == 10
    first = min(evaluated)
    assert evaluated[first] == 2 and first >= 3
    for step in evaluated:
        line = lines[step]
        assert line["eval/version"] <= line["eval/version_min"] <= line["eval/version_max"] <= step
        assert line["eval/tokens"] >= 3 and 0 <= line["eval/pass_rate"] <= 1 and "time/eval_s" not in line
    assert lines[first]["eval/version_max"] > 2  # it was sampled after the push it had to wait for
