"""The memory, disk and time that a run needs, for `dry_run=true`, by the formulas of the planner."""

from dataclasses import fields

from conf.schema import ConfigError, RunConfig
from conf.shapes import shape_of
from launch.doctor.storage import needed_bytes
from launch.plan.cost_lines import count, gb
from launch.plan.model_costs import weight_bytes
from launch.plan.search import Plan
from launch.plan.study import CALIBRATED, make_study
from launch.plan.training import USABLE


def costs(config: RunConfig) -> str:
    """One line per subject. When there is no estimate, a line says why."""
    lines: list[tuple[str, str]] = []
    try:
        parameters = shape_of(config.model).parameters
        checkpoint, disk = needed_bytes(config, parameters)
        lines.append(("model", f"{count(parameters)} parameters"))
        kept = config.trainer.checkpoints_kept
        lines.append(("disk", f"{_bytes(disk)} for {kept} + 1 checkpoints of {_bytes(checkpoint)} and the last weights"))
        if config.cluster.device == "cpu":
            lines.append(("step", "the planner knows GPUs, not CPUs: run a few steps"))
        else:
            lines += _of_plan(make_study(config).configured[CALIBRATED])
    except ConfigError as error:
        lines.append(("no estimate", str(error)))
    return "\n".join(f"{name:<12} {text}" for name, text in lines)


def _bytes(value: float) -> str:
    return gb(value) if value >= 1e9 else f"{value / 1e6:,.1f} MB"


def _of_plan(plan: Plan) -> list[tuple[str, str]]:
    memory, speed, fleet = plan.training.memory, plan.speed, plan.generation.fleet
    usable = USABLE * speed.cluster.gpu_bytes
    parts = ", ".join(f"{item.name} {gb(getattr(memory, item.name))}" for item in fields(memory))
    weights = weight_bytes(speed.model) / fleet.tp
    running, tokens = plan.generation.running, plan.generation.kv_tokens
    return [
        ("trainer GPU", f"{gb(memory.bytes)} of {gb(usable)} usable ({plan.training.setup}): {parts}"),
        ("engine GPU", f"weights {gb(weights)}; a KV cache of {tokens:,.0f} tokens per engine, {running:.0f} sequences at once"),
        ("step", f"{plan.step_s:.0f} s: training {plan.training.step_s:.0f} s, generation {plan.generation.step_s:.0f} s; "
                 f"limited by {plan.limit}"),
        ("run", f"{plan.hours:.1f} h for {plan.workload.steps} steps, with checkpoints and failures"),
    ]  # fmt: skip
