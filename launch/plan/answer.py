"""The plan's result: how long the run takes, how the GPUs are split, and what limits a step."""

from collections.abc import Callable

from launch.plan.cost_lines import several
from launch.plan.search import MOST_NODES, Plan, Search
from launch.plan.study import Study
from launch.plan.table import table


def answer(study: Study) -> str:
    work, cluster = study.workload, study.cluster

    def row(name: str, value: Callable[[Plan], str]) -> tuple[str, ...]:
        return (name, *(value(plan) for plan in study.best.values()))

    hours = " or ".join(f"{plan.hours:.1f} h ({name})" for name, plan in study.best.items())
    said = f"{study.model.name} on {cluster.gpus} GPUs: {work.steps} steps take {hours}; the target is {work.target_hours:g} h."
    sandboxed = work.completions * work.sandbox_s
    rows = [
        row("run, with failures", lambda p: f"{p.hours:.1f} h"),
        row("run, without", lambda p: f"{p.workload.steps * p.step_s / 3600:.1f} h"),
        row("one step", lambda p: f"{p.step_s:.1f} s"),
        row("limited by", _limits),
        (f"fewest GPUs for {work.target_hours:g} h", *(_size(search) for search in study.searches.values())),
        row(f"{cluster.unit}, trainer + fleet", lambda p: p.split),
        row("GPUs", lambda p: f"{p.training.setup.gpus} train, {p.generation.fleet.gpus} generate"),
        row("trainer", lambda p: str(p.training.setup)),
        row("fleet", lambda p: str(p.generation.fleet)),
        row("max_staleness", lambda p: str(p.max_staleness)),
        ("as configured", *_configured(study)),
        row("training", lambda p: f"{p.training.gpu_s:,.0f} GPU-s, {p.training.step_s:.1f} s"),
        row("generation", lambda p: f"{p.generation.gpu_s:,.0f} GPU-s, {p.generation.step_s:.1f} s"),
        row("longest completion", lambda p: f"{p.generation.longest_s:.0f} s = {p.generation.longest_s / p.step_s:.1f} steps"),
        row("sandbox cores busy", lambda p: f"{sandboxed / p.step_s:.0f} of {work.sandbox_cores}"),
        row("idle: trainer, fleet", lambda p: f"{p.trainer_idle:.0%}, {p.fleet_idle:.0%}"),
    ]
    return f"{said}\n\n{table(('', *study.best), rows, left=3)}"


def _limits(plan: Plan) -> str:
    """What limits the step, and what would limit it next."""
    first, *others = sorted(plan.seconds, key=lambda what: -plan.seconds[what])
    return f"{first}; then {others[0]}, {plan.seconds[others[0]]:.1f} s" if others else first


def _size(search: Search) -> str:
    if (plan := search.fewest()) is None:
        return f"more than {MOST_NODES * search.cluster.gpus_per_node:,}"
    cluster = plan.speed.cluster
    return f"{cluster.gpus} ({several(cluster.nodes, 'node')}): {plan.hours:.1f} h"


def _configured(study: Study) -> list[str]:
    if study.misfit:
        return ["does not fit"] * len(study.searches)
    same = {name: str(plan) == str(study.best[name]) for name, plan in study.configured.items()}
    return ["this plan" if same[name] else f"{plan.step_s:.1f} s, {plan.hours:.1f} h" for name, plan in study.configured.items()]
