"""A real run's first half calibrates the simulator, which then predicts the second half.

    python -m launch.simulate from_run=outputs/NAME

From `metrics.jsonl` come the trainer's seconds a token, the push, the lengths of completions, and the rate at which busy
engines sample. Two things are not in the metrics and are chosen such that the first half comes out: how much of a full
engine's decode step there is for one sequence already, and how long a verdict takes (at most what the number of
completions that wait for one at the end of a step would say).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, inf, isfinite
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any

from conf.compose.load import read_run
from conf.schema import ConfigError, RunConfig
from launch.plan.inputs import Lengths
from launch.report.metrics import read_metrics
from launch.simulate.scenario import Failures, Fleet, Scenario
from launch.simulate.simulation import simulate
from launch.simulate.speeds import EngineSpeeds, TrainerSpeeds
from launch.simulate.trainer import Step
from launch.simulate.workload import Workload
from rollout.ledger.ledger import Rules

Metrics = Mapping[str, Any]
ALLOWED = 0.20  # relative
NEAR = 0.05  # of a step: fractions so near are as good, however small they are
WARM_UP_STEPS = 2  # the first pushes, and what is compiled or loaded at first use
FEWEST_STEPS = 12
NEEDED = ("time/step_s", "time/wait_batch_s", "tokens/trained", "completion/max_tokens", "queue/to_grade")
FIXED_SHARES = (0.0, 0.5, 1.0)  # of a full engine's decode step, whatever runs in it
VERDICT_SHARES = (0.25, 0.5, 1.0)  # of the longest time to a verdict
ROUNDS, CLOSE = 5, 0.015
NEARLY = 0.99
PROMPT_SHARE = 0.5  # of the longest prompt; what is fitted makes up for it
PHASES = {
    "old log-probs": "time/old_logprob_s",
    "reference log-probs": "time/ref_logprob_s",
    "train": "time/train_s",
    "push": "time/push_s",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    what: str
    first_half: float  # measured
    predicted: float  # of the second half
    measured: float
    unit: str  # s | tokens/s | fraction
    binding: bool = False

    @property
    def within(self) -> bool:
        near = NEAR if self.unit == "fraction" else 0.0
        return abs(self.predicted - self.measured) <= max(near, ALLOWED * self.measured)

    @property
    def error(self) -> float:
        """Relative; of a fraction, the difference."""
        difference = self.predicted - self.measured
        return difference if self.unit == "fraction" else difference / self.measured


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    run: str
    first: tuple[int, int]  # steps
    second: tuple[int, int]
    left_out: int  # the last steps, for which there was nothing left to generate
    rows: tuple[Compared, ...]
    scenario: Scenario  # calibrated

    @property
    def within(self) -> bool:
        return all(row.within for row in self.rows if row.binding)


def from_run(run_dir: Path, *, seed: int = 0) -> Comparison:
    """Raises ConfigError when the run does not hold enough."""
    config, measured = read_run(run_dir), step_lines(run_dir)
    lines = supplied(config, measured)
    half = len(lines) // 2
    first, second = lines[WARM_UP_STEPS:half], lines[half:]
    scenario = calibrated(config, first, seed=seed)
    predicted = _simulated(scenario, second)
    step_s = fmean(s.step_s for s in predicted)
    rows = [
        _time("step", "time/step_s", step_s, first, second, binding=True),
        _fraction("trainer idle", simulated_trainer_idle(predicted), trainer_idle(first), trainer_idle(second)),
        _fraction("rollout idle", simulated_idle(predicted, config.rollout.engines), rollout_idle(first), rollout_idle(second)),
    ]
    simulated = {
        "old log-probs": fmean(s.old_logprob_s for s in predicted),
        "reference log-probs": fmean(s.ref_logprob_s for s in predicted),
        "train": fmean(s.train_s for s in predicted) - scenario.trainer.step_overhead_s,
        "push": fmean(s.push_s for s in predicted),
    }
    rate = busy_tokens_per_s(first)
    busy = Compared(what="busy engines", unit="tokens/s", first_half=rate, predicted=rate, measured=busy_tokens_per_s(second))
    rows += [_time(what, key, simulated[what], first, second) for what, key in PHASES.items()]
    return Comparison(
        run=str(run_dir),
        first=(first[0]["step"], first[-1]["step"]),
        second=(second[0]["step"], second[-1]["step"]),
        left_out=len(measured) - len(lines),
        rows=tuple(row for row in (*rows, busy) if row.measured > 0 or row.unit == "fraction"),
        scenario=scenario,
    )


def step_lines(run_dir: Path) -> list[Metrics]:
    """The metrics of each step that has all that is needed. Raises ConfigError when there are too few."""
    lines = [line for line in read_metrics(run_dir) if "time/step_s" in line]
    lacking = [[key for key in NEEDED if not _is_told(line.get(key))] for line in lines]
    told = [line for line, keys in zip(lines, lacking, strict=True) if not keys]
    if len(told) < FEWEST_STEPS:
        without = next((f" with {keys[0]}" for keys in lacking if keys), "")
        raise ConfigError(
            f"{run_dir}: {len(told)} steps were measured{without}; to calibrate and predict takes at least {FEWEST_STEPS}"
        )
    return told


def _is_told(value: object) -> bool:
    return isinstance(value, int | float) and isfinite(value)


def supplied(config: RunConfig, lines: Sequence[Metrics]) -> Sequence[Metrics]:
    """Without the last `max_staleness` steps of a run that has ended: the fleet has nothing left to generate then, so how idle it
    is says nothing of its speed."""
    last = config.trainer.steps - config.rollout.max_staleness
    return [line for line in lines if line["step"] <= last]


def calibrated(config: RunConfig, lines: Sequence[Metrics], *, seed: int = 0) -> Scenario:
    """The scenario that reproduces these steps of a run best."""
    fits = [
        _at_rate(_scenario(config, lines, fixed_share=fixed, verdict_share=verdict, seed=seed), lines)
        for fixed in FIXED_SHARES
        for verdict in VERDICT_SHARES
    ]
    return min(fits, key=lambda fit: fit.misfit).scenario


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fit:
    scenario: Scenario
    misfit: float


def _at_rate(scenario: Scenario, lines: Sequence[Metrics]) -> _Fit:
    """Busy engines sample at the measured rate; they are not always full, so the rate when full is above it."""
    wanted, engines = busy_tokens_per_s(lines), scenario.fleets[0].engines
    for _ in range(ROUNDS):
        steps = _simulated(_only_until(scenario, lines), lines)
        busy_s = sum(step.step_s for step in steps) - sum(step.engine_idle_s for step in steps) / engines
        ratio = sum(step.generated_tokens for step in steps) / busy_s / wanted
        if abs(ratio - 1) < CLOSE:
            break
        scenario = replace(scenario, fleets=tuple(replace(f, speeds=_slower(f.speeds, ratio)) for f in scenario.fleets))
    return _Fit(scenario=scenario, misfit=_misfit(steps, lines, engines))


def _only_until(scenario: Scenario, lines: Sequence[Metrics]) -> Scenario:
    """The end of the run is of no concern to these steps; `max_staleness` more keep it out of sight."""
    rules = scenario.rules
    needed = min(scenario.steps, int(lines[-1]["step"]) + rules.max_staleness + 1)
    return replace(scenario, rules=replace(rules, total_steps=needed))


def _misfit(steps: Sequence[Step], lines: Sequence[Metrics], engines: int) -> float:
    step_s, measured_s = fmean(s.step_s for s in steps), fmean(line["time/step_s"] for line in lines)
    trainer = simulated_trainer_idle(steps) - trainer_idle(lines)
    return abs(step_s / measured_s - 1) + abs(trainer) + abs(simulated_idle(steps, engines) - rollout_idle(lines))


def _simulated(scenario: Scenario, lines: Sequence[Metrics]) -> list[Step]:
    """The steps that these lines tell of."""
    return [step for step in simulate(scenario).steps if lines[0]["step"] <= step.step <= lines[-1]["step"]]


def _scenario(config: RunConfig, lines: Sequence[Metrics], *, fixed_share: float, verdict_share: float, seed: int) -> Scenario:
    rollout, algo = config.rollout, config.algo
    workload = _workload(config, lines, verdict_share, seed)
    full, full_step_s = rollout.concurrency, rollout.concurrency * rollout.engines / busy_tokens_per_s(lines)
    speeds = EngineSpeeds(
        decode_s=tuple(full_step_s * (fixed_share + (1 - fixed_share) * n / full) for n in range(full + 1)),
        decode_s_per_context_token=0.0,
        prefill_s_per_token=0.0,
        kv_tokens=rollout.max_total_tokens or inf,
    )
    return Scenario(
        name=config.name,
        rules=Rules.of(config),
        fleets=(Fleet(engines=rollout.engines, gpus_per_engine=1, concurrency=full, speeds=speeds),),
        trainer=_trainer(lines, workload, algo.groups_per_step),
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
    mean = min(max(mean, 1.0), NEARLY * cap)  # lengths have a spread, also where all were cut
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
    """The spread with which the longest of so many completions is as long as seen."""
    z = NormalDist().inv_cdf(1 - 0.5 / count)
    low, high = 0.05, 2.0
    for _ in range(40):
        middle = (low + high) / 2
        median = exp(Lengths(mean_tokens=mean, cap_tokens=cap, sigma=middle).mu)
        low, high = (middle, high) if min(median * exp(middle * z), cap) < longest else (low, middle)
    return low


def _trainer(lines: Sequence[Metrics], workload: Workload, groups: int) -> TrainerSpeeds:
    completions = groups * workload.completions_per_group
    tokens = fmean(line["tokens/trained"] for line in lines) + completions * workload.prompt_mean_tokens
    seconds = {what: fmean(line.get(key, 0.0) for line in lines) for what, key in PHASES.items()}
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
    """How the passes of each step differ from their mean a token. Both sides idle where speeds differ from step to step, and
    their means would not tell it."""
    passes = ("time/old_logprob_s", "time/ref_logprob_s", "time/train_s")
    a_token = [sum(line.get(key, 0.0) for key in passes) / (line["tokens/trained"] + prompt_tokens) for line in lines]
    return tuple(each / fmean(a_token) for each in a_token)


def _slower(speeds: EngineSpeeds, factor: float) -> EngineSpeeds:
    return replace(speeds, decode_s=tuple(factor * s for s in speeds.decode_s))


def busy_tokens_per_s(lines: Sequence[Metrics]) -> float:
    """Of the fleet, while its engines had something to do."""
    told = [line for line in lines if "tokens/generated_per_s" in line and "idle/rollout_fraction" in line]
    tokens = sum(line["tokens/generated_per_s"] * line["time/step_s"] for line in told)
    busy_s = sum((1 - line["idle/rollout_fraction"]) * line["time/step_s"] for line in told)
    if not told or tokens <= 0 or busy_s <= 0:
        raise ConfigError("metrics.jsonl tells nothing of generation in the first half: tokens/generated_per_s is needed")
    return tokens / busy_s


def trainer_idle(lines: Sequence[Metrics]) -> float:
    return sum(line["time/wait_batch_s"] for line in lines) / sum(line["time/step_s"] for line in lines)


def rollout_idle(lines: Sequence[Metrics]) -> float:
    told = [line for line in lines if "idle/rollout_fraction" in line]
    return sum(line["idle/rollout_fraction"] * line["time/step_s"] for line in told) / sum(line["time/step_s"] for line in told)


def simulated_trainer_idle(steps: Sequence[Step]) -> float:
    return sum(step.wait_s for step in steps) / sum(step.step_s for step in steps)


def simulated_idle(steps: Sequence[Step], engines: int) -> float:
    return sum(step.engine_idle_s for step in steps) / engines / sum(step.step_s for step in steps)


def _time(
    what: str, key: str, predicted: float, first: Sequence[Metrics], second: Sequence[Metrics], *, binding: bool = False
) -> Compared:
    before, after = (fmean(line.get(key, 0.0) for line in lines) for lines in (first, second))
    return Compared(what=what, unit="s", binding=binding, first_half=before, predicted=predicted, measured=after)


def _fraction(what: str, predicted: float, first_half: float, measured: float) -> Compared:
    return Compared(what=what, unit="fraction", binding=True, first_half=first_half, predicted=predicted, measured=measured)


def table(comparison: Comparison) -> str:
    lines = [
        f"{comparison.run}: calibrated on steps {comparison.first[0]}-{comparison.first[1]}, predicts steps "
        f"{comparison.second[0]}-{comparison.second[1]}",
        f"{'':<24}{'first half':>12}{'predicted':>12}{'measured':>12}{'error':>14}",
    ]
    for row in comparison.rows:
        fraction = row.unit == "fraction"
        form, error = (".3f", f"{100 * row.error:+.1f} points") if fraction else (".2f", f"{row.error:+.0%}")
        what = row.what if fraction else f"{row.what}, {row.unit}"
        mark = " *" if row.binding else ""
        lines.append(f"{what:<24}{row.first_half:>12{form}}{row.predicted:>12{form}}{row.measured:>12{form}}{error:>14}{mark}")
    off = ", ".join(row.what for row in comparison.rows if row.binding and not row.within)
    allowed = f"within {ALLOWED:.0%} of what was measured, or of a fraction within {100 * NEAR:.0f} points of a step"
    lines.append(f"* {allowed}{f': NOT {off}' if off else ''}")
    if comparison.left_out:
        lines.append(f"The last {comparison.left_out} steps are left out: nothing was left to generate for a later one.")
    if not comparison.within:
        lines.append("What is far off by itself changed between the halves: other load, or other lengths.")
    return "\n".join(lines)
