"""Fits a simulator's scenario to the steps of a real run.

From `metrics.jsonl` come the trainer's seconds per token, the push, the lengths of completions, and the rate at which busy
engines sample. Two things are not in the metrics and are chosen so that the measured steps come out: how much of a full engine's
decode step remains when one sequence runs, and how long a verdict takes. The completions that wait
for a verdict at the end of a step give an upper limit for its time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, inf
from statistics import NormalDist, fmean

from conf.schema import RunConfig
from launch.plan.inputs import LengthDistribution
from launch.simulate.measured_run import Metrics
from launch.simulate.scenario import EngineGroup, Failures, Scenario
from launch.simulate.simulated_trainer import SimulatedStep
from launch.simulate.simulation import simulate
from launch.simulate.speeds import EngineSpeeds, TrainerSpeeds
from launch.simulate.step_figures import PHASES, StepFigures, measured_figures, simulated_figures
from launch.simulate.workload import Workload
from rollout.ledger.ledger import Rules

FIXED_SHARES = (0.0, 0.5, 1.0)  # tried values for the fixed share of a full engine's decode step
VERDICT_SHARES = (0.25, 0.5, 1.0)  # tried values, as shares of the longest time to a verdict
RATE_ROUNDS, RATE_TOLERANCE = 5, 0.015
LONGEST_MEAN = 0.99  # fraction of the longest completion: lengths need a spread, also where all completions were cut
PROMPT_SHARE = 0.5  # the assumed mean prompt, as a share of the longest; the fitted speeds make up for the error


def fitted(config: RunConfig, lines: Sequence[Metrics], *, seed: int = 0) -> Scenario:
    """The scenario that reproduces these steps of a run best."""
    measured = measured_figures(lines)
    fits = [
        _at_rate(_scenario(config, lines, measured, fixed_share=fixed, verdict_share=verdict, seed=seed), lines, measured)
        for fixed in FIXED_SHARES
        for verdict in VERDICT_SHARES
    ]
    return min(fits, key=lambda fit: fit.misfit).scenario


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fit:
    scenario: Scenario
    misfit: float


def _at_rate(scenario: Scenario, lines: Sequence[Metrics], measured: StepFigures) -> _Fit:
    """Busy engines sample at the measured rate. They are not always full, so the rate of a full engine is higher."""
    engines = scenario.engine_groups[0].engines
    for _ in range(RATE_ROUNDS):
        figures = simulated_figures(simulated_steps(_only_until(scenario, lines), lines), engines)
        ratio = figures.busy_tokens_per_s / measured.busy_tokens_per_s
        if abs(ratio - 1) < RATE_TOLERANCE:
            break
        scenario = replace(
            scenario, engine_groups=tuple(replace(f, speeds=_slower(f.speeds, ratio)) for f in scenario.engine_groups)
        )
    return _Fit(scenario=scenario, misfit=_misfit(figures, measured))


def _only_until(scenario: Scenario, lines: Sequence[Metrics]) -> Scenario:
    """The scenario without the steps after these lines; `max_staleness` steps more keep the run's end out of them."""
    rules = scenario.rules
    needed = min(scenario.steps, int(lines[-1]["step"]) + rules.max_staleness + 1)
    return replace(scenario, rules=replace(rules, total_steps=needed))


def _misfit(simulated: StepFigures, measured: StepFigures) -> float:
    return (
        abs(simulated.step_s / measured.step_s - 1)
        + abs(simulated.trainer_idle - measured.trainer_idle)
        + abs(simulated.engines_idle - measured.engines_idle)
    )


def simulated_steps(scenario: Scenario, lines: Sequence[Metrics]) -> list[SimulatedStep]:
    """The simulated steps with the numbers of these lines."""
    return [step for step in simulate(scenario).steps if lines[0]["step"] <= step.step <= lines[-1]["step"]]


