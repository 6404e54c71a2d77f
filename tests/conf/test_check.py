"""What the schema refuses, and that each refusal names the setting."""

import math
import re
from collections.abc import Callable, Iterator

import pytest

from conf.compose.check import check, check_each, check_resumed, notes_on_resume
from conf.schema import RULES, ConfigError, DataConfig, ModelConfig, Rule, RunConfig


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


def test_the_defaults_pass_the_checks() -> None:
    check(good())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, "nonsense") for key, rule in RULES.items() if rule.choices),
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
        ("trainer.push_s", 1300.0),
        ("trainer.stall_s", 1300.0),
        ("rollout.engine_start_s", 1000.0),
        ("name", ""),
        ("name", "a/b"),
        ("data.train", []),
        ("trainer.eval_every", 5),
        ("algo.completions_per_group", 1),
        ("algo.minibatches", 3),
        ("rollout.max_total_tokens", 1000),
    ],
)
def test_impossible_value_is_refused_by_name(key: str, value: object) -> None:
    config = changed(key, value)
    with pytest.raises(ConfigError, match=key):
        check(config)


def wrong_numbers(rule: Rule) -> Iterator[float]:
    yield from (math.nan, math.inf, -math.inf)
    yield from (bound - 1 for bound in (rule.at_least, rule.above) if bound is not None)
    yield from (bound + 1 for bound in (rule.at_most, rule.below) if bound is not None)
    yield from (bound for bound in (rule.above, rule.below) if bound is not None)


@pytest.mark.parametrize("key", [key for key, rule in RULES.items() if rule.bounds])
def test_every_number_outside_its_bounds_is_refused_with_setting_value_and_bounds(key: str) -> None:
    check_each(changed("rollout.engines", 1))
    for value in wrong_numbers(RULES[key]):
        with pytest.raises(ConfigError, match=rf"^{re.escape(f'{key}={value}')}: must be .*{re.escape(RULES[key].bounds)}$"):
            check_each(changed(key, value))


@pytest.mark.parametrize("key", [key for key, rule in RULES.items() if rule.choices])
def test_every_choice_takes_what_it_lists_and_refuses_the_rest_with_the_list(key: str) -> None:
    for name in RULES[key].choices:
        check_each(changed(key, name))
    with pytest.raises(ConfigError, match=re.escape(f"{key}='nonsense': choose one of ")) as caught:
        check_each(changed(key, "nonsense"))
    assert all(repr(name) in str(caught.value) for name in RULES[key].choices)


def window_too_large(config: RunConfig) -> None:
    config.rollout.window = 513
    config.rollout.max_staleness = 1


def stale_without_correction(config: RunConfig) -> None:
    config.algo.behaviour_correction = "none"


@pytest.mark.parametrize(
    ("change", "message"),
    [(window_too_large, "rollout.window=513 uses up 2 version"), (stale_without_correction, "algo.behaviour_correction=none")],
)
def test_settings_that_contradict_one_another_are_refused(change: Callable[[RunConfig], None], message: str) -> None:
    config = good()
    change(config)
    with pytest.raises(ConfigError, match=message):
        check(config)


def test_a_loss_of_the_users_own_may_correct_for_staleness_itself() -> None:
    config = good()
    config.algo.behaviour_correction, config.algo.policy_loss = "none", "my_loss:dppo"
    check(config)


def test_without_staleness_no_correction_is_needed() -> None:
    config = good()
    config.algo.behaviour_correction = "none"
    config.rollout.max_staleness = 0
    check(config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kl_estimator": "k1", "kl_coef": 0.1}, "kl_estimator=k1 in the loss has a gradient of zero"),
        ({"kl_in": "reward"}, "kl_in=reward does nothing at algo.kl_coef=0"),
        ({"dual_clip": 1.0}, "dual_clip=1.0: must be above 1"),
        ({"dual_clip": 3.0, "policy_loss": "cispo"}, "dual_clip=3.0 works only with algo.policy_loss=ppo"),
        (
            {"dual_clip": 3.0, "policy_loss": "gspo", "behaviour_level": "geometric"},
            "dual_clip=3.0 works only with algo.policy_loss=ppo",
        ),
        ({"behaviour_floor": 0.5}, "behaviour_floor=0.5 is used only by algo.behaviour_correction=mask"),
        ({"behaviour_floor": 2.0, "behaviour_correction": "mask"}, "behaviour_floor=2.0 must be below algo.behaviour_cap=2.0"),
        ({"policy_loss": "gspo"}, "set algo.behaviour_level=geometric or sequence"),
        ({"overlong_buffer_fraction": 1.0}, "overlong_buffer_fraction=1.0: must be at least 0 and below 1"),
        ({"entropy_coef": float("inf")}, "entropy_coef=inf: must be a finite number"),
        ({"reward_weight": 0}, "algo.reward_weight=0 without algo.teacher"),
        ({"teacher_on": "engine"}, "algo.teacher_on=engine without algo.teacher"),
        ({"teacher_on": "engine", "teacher": "http://host:1"}, "algo.teacher_on=engine has no effect"),
        ({"teacher": "folder", "kl_coef": 0.1}, "takes the place of the reference policy"),
    ],
)
def test_objectives_that_would_do_nothing_or_harm_are_refused(settings: dict[str, object], message: str) -> None:
    config = good()
    for key, value in settings.items():
        setattr(config.algo, key, value)
    with pytest.raises(ConfigError, match=message):
        check(config)


