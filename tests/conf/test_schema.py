"""What the schema refuses, and that each refusal names the setting."""

import math
from collections.abc import Callable

import pytest

from conf.schema import CHOICES, ConfigError, DataConfig, ModelConfig, RunConfig, check, check_resumed


def good() -> RunConfig:
    return RunConfig(model=ModelConfig(path="m"), data=DataConfig(train=["t.jsonl"]))


def changed(key: str, value: object) -> RunConfig:
    config = good()
    *path, leaf = key.split(".")
    node: object = config
    for part in path:
        node = getattr(node, part)
    setattr(node, leaf, value)
    return config


def test_defaults_are_the_job_of_256_gpus_and_only_lack_tokens_for_the_longest_trajectory() -> None:
    check(changed("trainer.tokens_per_microbatch", 18_432))
    with pytest.raises(ConfigError, match=r"trainer\.tokens_per_microbatch"):
        check(good())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, "nonsense") for key in CHOICES),
        ("trainer.tp", 0),
        ("rollout.engines", 0),
        ("cluster.nodes", 0),
        ("rollout.max_staleness", -1),
        ("cluster.base_port", -1),
        ("trainer.lr", 0.0),
        ("rollout.temperature", 0.0),
        ("trainer.lr", math.inf),
        ("trainer.clip_grad", math.nan),
        ("trainer.adam_beta1", 1.5),
        ("trainer.min_lr_fraction", 2.0),
        ("algo.clip_low", 1.5),
        ("algo.max_drops_per_step", -1),
        ("trainer.seed", -1),
        ("cluster.base_port", 70_000),
        ("trainer.warmup_steps", 600 * 4),
        ("trainer.push_s", 1300.0),
        ("trainer.stall_s", 1300.0),
        ("rollout.engine_start_s", 1000.0),
        ("name", ""),
        ("name", "a/b"),
        ("data.train", []),
        ("algo.completions_per_group", 1),
        ("algo.minibatches", 3),
        ("rollout.max_total_tokens", 1000),
    ],
)
def test_impossible_value_is_refused_by_name(key: str, value: object) -> None:
    config = changed(key, value)
    config.trainer.tokens_per_microbatch = max(config.trainer.tokens_per_microbatch, 18_432)
    with pytest.raises(ConfigError, match=key):
        check(config)


def window_too_large(config: RunConfig) -> None:
    config.rollout.window = 513
    config.rollout.max_staleness = 1


def stale_without_correction(config: RunConfig) -> None:
    config.algo.behaviour_correction = "none"


@pytest.mark.parametrize(
    ("change", "message"),
    [(window_too_large, "rollout.window=513 costs 2 version"), (stale_without_correction, "algo.behaviour_correction=none")],
)
def test_settings_that_contradict_one_another_are_refused(change: Callable[[RunConfig], None], message: str) -> None:
    config = changed("trainer.tokens_per_microbatch", 18_432)
    change(config)
    with pytest.raises(ConfigError, match=message):
        check(config)


def test_without_staleness_no_correction_is_needed() -> None:
    config = changed("trainer.tokens_per_microbatch", 18_432)
    config.algo.behaviour_correction = "none"
    config.rollout.max_staleness = 0
    check(config)


def test_k1_in_the_loss_is_refused_since_it_regularises_nothing() -> None:
    config = changed("trainer.tokens_per_microbatch", 18_432)
    config.algo.kl_estimator, config.algo.kl_coef = "k1", 0.1
    with pytest.raises(ConfigError, match="kl_estimator=k1"):
        check(config)


def test_run_goes_on_only_under_the_rules_it_was_begun_with() -> None:
    stored = changed("trainer.steps", 10)
    check_resumed(stored, changed("trainer.steps", 20))
    with pytest.raises(ConfigError, match=r"rollout.max_staleness=1: the run was begun with 2"):
        check_resumed(stored, changed("rollout.max_staleness", 1))
