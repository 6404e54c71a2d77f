"""Systems and knobs side by side: the same work, the same GPUs, the same ledger.

    python -m launch.simulate compare=systems experiment=kestrel_256      (or variants, or true for both)

A system is what the field runs; a variant is ours with one thing changed. What failures cost is measured with one lost
node of each kind in the middle of a run, and multiplied by how many a run meets.
"""

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from conf.schema import ConfigError, RunConfig
from conf.shapes import layout_of
from launch.simulate.options import Options, scenario_of
from launch.simulate.scenario import Failures, PushMode, Scenario
from launch.simulate.simulation import Result, simulate
from launch.simulate.simulation_report import HOUR_S, Report, report_of

STEPS = 48
SWITCH_S = (
    5.0  # colocated: GPUs are handed from engine to trainer and back (an assumption: offloading through PCIe, and a new start)
)
ONE_LENGTH_SIGMA = 0.01  # sigma of log-lengths; all completions then have nearly the same length


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    name: str
    settings: Mapping[str, Any]  # key of the run's configuration -> value
    options: Mapping[str, Any]
    colocated: bool = False


@dataclass(frozen=True, kw_only=True)
class VariantResult:
    variant: Variant
    report: Report | None
    hours: float = 0.0  # duration of the whole run
    hours_with_failures: float | None = None
    hours_one_length: float | None = None  # if all completions were as long as the mean
    why_not: str = ""  # this cannot run


