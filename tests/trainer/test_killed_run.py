"""A run whose trainer is killed and started again is the run that nobody touched: weights, prompts, figures."""

import asyncio
import random
import signal
from collections import Counter
from pathlib import Path

import pytest
import torch

from rollout.types import Position
from tests.rollout.stage import free_ports
from tests.trainer import ranks
from tests.trainer.stand_in_run import CONCURRENCY, Run, make_run
from trainer.checkpoint import complete

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def finish(run: Run, *deaths: tuple[int, float]) -> Run:
    """Runs to the end, killed on the way: the trainer so many seconds after a step; then the queue server too."""
    for death in deaths:
        with run.queue(), pytest.raises(ranks.RankFailed, match=r"rank 0 died|Connection closed by peer"):
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


def test_a_killed_and_resumed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    chance = random.Random()
    deaths = [(chance.randint(1, 3), chance.uniform(0.0, 0.6)), (chance.randint(4, 5), chance.uniform(0.0, 0.6))]
    print(f"killed at (step, s later): {deaths}")
    changes = {"data__heldout": [], "algo__reference_refresh_steps": 3, "trainer__steps": 9}
    plain = finish(make_run(tmp_path / "plain", free_ports(40), **changes))
    killed = finish(make_run(tmp_path / "killed", free_ports(40), **changes), *deaths)
    before, after = plain.weights(), killed.weights()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert figures(plain) == figures(killed)
    # The stream of prompts skips and repeats nothing.
    steps, groups = plain.config.trainer.steps, plain.config.algo.groups_per_step
    assert prompts(plain) == prompts(killed) and set(prompts(plain)) == set(range(steps * groups))
    # What was recorded is not sampled again: at most what was in flight when the engine was stopped.
    again = [count - 1 for count in Counter(position for position, _ in killed.generated).values()]
    assert sum(again) <= CONCURRENCY * len(deaths)
    assert set(Counter(position for position, _ in plain.generated).values()) == {1}
    assert Position(group=0, trajectory=0, offset=plain.config.rollout.segment_tokens) in dict(plain.generated)


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
