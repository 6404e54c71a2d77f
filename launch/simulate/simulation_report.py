"""The result of a simulated run: figures, and the text that shows them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import numpy as np

from launch.simulate.simulated_fleet import LONG_SHARE
from launch.simulate.simulated_trainer import SimulatedStep
from launch.simulate.simulation import Result

HOUR_S = 3600.0
FEW_STEPS = 8  # with fewer, nothing is steady


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Fractions are of the run's time, over all GPUs of a side; lags are of trained tokens."""

    name: str
    steps: int  # simulated
    hours: float  # simulated
    step_s: Mapping[str, float]  # mean, median, p90, max; without start and end
    trainer: Mapping[str, float]  # what it did
    engines: Mapping[str, float]
    running_sequences: float  # in an engine, while it decodes
    gpus_idle: float  # share of all GPUs' time: nothing to train, nothing to generate, or down
    lag_fractions: Mapping[int, float]
    lag_mean: float
    ready_groups: float  # waiting besides the batch when it is taken
    untaken_groups: float
    longest_s: Mapping[str, float]  # from the first lease of a long completion to its end: median, p99, max
    sandboxes_busy: float
    waiting_for_sandbox: int  # completions, at most
    generated_tokens: int  # that were trained on
    lost_tokens: int  # generated, and gone with an engine
    refused_tokens: int  # reported, and not recorded
    redone_steps: int
    failures: Mapping[str, int]
    cpu_s: float

    def hours_for(self, steps: int) -> float:
        """Hours that a run of this many steps takes, if later steps take the mean time of the simulated ones."""
        return self.hours + max(0, steps - self.steps) * self.step_s["mean"] / HOUR_S

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def report_of(result: Result) -> Report:
    scenario, steps = result.scenario, result.steps
    lags: Counter[int] = sum((step.lag_tokens for step in steps), Counter())
    trained = lags.total()
    trainer = trainer_shares(result)
    engines = engine_shares(result)
    decode_s = sum(e.decode_s for e in result.engines)
    return Report(
        name=scenario.name,
        steps=scenario.steps,
        hours=result.seconds / HOUR_S,
        step_s=_step_times([step.step_s for step in steady(steps, scenario.rules.lead)]),
        trainer=trainer,
        engines=engines,
        running_sequences=sum(e.sequence_s for e in result.engines) / max(decode_s, 1e-9),
        gpus_idle=_gpus_idle(result, trainer, engines),
        lag_fractions={lag: lags[lag] / trained for lag in sorted(lags)},
        lag_mean=sum(lag * n for lag, n in lags.items()) / trained,
        ready_groups=fmean(step.ready_groups for step in steps),
        untaken_groups=fmean(step.untaken_groups for step in steps),
        longest_s=_longest(result.long_latencies_s),
        sandboxes_busy=result.judge_busy_s / result.seconds / scenario.sandboxes,
        waiting_for_sandbox=result.most_waiting_for_judges,
        generated_tokens=result.trained_tokens,
        lost_tokens=result.engine_lost_tokens,
        refused_tokens=result.ledger_lost_tokens,
        redone_steps=result.redone_steps,
        failures=dict(Counter(failure.of for failure in result.failures)),
        cpu_s=result.cpu_s,
    )