def systems(config: RunConfig) -> list[Variant]:
    cap = config.rollout.max_completion_tokens
    gpus = config.cluster.nodes * config.cluster.gpus_per_node
    trainer = config.trainer
    one_call = {"rollout.segment_tokens": cap, "rollout.window": 0}
    in_turns = {
        **one_call,
        "rollout.max_staleness": 0,
        "rollout.engines": max(1, gpus // config.rollout.engine_tp),
        "trainer.dp": max(1, gpus // (layout_of(trainer).ranks_per_replica)),
    }
    return [
        Variant(name="synchronous, in turns on all GPUs", settings=in_turns, options={"push": PushMode.BATCH}, colocated=True),
        Variant(
            name="synchronous, on split GPUs", settings={**one_call, "rollout.max_staleness": 0}, options={"push": PushMode.BATCH}
        ),
        Variant(name="one step off", settings={**one_call, "rollout.max_staleness": 1}, options={"push": PushMode.BATCH}),
        Variant(
            name="asynchronous, no partial rollouts",
            settings={**one_call, "rollout.max_staleness": max(1, config.rollout.max_staleness)},
            options={"push": PushMode.DRAIN},
        ),
        Variant(name="ours", settings={}, options={}),
    ]


def variants(config: RunConfig) -> list[Variant]:
    rollout, trainer, groups = config.rollout, config.trainer, config.algo.groups_per_step
    engine_gpus, replica = rollout.engines * rollout.engine_tp, layout_of(trainer).ranks_per_replica
    made = [Variant(name=f"max_staleness={s}", settings={"rollout.max_staleness": s}, options={}) for s in (1, 2, 3, 4)]
    for window, staleness in ((0, -1), (groups, -1), (0, 0), (groups // 8, 0), (groups, 0), (2 * groups, 0)):
        settings = {"rollout.window": window, "rollout.max_staleness": rollout.max_staleness + staleness}
        name = f"window={window} max_staleness={rollout.max_staleness + staleness}"
        made.append(Variant(name=name, settings=settings, options={}))
    cap = rollout.max_completion_tokens
    made += [Variant(name=f"segment={n}", settings={"rollout.segment_tokens": n}, options={}) for n in (1024, 2048, cap)]
    for tp in (2, 4, 8):
        running = rollout.concurrency * tp // rollout.engine_tp
        settings = {"rollout.engine_tp": tp, "rollout.engines": engine_gpus // tp, "rollout.concurrency": max(1, running)}
        made.append(Variant(name=f"engine_tp={tp} concurrency={max(1, running)}", settings=settings, options={}))
    most = rollout.concurrency
    for n in (most // 2, 3 * most // 4, 3 * most // 2, 2 * most):
        made.append(Variant(name=f"concurrency={n}", settings={"rollout.concurrency": max(1, n)}, options={}))
    for tail in (rollout.engines // 8, rollout.engines // 4):
        made.append(
            Variant(
                name=f"{tail} long-tail engines",
                settings={},
                options={"tail_engines": tail, "tail_concurrency": rollout.concurrency // 4},
            )
        )
    for dp in (trainer.dp - 1, trainer.dp + 1):
        rest = engine_gpus + (trainer.dp - dp) * replica
        if dp >= 1 and rest >= rollout.engine_tp:
            settings = {"trainer.dp": dp, "rollout.engines": rest // rollout.engine_tp}
            made.append(Variant(name=f"split: {dp * replica} train, {rest} generate", settings=settings, options={}))
    return [variant for variant in made if _differs(variant, config) and _has_lead(variant, config)]


def compare(config: RunConfig, options: Options, chosen: list[Variant], *, in_full: bool) -> Iterator[VariantResult]:
    """Rows as they are ready. In full: also with failures, and with completions of one length."""
    for variant in chosen:
        try:
            yield _row(config, options, variant, in_full=in_full)
        except ConfigError as error:
            yield VariantResult(variant=variant, report=None, why_not=str(error))


def _row(config: RunConfig, options: Options, variant: Variant, *, in_full: bool) -> VariantResult:
    scenario = _scenario(config, options, variant)
    result = simulate(scenario)
    report = report_of(result)
    hours = report.hours_for(config.trainer.steps)
    if not in_full:
        return VariantResult(variant=variant, report=report, hours=hours)
    even = deepcopy(config)
    even.plan.length_sigma = ONE_LENGTH_SIGMA
    one_length = report_of(simulate(_scenario(even, options, variant))).hours_for(config.trainer.steps)
    with_failures = hours + failures_cost_s(scenario, result, hours * HOUR_S, config) / HOUR_S
    return VariantResult(
        variant=variant, report=report, hours=hours, hours_with_failures=with_failures, hours_one_length=one_length
    )


def failures_cost_s(scenario: Scenario, baseline: Result, run_s: float, config: RunConfig) -> float:
    """Expected over a run: one node of each side is lost midway between two checkpoints, and the rest is arithmetic."""
    mtbf_s = config.plan.node_mtbf_days * 86_400.0
    middle = len(baseline.steps) // 2
    time_s = baseline.steps[middle].begin_s + baseline.steps[middle].step_s / 2
    rollout_nodes, trainer_nodes = scenario.rollout_nodes, scenario.trainer_nodes
    cost_s = 0.0
    if scenario.colocated:  # a node takes an engine and the trainer with it
        cost_s = trainer_nodes * _lost_s(scenario, baseline, time_s, 0)
    else:
        cost_s = rollout_nodes * _lost_s(scenario, baseline, time_s, 0)
        cost_s += trainer_nodes * _lost_s(scenario, baseline, time_s, rollout_nodes)
    return cost_s * run_s / mtbf_s


def _lost_s(scenario: Scenario, baseline: Result, time_s: float, node: int) -> float:
    failures: Failures = replace(scenario.failures, planned=((time_s, node),))
    every = max(scenario.checkpoint_every, 1)
    if node < scenario.rollout_nodes and not scenario.colocated:
        return max(0.0, simulate(replace(scenario, failures=failures)).seconds - baseline.seconds)
    # Half of what is done between two checkpoints is lost on average, wherever this one falls.
    safe = simulate(replace(scenario, failures=failures, checkpoint_every=1))
    stalls_s = len(baseline.steps) * scenario.trainer.checkpoint_stall_s
    redone_s = baseline.seconds / len(baseline.steps) * every / 2
    return max(0.0, safe.seconds - stalls_s - baseline.seconds) + redone_s


def _scenario(config: RunConfig, options: Options, variant: Variant) -> Scenario:
    changed, asked = deepcopy(config), replace(options, failures=False, steps=options.steps or STEPS, **variant.options)
    for key, value in variant.settings.items():
        section, _, name = key.partition(".")
        setattr(getattr(changed, section), name, value)
    scenario = scenario_of(changed, asked, name=variant.name, colocated=variant.colocated)
    if variant.colocated:
        return replace(scenario, trainer=replace(scenario.trainer, step_overhead_s=SWITCH_S))
    return scenario


def _differs(variant: Variant, config: RunConfig) -> bool:
    def value(key: str) -> Any:
        section, _, name = key.partition(".")
        return getattr(getattr(config, section), name)

    return bool(variant.options) or any(value(key) != wanted for key, wanted in variant.settings.items())


def _has_lead(variant: Variant, config: RunConfig) -> bool:
    rollout, settings = config.rollout, variant.settings
    window = settings.get("rollout.window", rollout.window)
    return ceil(window / config.algo.groups_per_step) <= settings.get("rollout.max_staleness", rollout.max_staleness)


COLUMNS = "      h  + failures   one length   step s    p90   wait  engines idle  running  mean lag  longest s"


def line(row: VariantResult) -> str:
    report = row.report
    if report is None:
        return f"{row.variant.name:<36}  cannot run: {row.why_not}"
    figures: list[tuple[float | None, str, int]] = [
        (row.hours, ".1f", 6), (row.hours_with_failures, ".1f", 12), (row.hours_one_length, ".1f", 12),
        (report.step_s["mean"], ".0f", 8), (report.step_s["p90"], ".0f", 6),
        (report.trainer["wait for a batch"] + report.trainer["wait for the fleet"], ".0%", 6),
        (report.engines["idle"], ".0%", 13), (report.running_sequences, ".0f", 8), (report.lag_mean, ".2f", 9),
        (report.longest_s.get("median"), ".0f", 10),
    ]  # fmt: skip
    cells = "".join(" " * (width + 1) if value is None else f" {value:>{width}{form}}" for value, form, width in figures)
    return f"{row.variant.name:<36}{cells}"


def to_json(row: VariantResult) -> dict[str, Any]:
    return {
        "name": row.variant.name,
        "settings": {**row.variant.settings, **{f"simulate.{key}": value for key, value in row.variant.options.items()}},
        "hours": row.hours,
        "hours_with_failures": row.hours_with_failures,
        "hours_one_length": row.hours_one_length,
        "cannot_run": row.why_not,
        "report": row.report.to_json() if row.report else None,
    }


SYSTEMS, VARIANTS, BOTH = "systems", "variants", "true"


def compare_and_show(config: RunConfig, options: Options, what: str, show: Callable[[str], None]) -> list[VariantResult]:
    rows: list[VariantResult] = []
    if what in (SYSTEMS, BOTH):
        rows += _shown(config, options, "systems", systems(config), show, in_full=True)
    if what in (VARIANTS, BOTH):
        rows += _shown(config, options, "ours, with one thing changed", variants(config), show, in_full=False)
    return rows


def _shown(
    config: RunConfig, options: Options, title: str, chosen: list[Variant], show: Callable[[str], None], *, in_full: bool
) -> list[VariantResult]:
    rows: list[VariantResult] = []
    show(f"{title:<36}{COLUMNS}")
    for row in compare(config, options, chosen, in_full=in_full):
        rows.append(row)
        show(line(row))
    return rows
