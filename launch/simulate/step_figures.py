"""The mean figures of some steps, the same for a real run's metrics and for simulated steps, so that they can be compared."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from conf.schema import ConfigError
from launch.simulate.measured_run import Metrics
from launch.simulate.simulated_trainer import SimulatedStep

PHASES = {
    "old log-probs": "time/old_logprob_s",
    "reference log-probs": "time/ref_logprob_s",
    "train": "time/train_s",
    "push": "time/push_s",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFigures:
    """Means over some steps."""

    step_s: float
    phases_s: dict[str, float]  # one value per name in PHASES
    trainer_idle: float  # fraction of a step
    engines_idle: float
    busy_tokens_per_s: float  # for the whole fleet, while its engines have work


def measured_figures(lines: Sequence[Metrics]) -> StepFigures:
    """The figures of a real run, from its metrics. Raises ConfigError if these lack the figures of generation."""
    told = [line for line in lines if "tokens/generated_per_s" in line and "idle/rollout_fraction" in line]
    total_s = sum(line["time/step_s"] for line in lines)
    told_s = sum(line["time/step_s"] for line in told)
    idle_s = sum(line["idle/rollout_fraction"] * line["time/step_s"] for line in told)
    tokens = sum(line["tokens/generated_per_s"] * line["time/step_s"] for line in told)
    if tokens <= 0 or told_s <= idle_s:
        raise ConfigError("metrics.jsonl says nothing about generation in the first half: tokens/generated_per_s is needed")
    return StepFigures(
        step_s=total_s / len(lines),
        phases_s={phase: fmean(line.get(key, 0.0) for line in lines) for phase, key in PHASES.items()},
        trainer_idle=sum(line["time/wait_batch_s"] for line in lines) / total_s,
        engines_idle=idle_s / told_s,
        busy_tokens_per_s=tokens / (told_s - idle_s),
    )


def simulated_figures(steps: Sequence[SimulatedStep], engines: int) -> StepFigures:
    total_s = sum(step.step_s for step in steps)
    idle_s = sum(step.engine_idle_s for step in steps) / engines
    return StepFigures(
        step_s=total_s / len(steps),
        phases_s={
            "old log-probs": fmean(step.old_logprob_s for step in steps),
            "reference log-probs": fmean(step.ref_logprob_s for step in steps),
            "train": fmean(step.train_s for step in steps),
            "push": fmean(step.push_s for step in steps),
        },
        trainer_idle=sum(step.wait_s for step in steps) / total_s,
        engines_idle=idle_s / total_s,
        busy_tokens_per_s=sum(step.generated_tokens for step in steps) / max(total_s - idle_s, 1e-9),
    )
