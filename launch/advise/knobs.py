"""The settings that are tried in the simulator, one at a time, each as a scenario of its own."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from conf.schema import RunConfig
from conf.shapes import layout_of
from launch.simulate.scenario import EngineGroup, Scenario
from launch.simulate.speeds import TrainerSpeeds

ANOTHER_OBJECTIVE = "another objective"


@dataclass(frozen=True, kw_only=True, slots=True)
class Knob:
    setting: str
    scenario: Scenario
    costs: str = ""  # what is needed beside the setting


def knobs(scenario: Scenario, config: RunConfig) -> Iterator[Knob]:
    """One setting changed per knob; impossible values are left out. On a CPU no hardware is added, as processes share cores."""
    yield from _ledger_knobs(scenario)
    fleet = scenario.engine_groups[0]
    for concurrency in {max(1, fleet.concurrency // 2), 2 * fleet.concurrency} - {fleet.concurrency}:
        changed_fleet = _with_concurrency(fleet, concurrency)
        yield Knob(setting=f"rollout.concurrency={concurrency}", scenario=replace(scenario, engine_groups=(changed_fleet,)))
    if scenario.trainer.ref_logprob_s_per_token:
        without = replace(scenario.trainer, ref_logprob_s_per_token=0.0)
        yield Knob(setting="algo.kl_coef=0", scenario=replace(scenario, trainer=without), costs=ANOTHER_OBJECTIVE)
    if config.cluster.device == "cuda":
        yield from _hardware_knobs(scenario, config)


def _ledger_knobs(scenario: Scenario) -> Iterator[Knob]:
    rules = scenario.rules
    for staleness in (rules.max_staleness - 1, rules.max_staleness + 1):
        if staleness >= 0 and staleness - (rules.max_staleness - rules.lead) >= 0:
            changed = replace(rules, max_staleness=staleness)
            yield Knob(setting=f"rollout.max_staleness={staleness}", scenario=replace(scenario, rules=changed))
    if rules.max_staleness and not rules.window:
        changed = replace(rules, window=rules.groups_per_step)
        yield Knob(setting=f"rollout.window={rules.groups_per_step}", scenario=replace(scenario, rules=changed))
    if rules.segment_tokens < rules.max_completion_tokens:
        changed = replace(rules, segment_tokens=rules.max_completion_tokens)
        yield Knob(setting=f"rollout.segment_tokens={rules.max_completion_tokens}", scenario=replace(scenario, rules=changed))


def _hardware_knobs(scenario: Scenario, config: RunConfig) -> Iterator[Knob]:
    """Another split of the GPUs, and more hardware."""
    fleet, dp = scenario.engine_groups[0], config.trainer.dp
    gpus_per_replica = layout_of(config.trainer).ranks_per_replica

    def with_both(new_dp: int, engines: int) -> Scenario:
        trainer = _faster(scenario.trainer, new_dp / dp)
        return replace(scenario, trainer=trainer, engine_groups=(replace(fleet, engines=engines),))

    moved, rest = divmod(gpus_per_replica, config.rollout.engine_tp)
    for other_dp, engines in ((dp + 1, fleet.engines - moved), (dp - 1, fleet.engines + moved)):
        if not rest and other_dp > 0 and engines > 0:
            yield Knob(setting=f"trainer.dp={other_dp} rollout.engines={engines}", scenario=with_both(other_dp, engines))
    for other_dp, engines in ((dp, fleet.engines + 1), (2 * dp, fleet.engines), (2 * dp, 2 * fleet.engines)):
        changed = {"trainer.dp": (dp, other_dp), "rollout.engines": (fleet.engines, engines)}
        setting = " ".join(f"{key}={new}" for key, (old, new) in changed.items() if new != old)
        gpus = (other_dp - dp) * gpus_per_replica + (engines - fleet.engines) * config.rollout.engine_tp
        yield Knob(setting=setting, scenario=with_both(other_dp, engines), costs=f"{gpus} more GPUs")
    work = replace(scenario.workload, grading_mean_s=scenario.workload.grading_mean_s / 2)
    yield Knob(
        setting=f"reward.judges={2 * config.reward.judges}",
        scenario=replace(scenario, workload=work),
        costs="twice the sandboxes",
    )


def _faster(trainer: TrainerSpeeds, factor: float) -> TrainerSpeeds:
    return replace(
        trainer, old_logprob_s_per_token=trainer.old_logprob_s_per_token / factor,
        train_s_per_token=trainer.train_s_per_token / factor, ref_logprob_s_per_token=trainer.ref_logprob_s_per_token / factor,
    )  # fmt: skip


def _with_concurrency(fleet: EngineGroup, concurrency: int) -> EngineGroup:
    """Beyond the measured concurrency a decode step grows as it did before."""
    known = fleet.speeds.decode_s
    growth = known[-1] - known[-2]
    decode_s = known + tuple(known[-1] + growth * (i + 1) for i in range(concurrency + 1 - len(known)))
    return replace(fleet, concurrency=concurrency, speeds=replace(fleet.speeds, decode_s=decode_s[: concurrency + 1]))
