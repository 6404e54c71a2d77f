"""The plan as plain data, for JSON: what the simulator, a notebook or a test reads."""

from dataclasses import asdict
from typing import Any

from launch.plan.cost_lines import CostLine
from launch.plan.search import Plan
from launch.plan.study import Study


def study_record(study: Study) -> dict[str, Any]:
    fewest = {name: search.fewest() for name, search in study.searches.items()}
    return {
        "model": {**asdict(study.model), "parameters": study.model.parameters},
        "cluster": asdict(study.cluster),
        "workload": {
            **asdict(study.workload),
            "completions": study.workload.completions,
            "generated_tokens": study.workload.generated_tokens,
            "trained_tokens": study.workload.trained_tokens,
            "context_tokens": study.workload.context_tokens,
        },
        "assumptions": {name: asdict(search.speed.constants) for name, search in study.searches.items()},
        "best": {name: plan_record(plan) for name, plan in study.best.items()},
        "splits": {name: [plan_record(p) for p in search.splits] for name, search in study.searches.items()},
        "fewest": {name: plan_record(plan) if plan else None for name, plan in fewest.items()},
    }


def plan_record(plan: Plan) -> dict[str, Any]:
    training, generation = plan.training, plan.generation
    return {
        "gpus": plan.speed.cluster.gpus,
        "trainer_nodes": plan.trainer_nodes,
        "trainer": asdict(training.setup),
        "fleet": asdict(generation.fleet),
        "max_staleness": plan.max_staleness,
        "step_s": plan.step_s,
        "limit": plan.limit,
        "bounds_s": dict(plan.seconds),
        "hours": plan.hours,
        "trainer_idle": plan.trainer_idle,
        "fleet_idle": plan.fleet_idle,
        "training": {
            "step_s": training.step_s, "gpu_s": training.gpu_s, "lines": _lines(training.lines),
            "memory_bytes": asdict(training.memory),
        },
        "generation": {
            "step_s": generation.step_s, "gpu_s": generation.gpu_s, "lines": _lines(generation.lines),
            "running": generation.running,
            "decode_step_s": generation.decode_step_s, "tpot_s": generation.tpot_s, "longest_s": generation.longest_s,
            "kv_tokens": generation.kv_tokens,
        },
        "reliability": asdict(plan.reliability),
    }  # fmt: skip


def _lines(lines: tuple[CostLine, ...]) -> dict[str, dict[str, Any]]:
    return {line.name: {"gpu_s": line.gpu_s, "why": line.why} for line in lines}