@pytest.mark.parametrize(
    "settings",
    [
        {"kl_in": "reward", "kl_estimator": "k1", "kl_coef": 0.1},
        {"policy_loss": "gspo", "behaviour_level": "sequence"},
        {"behaviour_correction": "mask", "behaviour_floor": 0.5},
        {"dual_clip": 3.0},
        {"teacher": "folder", "reward_weight": 0},
        {"teacher": "folder", "teacher_on": "engine", "kl_coef": 0.1},
        {"teacher": "https://host:1/v", "kl_coef": 0.1},
    ],
)
def test_objectives_that_belong_together_are_taken(settings: dict[str, object]) -> None:
    config = good()
    for key, value in settings.items():
        setattr(config.algo, key, value)
    check(config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cp": 0}, "trainer.cp=0: must be at least 1"),
        ({"vpp": 2}, "trainer.vpp=2 needs trainer.pp above 1"),
        ({"sequence_parallel": True}, "trainer.sequence_parallel=true needs trainer.tp above 1"),
        ({"overlap_param_gather": True}, "needs trainer.overlap_grad_reduce=true"),
    ],
)
def test_layouts_that_cannot_be_are_refused(settings: dict[str, object], message: str) -> None:
    config = good()
    for key, value in settings.items():
        setattr(config.trainer, key, value)
    with pytest.raises(ConfigError, match=message):
        check(config)


def test_a_resume_with_other_steps_says_that_the_cosine_is_rescaled() -> None:
    stored, resumed = changed("trainer.steps", 50), changed("trainer.steps", 80)
    assert list(notes_on_resume(stored, resumed)) == []
    resumed.trainer.lr_schedule = "cosine"
    (said,) = notes_on_resume(stored, resumed)
    assert "trainer.steps=80: the run was begun with 50" in said and "now ends at step 80" in said
    assert list(notes_on_resume(resumed, resumed)) == []


def test_run_goes_on_only_under_the_rules_it_was_begun_with() -> None:
    stored = changed("trainer.steps", 10)
    check_resumed(stored, changed("trainer.steps", 20))
    with pytest.raises(ConfigError, match=r"rollout.max_staleness=1: the run was begun with 2"):
        check_resumed(stored, changed("rollout.max_staleness", 1))
    with pytest.raises(ConfigError, match=r"data.seed=1: the run was begun with 0"):
        check_resumed(stored, changed("data.seed", 1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"setup": ["module load cuda"]}, "cluster.setup=.* has no effect with cluster.kind=local"),
        ({"container": "image.sif"}, "cluster.container=image.sif has no effect with cluster.kind=local"),
        ({"srun_args": ["--mem=0"]}, "cluster.srun_args=.* has no effect with"),
        ({"requeues": 3}, "cluster.requeues=3 has no effect with"),
        ({"heartbeat_s": 10.0}, "cluster.heartbeat_s=10.0 has no effect with"),
        (
            {"kind": "slurm", "container_mounts": ["/data:/data"]},
            "cluster.container_mounts=.* has no effect without cluster.container",
        ),
        ({"kind": "slurm", "container_runtime": "apptainer"}, "cluster.container_runtime=apptainer has no effect without"),
        (
            {"kind": "slurm", "container": "i", "container_mounts": ["/a:/a,/b:/b"]},
            "'/a:/a,/b:/b' must be FROM:TO, without a comma",
        ),
        ({"kind": "slurm", "container": "i", "container_mounts": ["/data"]}, "'/data' must be FROM:TO"),
    ],
)
def test_cluster_setting_that_nothing_would_read_as_it_is_meant_is_refused(settings: dict[str, object], message: str) -> None:
    config = good()
    for key, value in settings.items():
        setattr(config.cluster, key, value)
    with pytest.raises(ConfigError, match=message):
        check(config)


def test_cluster_settings_are_taken_where_they_are_read() -> None:
    config = good()
    config.cluster.kind, config.cluster.setup, config.cluster.requeues = "slurm", ["module load cuda"], 3
    config.cluster.container, config.cluster.container_runtime = "i.sif", "apptainer"
    config.cluster.container_mounts = ["/data:/data:ro"]
    check(config)


def test_teacher_on_a_server_needs_the_temperature_at_which_it_answers() -> None:
    config = good()
    config.algo.teacher, config.rollout.temperature = "http://host:1", 0.7
    with pytest.raises(ConfigError, match=r"rollout.temperature=0.7 with a teacher on a server"):
        check(config)
    config.algo.teacher = "folder"
    check(config)


def test_run_that_was_begun_without_a_teacher_on_a_server_cannot_be_resumed_with_one() -> None:
    config, taught = good(), good()
    taught.algo.teacher = "http://host:1"
    check_resumed(taught, config)
    with pytest.raises(ConfigError, match="was begun without a teacher on a server"):
        check_resumed(config, taught)
