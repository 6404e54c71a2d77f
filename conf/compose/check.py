"""Refuses a configuration that cannot run, before any process starts.

The schema states which values each setting takes. What is written here is what settings demand of one another, and what a resumed
run must not change.
"""

from collections.abc import Iterator
from math import ceil, isfinite
from typing import Any

from conf.compose.engine_args import check_engine_args
from conf.schema import RULES, AlgoConfig, ClusterConfig, ConfigError, Rule, RunConfig, TrainerConfig, value_of
from conf.shapes import layout_of
from conf.user_code import is_user_code


def check(config: RunConfig) -> None:
    """Raises ConfigError if the run cannot work."""
    check_each(config)
    _check_cluster(config.cluster)
    _check_algorithm(config)
    _check_layout(config.trainer)
    _check_objective(config.algo)
    _check_teacher(config)
    _check_data(config)
    _check_lengths(config)
    _check_deadlines(config)
    check_engine_args(config.rollout.engine_args)


def check_each(config: RunConfig) -> None:
    """Checks each setting by its rule in the schema. Raises ConfigError."""
    for key, rule in RULES.items():
        if refusal := _refusal(rule, value := value_of(config, key)):
            raise ConfigError(f"{key}={value!r}: {refusal}")
    if config.name in ("", ".", "..") or "/" in config.name:
        raise ConfigError(f"name={config.name!r}: the run's folder is output/name, so the name must be one path component")
    if not config.data.train:
        raise ConfigError("data.train is empty: name at least one file of problems")


def _refusal(rule: Rule, value: Any) -> str:
    if rule.choices and value not in rule.choices and not (rule.loaded_by and is_user_code(value)):
        own = ", or name a function of your own as module:function" if rule.loaded_by else ""
        return f"choose one of {', '.join(map(repr, rule.choices))}{own}"
    if isinstance(value, int | float) and not isinstance(value, bool) and not rule.takes(value):
        return f"must be {rule.bounds}" if isfinite(value) else f"must be a finite number, {rule.bounds}"
    return ""


FOR_SLURM_ONLY = ("setup", "container", "container_runtime", "container_mounts", "srun_args", "requeues", "heartbeat_s")
FOR_CONTAINERS_ONLY = ("container_runtime", "container_mounts")


def _check_cluster(cluster: ClusterConfig) -> None:
    """Refuses settings that would have no effect, and mounts that srun and apptainer would read as several."""
    defaults = ClusterConfig()
    for names, unused, remedy in (
        (FOR_SLURM_ONLY, cluster.kind == "local", "has no effect with cluster.kind=local: choose cluster.kind=slurm"),
        (FOR_CONTAINERS_ONLY, not cluster.container, "has no effect without cluster.container: name an image"),
    ):
        for name in names:
            if unused and (value := getattr(cluster, name)) != getattr(defaults, name):
                raise ConfigError(f"cluster.{name}={value} {remedy}, or leave it out")
    for mount in cluster.container_mounts:
        if "," in mount or ":" not in mount:
            raise ConfigError(
                f"cluster.container_mounts: {mount!r} must be FROM:TO, without a comma; give each mount as an entry of its own"
            )


FIXED_BY_THE_LEDGER = (
    "algo.groups_per_step",
    "algo.completions_per_group",
    "rollout.max_staleness",
    "rollout.window",
    "rollout.max_completion_tokens",
    "data.seed",
    "data.weights",
    "data.heldout_fraction",
)


def check_resumed(stored: RunConfig, resumed: RunConfig) -> None:
    """Raises ConfigError if a resume would change what the ledger of the run depends on."""
    if resumed.algo.teacher_is_asked and not stored.algo.teacher_is_asked:
        raise ConfigError(
            f"algo.teacher={resumed.algo.teacher}: the run was begun without a teacher on a server, so what it has sampled "
            "lacks the teacher's log-probs; leave it out, or start a new run"
        )
    for key in FIXED_BY_THE_LEDGER:
        if (before := value_of(stored, key)) != (after := value_of(resumed, key)):
            raise ConfigError(
                f"{key}={after}: the run was begun with {before}, and its ledger depends on it; leave it out, or start a new run"
            )


def notes_on_resume(stored: RunConfig, resumed: RunConfig) -> Iterator[str]:
    """A line for each change that has an effect which a user may not expect."""
    before, after = stored.trainer.steps, resumed.trainer.steps
    if before != after and resumed.trainer.lr_schedule == "cosine":
        yield (
            f"trainer.steps={after}: the run was begun with {before}. The cosine of the learning rate now ends at step {after}, "
            "so the learning rate of the next step may jump"
        )


def _check_algorithm(config: RunConfig) -> None:
    algo, rollout = config.algo, config.rollout
    completions = algo.groups_per_step * algo.completions_per_group
    if completions % algo.minibatches:
        raise ConfigError(
            f"algo.minibatches={algo.minibatches} does not divide the {completions} completions of a step "
            f"({algo.groups_per_step} groups x {algo.completions_per_group})"
        )
    if algo.reference_refresh_steps and not algo.kl_coef:
        raise ConfigError(
            f"algo.reference_refresh_steps={algo.reference_refresh_steps} without algo.kl_coef: the reference is not used"
        )
    window_versions = ceil(rollout.window / algo.groups_per_step)
    if window_versions > rollout.max_staleness:
        raise ConfigError(
            f"rollout.window={rollout.window} uses up {window_versions} version(s) of staleness (window / algo.groups_per_step, "
            f"rounded up), more than rollout.max_staleness={rollout.max_staleness}: reduce the window or allow more staleness"
        )
    corrects_itself = is_user_code(algo.policy_loss)  # a user's loss gets the behaviour policy's log-probs
    if rollout.max_staleness > 0 and algo.behaviour_correction == "none" and not corrects_itself:
        raise ConfigError(
            "algo.behaviour_correction=none with rollout.max_staleness > 0 trains on stale tokens as if they were fresh: "
            "choose truncate or mask, or set rollout.max_staleness=0"
        )


