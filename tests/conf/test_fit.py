"""Settings that follow others are fitted when a configuration is composed."""

import pytest

from conf.compose.fit import fit
from conf.schema import RolloutConfig, RunConfig, TrainerConfig
from conf.shapes import layout_of
from trainer.learn.balance import Capacity


@pytest.mark.parametrize(
    ("layout", "tokens"),
    [
        ({}, 18_432),
        ({"tp": 2, "sequence_parallel": True}, 18_432),
        ({"cp": 5}, 18_440),
        ({"tp": 5, "cp": 3, "sequence_parallel": True}, 18_450),
    ],
)
def test_a_microbatch_has_room_for_the_longest_trajectory_as_the_trainer_shards_it(layout: dict[str, int], tokens: int) -> None:
    rollout = RolloutConfig(max_completion_tokens=16_384)
    config = RunConfig(rollout=rollout, trainer=TrainerConfig(**layout))  # type: ignore[arg-type]
    longest = config.data.max_prompt_tokens + config.rollout.max_completion_tokens
    fit(config)
    assert config.trainer.tokens_per_microbatch == tokens
    capacity = Capacity.of(layout_of(config.trainer), config.trainer.tokens_per_microbatch)
    assert -(-longest // capacity.sequence_multiple) * capacity.sequence_multiple <= capacity.tokens


def test_a_microbatch_that_has_room_stays_as_it_is() -> None:
    config = RunConfig(trainer=TrainerConfig(tokens_per_microbatch=30_000))
    assert fit(config) == []
    assert config.trainer.tokens_per_microbatch == 30_000


def test_each_setting_that_is_changed_is_named_with_both_values_and_the_reason() -> None:
    config = RunConfig(trainer=TrainerConfig(steps=2, warmup_steps=10, tokens_per_microbatch=100))
    microbatch, warmup = fit(config)
    longest = config.data.max_prompt_tokens + config.rollout.max_completion_tokens
    assert microbatch.startswith(f"trainer.tokens_per_microbatch=100 is raised to {longest}:")
    assert warmup == "trainer.warmup_steps=10 is lowered to 7: the run has 8 optimizer steps"


@pytest.mark.parametrize(("steps", "warmup"), [(1, 3), (2, 7), (3, 10), (100, 10)])
def test_the_warm_up_ends_before_the_run_does(steps: int, warmup: int) -> None:
    config = RunConfig(trainer=TrainerConfig(steps=steps, warmup_steps=10))
    fit(config)
    assert config.trainer.warmup_steps == warmup


def test_fitting_again_changes_nothing() -> None:
    config = RunConfig(trainer=TrainerConfig(steps=2, warmup_steps=10, cp=3))
    fit(config)
    fitted = (config.trainer.tokens_per_microbatch, config.trainer.warmup_steps)
    fit(config)
    assert (config.trainer.tokens_per_microbatch, config.trainer.warmup_steps) == fitted