def _scenario(
    config: RunConfig,
    lines: Sequence[Metrics],
    measured: StepFigures,
    *,
    fixed_share: float,
    verdict_share: float,
    seed: int,
) -> Scenario:
    rollout, algo = config.rollout, config.algo
    workload = _workload(config, lines, verdict_share, seed)
    full, full_step_s = rollout.concurrency, rollout.concurrency * rollout.engines / measured.busy_tokens_per_s
    speeds = EngineSpeeds(
        decode_s=tuple(full_step_s * (fixed_share + (1 - fixed_share) * n / full) for n in range(full + 1)),
        decode_s_per_context_token=0.0,
        prefill_s_per_token=0.0,
        kv_tokens=rollout.max_total_tokens or inf,
    )
    return Scenario(
        name=config.name,
        rules=Rules.of(config),
        engine_groups=(EngineGroup(engines=rollout.engines, gpus_per_engine=1, concurrency=full, speeds=speeds),),
        trainer=_trainer(lines, measured, workload, algo.groups_per_step),
        trainer_gpus=1,
        sandboxes=algo.groups_per_step * algo.completions_per_group,  # the time to a verdict holds all waiting
        workload=workload,
        checkpoint_every=config.trainer.checkpoint_every,
        failures=Failures(node_mtbf_s=0.0),
    )


def _workload(config: RunConfig, lines: Sequence[Metrics], verdict_share: float, seed: int) -> Workload:
    algo, cap = config.algo, config.rollout.max_completion_tokens
    completions = algo.groups_per_step * algo.completions_per_group
    mean = fmean(line["tokens/trained"] for line in lines) / completions
    mean = min(max(mean, 1.0), LONGEST_MEAN * cap)
    verdict_s = fmean(line["queue/to_grade"] for line in lines) / completions * fmean(line["time/step_s"] for line in lines)
    return Workload(
        completions_per_group=algo.completions_per_group,
        prompt_mean_tokens=PROMPT_SHARE * config.data.max_prompt_tokens,
        prompt_cap_tokens=config.data.max_prompt_tokens,
        completion_mean_tokens=mean,
        completion_cap_tokens=cap,
        completion_sigma=_sigma(mean, cap, fmean(line["completion/max_tokens"] for line in lines), completions),
        grading_mean_s=verdict_share * verdict_s,
        seed=seed,
    )


def _sigma(mean: float, cap: int, longest: float, count: int) -> float:
    """The sigma of log-lengths for which the longest of `count` completions has the length `longest`."""
    z = NormalDist().inv_cdf(1 - 0.5 / count)
    low, high = 0.05, 2.0
    for _ in range(40):
        middle = (low + high) / 2
        median = exp(LengthDistribution(mean_tokens=mean, cap_tokens=cap, sigma=middle).mu)
        low, high = (middle, high) if min(median * exp(middle * z), cap) < longest else (low, middle)
    return low


def _trainer(lines: Sequence[Metrics], measured: StepFigures, workload: Workload, groups: int) -> TrainerSpeeds:
    completions = groups * workload.completions_per_group
    tokens = fmean(line["tokens/trained"] for line in lines) + completions * workload.prompt_mean_tokens
    seconds = measured.phases_s
    known = ("time/wait_batch_s", *PHASES.values())
    rest_s = fmean(line["time/step_s"] - sum(line.get(key, 0.0) for key in known) for line in lines)
    return TrainerSpeeds(
        old_logprob_s_per_token=seconds["old log-probs"] / tokens,
        ref_logprob_s_per_token=seconds["reference log-probs"] / tokens,
        train_s_per_token=seconds["train"] / tokens,
        step_overhead_s=max(0.0, rest_s),
        push_s=seconds["push"],
        checkpoint_stall_s=0.0,
        checkpoint_write_s=0.0,
        spread=_spread(lines, completions * workload.prompt_mean_tokens),
    )


def _spread(lines: Sequence[Metrics], prompt_tokens: float) -> tuple[float, ...]:
    """The seconds per token of each step's passes, relative to their mean. Where speeds differ from step to step both sides idle,
    and the means alone would not show it."""
    passes = ("time/old_logprob_s", "time/ref_logprob_s", "time/train_s")
    per_token = [sum(line.get(key, 0.0) for key in passes) / (line["tokens/trained"] + prompt_tokens) for line in lines]
    return tuple(each / fmean(per_token) for each in per_token)


def _slower(speeds: EngineSpeeds, factor: float) -> EngineSpeeds:
    return replace(speeds, decode_s=tuple(factor * s for s in speeds.decode_s))