def _check_data(config: RunConfig) -> None:
    data, every = config.data, config.trainer.eval_every
    if data.weights and (len(data.weights) != len(data.train) or not all(isfinite(w) and w > 0 for w in data.weights)):
        raise ConfigError(
            f"data.weights={data.weights}: must be a number above 0 for each of the {len(data.train)} of data.train"
        )
    if data.heldout and data.heldout_fraction:
        raise ConfigError(f"data.heldout_fraction={data.heldout_fraction} with data.heldout={data.heldout}: set one of them")
    if every and not data.heldout and not data.heldout_fraction:
        raise ConfigError(
            f"trainer.eval_every={every} without data.heldout and data.heldout_fraction: there are no problems to evaluate on"
        )


def _check_layout(trainer: TrainerConfig) -> None:
    layout_of(trainer)
    if trainer.overlap_param_gather and not trainer.overlap_grad_reduce:
        raise ConfigError(
            "trainer.overlap_param_gather=true needs trainer.overlap_grad_reduce=true: both use the same buckets of parameters"
        )


def _check_objective(algo: AlgoConfig) -> None:
    """Refuses pairs of settings in which one has no effect or does harm."""
    for refused, message in (
        (
            algo.kl_coef > 0 and algo.kl_in == "loss" and algo.kl_estimator == "k1",
            "algo.kl_estimator=k1 in the loss has a gradient of zero on average, so it has no effect: choose k2 or k3, or "
            "algo.kl_in=reward",
        ),
        (
            algo.kl_in == "reward" and algo.kl_coef == 0,
            "algo.kl_in=reward does nothing at algo.kl_coef=0: set a coefficient, or algo.kl_in=loss",
        ),
        (
            0 < algo.dual_clip <= 1,
            f"algo.dual_clip={algo.dual_clip}: must be above 1, or every token of negative advantage is clipped; 0 turns it off",
        ),
        (
            algo.dual_clip > 0 and algo.policy_loss != "ppo",
            f"algo.dual_clip={algo.dual_clip} works only with algo.policy_loss=ppo, not with {algo.policy_loss}: set it to 0",
        ),
        (
            algo.behaviour_floor > 0 and algo.behaviour_correction != "mask",
            f"algo.behaviour_floor={algo.behaviour_floor} is used only by algo.behaviour_correction=mask: choose mask, or set "
            "the floor to 0",
        ),
        (
            algo.behaviour_floor >= algo.behaviour_cap,
            f"algo.behaviour_floor={algo.behaviour_floor} must be below algo.behaviour_cap={algo.behaviour_cap}",
        ),
        (
            algo.policy_loss == "gspo" and algo.behaviour_correction != "none" and algo.behaviour_level == "token",
            "algo.policy_loss=gspo uses one ratio per sequence, and weights per token would distort it: set "
            "algo.behaviour_level=geometric or sequence",
        ),
    ):
        if refused:
            raise ConfigError(message)


def _check_teacher(config: RunConfig) -> None:
    algo = config.algo
    for refused, message in (
        (
            not algo.teacher and algo.reward_weight != 1,
            f"algo.reward_weight={algo.reward_weight} without algo.teacher: it weighs rewards against a teacher, so name one",
        ),
        (
            not algo.teacher and algo.teacher_on != "trainer",
            f"algo.teacher_on={algo.teacher_on} without algo.teacher: name the folder of a teacher",
        ),
        (
            algo.teacher_has_address and algo.teacher_on != "trainer",
            f"algo.teacher_on={algo.teacher_on} has no effect when algo.teacher is the address of a server: leave it out",
        ),
        (
            algo.teacher_is_reference and algo.kl_coef > 0,
            f"algo.teacher={algo.teacher} takes the place of the reference policy, so algo.kl_coef={algo.kl_coef} has no "
            "reference: set algo.kl_coef=0, or algo.teacher_on=engine",
        ),
        (
            algo.teacher_is_asked and config.rollout.temperature != 1,
            f"rollout.temperature={config.rollout.temperature} with a teacher on a server: SGLang gives the log-probs of a "
            "prompt at temperature 1 only, so set rollout.temperature=1, or algo.teacher_on=trainer",
        ),
    ):
        if refused:
            raise ConfigError(message)


def _check_deadlines(config: RunConfig) -> None:
    """A deadline that runs within another one must be the shorter one."""
    trainer, rollout = config.trainer, config.rollout
    for shorter, short_s, longer, long_s, why in (
        ("trainer.push_s", trainer.push_s, "trainer.collective_s", trainer.collective_s, "all ranks wait for a push"),
        ("trainer.stall_s", trainer.stall_s, "trainer.collective_s", trainer.collective_s, "all ranks wait while rank 0 does"),
        ("rollout.engine_start_s", rollout.engine_start_s, "trainer.stall_s", trainer.stall_s, "a batch waits for the engines"),
    ):
        if short_s >= long_s:
            raise ConfigError(f"{shorter}={short_s:g} must be below {longer}={long_s:g}: {why}")


def _check_lengths(config: RunConfig) -> None:
    longest = config.data.max_prompt_tokens + config.rollout.max_completion_tokens
    if 0 < config.rollout.max_total_tokens < longest:
        raise ConfigError(
            f"rollout.max_total_tokens={config.rollout.max_total_tokens}: the KV cache of an engine cannot hold the longest "
            f"trajectory, which has data.max_prompt_tokens + rollout.max_completion_tokens = {longest} tokens"
        )
