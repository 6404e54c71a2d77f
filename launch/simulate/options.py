"""The simulator's own options, and the scenario that they make with the run's settings and `plan.*`."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from conf.schema import ConfigError, RunConfig
from launch.plan.generation import check_memory
from launch.plan.inputs import PlannedWorkload
from launch.plan.speed import Speed
from launch.plan.study import CALIBRATED, STATED, make_study
from launch.simulate.scenario import EngineGroup, Failures, PushMode, Scenario
from launch.simulate.speeds import engine_speeds, trainer_speeds
from launch.simulate.workload import Workload
from rollout.ledger.ledger import Rules

ASSUMPTIONS = (STATED, CALIBRATED)


@dataclass(kw_only=True)
class Options:
    """On the command line: simulate.KEY=VALUE."""

    assumptions: str = "calibrated"  # stated | calibrated: the planner's two sets of constants
    failures: bool = True
    engine_restart_s: float = 600.0  # until a lost rollout node is replaced and serves; plan.restart_s is the trainer's
    push: str = "interrupt"  # interrupt | drain | batch: when engines take new weights
    tail_engines: int = 0  # engines that take only completions that were cut, out of rollout.engines
    tail_concurrency: int = 16
    group_correlation: float = 0.5  # share of the variance of log-lengths that lies between prompts
    seed: int = 0
    steps: int = 0  # 0: trainer.steps; of a comparison: 48
    out: str = ""  # folder; "": outputs/simulate
    timeline_hours: float = 2.0  # how much of the run the timeline shows engine by engine


def scenario_of(config: RunConfig, options: Options, *, name: str = "run", colocated: bool = False) -> Scenario:
    """Raises ConfigError."""
    _check(config, options)
    study = make_study(config)
    search, setup, planned = study.searches[options.assumptions], study.configured_setup, study.workload
    speed, cluster, steps = search.speed, study.cluster, options.steps or config.trainer.steps
    used = max(setup.gpus, _engine_gpus(config)) if colocated else setup.gpus + _engine_gpus(config)
    if used > cluster.gpus:
        raise ConfigError(
            f"trainer and engines need {used} GPUs ({setup}; {config.rollout.engines} engines of TP{config.rollout.engine_tp}), "
            f"the cluster has {cluster.gpus}: take fewer rollout.engines, or a smaller trainer.dp"
        )
    check_memory(study.configured_fleet, planned, speed)
    study.check_trainer(search)
    return Scenario(
        name=name,
        rules=Rules.of(config, steps=steps),
        engine_groups=_engine_groups(config, options, speed, planned),
        trainer=trainer_speeds(speed, planned, setup),
        trainer_gpus=setup.gpus,
        colocated=colocated,
        push_mode=PushMode(options.push),
        sandboxes=planned.sandbox_cores,
        workload=_workload(config, options),
        checkpoint_every=config.trainer.checkpoint_every,
        failures=Failures(
            node_mtbf_s=cluster.node_mtbf_s if options.failures else 0.0,
            gpus_per_node=cluster.gpus_per_node,
            lease_s=config.rollout.lease_s,
            engine_restart_s=options.engine_restart_s,
            trainer_restart_s=cluster.restart_s,
            seed=options.seed,
        ),
    )


def _engine_gpus(config: RunConfig) -> int:
    return config.rollout.engines * config.rollout.engine_tp


def _check(config: RunConfig, options: Options) -> None:
    for key, allowed in (("assumptions", ASSUMPTIONS), ("push", tuple(PushMode))):
        if (value := getattr(options, key)) not in allowed:
            raise ConfigError(f"simulate.{key}={value!r}: choose one of {', '.join(allowed)}")
    for key in ("steps", "tail_engines", "engine_restart_s", "seed", "timeline_hours"):
        if not 0 <= (number := getattr(options, key)) < inf:
            raise ConfigError(f"simulate.{key}={number}: must be a finite number of at least 0")
    if options.tail_engines >= config.rollout.engines:
        raise ConfigError(
            f"simulate.tail_engines={options.tail_engines} leaves none of the {config.rollout.engines} engines (rollout.engines) "
            "to begin completions"
        )
    if options.tail_concurrency < 1:
        raise ConfigError(f"simulate.tail_concurrency={options.tail_concurrency}: must be at least 1")


def _engine_groups(config: RunConfig, options: Options, speed: Speed, planned: PlannedWorkload) -> tuple[EngineGroup, ...]:
    rollout, tail = config.rollout, options.tail_engines

    def engine_group(engines: int, concurrency: int, *, is_tail: bool) -> EngineGroup:
        speeds = engine_speeds(speed, tp=rollout.engine_tp, concurrency=concurrency, context_tokens=planned.context_tokens)
        return EngineGroup(
            engines=engines, gpus_per_engine=rollout.engine_tp, concurrency=concurrency, speeds=speeds, tail=is_tail
        )

    groups = (engine_group(rollout.engines - tail, rollout.concurrency, is_tail=False),)
    return (*groups, engine_group(tail, options.tail_concurrency, is_tail=True)) if tail else groups


def _workload(config: RunConfig, options: Options) -> Workload:
    plan = config.plan
    return Workload(
        completions_per_group=config.algo.completions_per_group,
        prompt_mean_tokens=plan.prompt_tokens,
        prompt_cap_tokens=config.data.max_prompt_tokens,
        completion_mean_tokens=plan.completion_tokens,
        completion_cap_tokens=config.rollout.max_completion_tokens,
        completion_sigma=plan.length_sigma,
        group_correlation=options.group_correlation,
        grading_mean_s=plan.sandbox_s,
        seed=options.seed,
    )


def split_arguments(arguments: Sequence[str], ours: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The simulator's own KEY=VALUE arguments, and those of the run's configuration."""
    own, others = {}, []
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key in ours or key.startswith("simulate."):
            own[key] = value
        else:
            others.append(argument)
    return own, others