def steady(steps: Sequence[SimulatedStep], lead: int) -> Sequence[SimulatedStep]:
    """The steps without the start, when the queue fills, and without the end, when nothing more is generated."""
    if len(steps) < FEW_STEPS:
        return steps
    return steps[len(steps) // 4 if len(steps) < 100 else 10 : len(steps) - lead - 1]


def trainer_shares(result: Result) -> dict[str, float]:
    """Fractions of the run. `lost` is the rest: steps that a failure broke off."""
    steps = result.steps
    spent = {
        "train": sum(step.train_s for step in steps),
        "log-probs": sum(step.old_logprob_s + step.ref_logprob_s for step in steps),
        "push": sum(step.push_s for step in steps),
        "wait for a batch": sum(step.wait_s for step in steps),
        "wait for the fleet": sum(step.drain_s for step in steps),
        "checkpoint": sum(step.checkpoint_s for step in steps),
        "down": result.trainer_down_s,
    }
    spent["lost"] = max(0.0, result.seconds - sum(spent.values()))
    return {what: seconds / result.seconds for what, seconds in spent.items()}


def engine_shares(result: Result) -> dict[str, float]:
    engines = result.engines
    total_s = sum(e.idle_s + e.decode_s + e.stalled_s + e.down_s for e in engines)
    return {
        "decode": sum(e.decode_s for e in engines) / total_s,
        "prefill and push": sum(e.stalled_s for e in engines) / total_s,
        "idle": sum(e.idle_s for e in engines) / total_s,
        "down": sum(e.down_s for e in engines) / total_s,
    }


def _gpus_idle(result: Result, trainer: Mapping[str, float], engines: Mapping[str, float]) -> float:
    scenario = result.scenario
    trains = sum(trainer[what] for what in ("train", "log-probs", "push", "checkpoint", "lost"))
    generates = engines["decode"] + engines["prefill and push"]
    if scenario.colocated:
        return max(0.0, 1 - trains - generates)
    gpus = scenario.trainer_gpus + scenario.engine_gpus
    return 1 - (trains * scenario.trainer_gpus + generates * scenario.engine_gpus) / gpus


def _step_times(seconds: Sequence[float]) -> dict[str, float]:
    return {
        "mean": fmean(seconds),
        "median": float(np.median(seconds)),
        "p90": float(np.quantile(seconds, 0.9)),
        "max": max(seconds),
    }


def _longest(latencies_s: Sequence[float]) -> dict[str, float]:
    if not latencies_s:
        return {}
    return {
        "median": float(np.median(latencies_s)),
        "p99": float(np.quantile(latencies_s, 0.99)),
        "max": max(latencies_s),
    }


def text(report: Report, *, steps: int) -> str:
    """The report as text. `steps` is the number of steps of the whole run."""
    step_s, longest = report.step_s, report.longest_s
    lags = {str(lag): part for lag, part in report.lag_fractions.items()}
    lines = [
        f"{report.name}: {report.hours_for(steps):.1f} h for {steps} steps; {report.steps} simulated",
        f"step            mean {step_s['mean']:.1f} s, "
        + ", ".join(f"{k} {step_s[k]:.1f}" for k in ("median", "p90", "max"))
        + (", without the first and last steps" if report.steps >= FEW_STEPS else ""),
        f"trainer         {_shares(report.trainer)}",
        f"engines         {_shares(report.engines)}; {report.running_sequences:.1f} sequences run in an engine that decodes",
        f"GPUs            {report.gpus_idle:.1%} idle or down, trainer and fleet together",
        f"lag             {_shares(lags)}; mean {report.lag_mean:.2f} versions",
        f"queue           besides the batch {report.ready_groups:.0f} groups are ready, of {report.untaken_groups:.0f} admitted",
        f"sandboxes       {report.sandboxes_busy:.0%} busy; at most {report.waiting_for_sandbox} completions wait for a sandbox",
    ]
    if longest:
        shown = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in longest.items())
        lines.append(f"long tail       completions of at least {LONG_SHARE:.0%} of the cap, from first lease to end: {shown}")
    failures = ", ".join(f"{count} of the {side}" for side, count in report.failures.items()) or "none"
    lost = report.lost_tokens / max(report.generated_tokens, 1)
    lines.append(
        f"node failures   {failures}; {report.redone_steps} steps repeated, {report.lost_tokens:,} tokens lost ({lost:.3%}), "
        f"{report.refused_tokens:,} refused"
    )
    return "\n".join(lines)


def _shares(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{what} {part:.1%}" for what, part in parts.items() if part >= 0.0005)
