"""The searches under both sets of assumptions, the plan of the configured run, and what-ifs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite

from conf.schema import ConfigError, RunConfig
from conf.shapes import ModelShape, check_layout, layout_of
from launch.plan.calibration import stored
from launch.plan.generation import FleetSetup, check_engine, check_memory, engine_tps, sequences_that_fit
from launch.plan.inputs import Cluster, PlannedWorkload, read_inputs
from launch.plan.search import Plan, Search, fits, make_plan
from launch.plan.speed import Constants, Speed, stated
from launch.plan.training import USABLE, TrainerSetup, check_node, training_cost, training_memory

STATED, CALIBRATED = "stated", "calibrated"


@dataclass(frozen=True, kw_only=True)
class Study:
    config: RunConfig
    model: ModelShape
    cluster: Cluster
    workload: PlannedWorkload
    searches: dict[str, Search]  # by set of assumptions

    @cached_property
    def best(self) -> dict[str, Plan]:
        """The best plan per set of assumptions. Raises ConfigError when nothing fits, or when no run would end."""
        found = {name: search.best for name, search in self.searches.items()}
        for plan in found.values():
            if not isfinite(plan.hours):
                risk = plan.reliability
                raise ConfigError(
                    f"plan.node_mtbf_days={self.config.plan.node_mtbf_days:g}: one of {plan.trainer_nodes} trainer nodes fails "
                    f"every {risk.trainer_mtbf_s:.0f} s and each failure costs {risk.lost_s_per_failure:.0f} s: no run would end"
                )
        return found

    @cached_property
    def configured(self) -> dict[str, Plan]:
        """The plan of the run as `trainer.*` and `rollout.*` set it. Raises ConfigError when the cluster cannot hold it."""
        return {name: self._configured(search) for name, search in self.searches.items()}

    @cached_property
    def misfit(self) -> str:
        """Why the run does not fit as it is configured. A plan can be made all the same."""
        try:
            _ = self.configured
        except ConfigError as error:
            return f"the run does not fit as it is configured: {error}"
        return ""

    @property
    def what_ifs(self) -> list["WhatIf"]:
        """The what-ifs that leave GPUs for a trainer and a fleet."""
        return [change for change in WHAT_IFS if change.nodes_lost < self.cluster.nodes]

    @property
    def configured_setup(self) -> TrainerSetup:
        t = self.config.trainer
        return TrainerSetup(
            layout=layout_of(t), dp=t.dp, tokens_per_microbatch=t.tokens_per_microbatch, recompute=t.recompute == "full"
        )

    @property
    def configured_fleet(self) -> FleetSetup:
        r = self.config.rollout
        return FleetSetup(engines=r.engines, tp=r.engine_tp, concurrency=r.concurrency)

    def _configured(self, search: Search) -> Plan:
        setup, fleet = self.configured_setup, self.configured_fleet
        check_memory(fleet, self.workload, search.speed)
        if setup.gpus + fleet.gpus > self.cluster.shared_gpus:
            raise ConfigError(self._too_many(setup, fleet))
        self.check_trainer(search)
        cost = training_cost(self.workload, search.speed, setup)
        return make_plan(self.workload, search.speed, cost, fleet, self.config.rollout.max_staleness)

    def _too_many(self, setup: TrainerSetup, fleet: FleetSetup) -> str:
        cluster, gpus, replica = self.cluster, self.cluster.shared_gpus, setup.gpus // setup.dp
        dp = min((gpus - fleet.tp) // replica, max(1, round(setup.dp * gpus / (setup.gpus + fleet.gpus))))
        engines = (gpus - dp * replica) // fleet.tp
        near = f"trainer.dp={dp} rollout.engines={engines} fit" if dp > 0 else "a smaller layout is needed: see the best plan"
        others = f", beside {cluster.frozen_gpus} for a teacher or judge model" if cluster.frozen_gpus else ""
        return (
            f"trainer.tp x pp x dp = {setup.gpus} and rollout.engines x engine_tp = {fleet.gpus} need "
            f"{setup.gpus + fleet.gpus} GPUs; the cluster has {gpus}{others}: {near}"
        )

    def check_trainer(self, search: Search) -> None:
        """Raises ConfigError when a GPU cannot hold the trainer as it is configured, with what it could."""
        setup = self.configured_setup
        layout = setup.layout
        if fits(setup, search.speed):
            return
        needed, usable = training_memory(self.model, setup).bytes, USABLE * self.cluster.gpu_bytes
        sharded = replace(setup, layout=replace(layout, sequence_parallel=layout.tp > 1))
        savings = {
            "trainer.sequence_parallel=true": sharded,
            "trainer.recompute=full": replace(setup, recompute=True),
            "trainer.sequence_parallel=true trainer.recompute=full": replace(sharded, recompute=True),
        }
        what = next((f"{key} does" for key, tried in savings.items() if fits(tried, search.speed)), "")
        if not what:
            fitting = next((n for n in search.trainer_gpus if n >= setup.gpus and search.trainers(n)), None)
            found = search.trainers(fitting)[0].setup if fitting else None
            what = f"{found}, on {found.gpus} GPUs, does" if found else "no layout on this cluster does"
        raise ConfigError(
            f"trainer.tp={layout.tp} pp={layout.pp} dp={setup.dp} needs {needed / 1e9:.0f} GB of a GPU, and "
            f"{usable / 1e9:.0f} GB are usable; {what}"
        )


def make_study(config: RunConfig) -> Study:
    """Raises ConfigError."""
    model, cluster, workload = read_inputs(config)
    return study_of(config, model, cluster, workload)


def study_of(config: RunConfig, model: ModelShape, cluster: Cluster, workload: PlannedWorkload) -> Study:
    plan = config.plan
    sets = {STATED: stated(plan.compute_fraction, plan.bandwidth_fraction), CALIBRATED: stored().constants}
    searches = {
        name: Search(
            workload=workload, speed=Speed(model=model, cluster=cluster, constants=constants),
            tokens_per_microbatch=config.trainer.tokens_per_microbatch, staleness_limit=plan.staleness_limit, max_cp=plan.max_cp,
        )
        for name, constants in sets.items()
    }  # fmt: skip
    study = Study(config=config, model=model, cluster=cluster, workload=workload, searches=searches)
    layout = study.configured_setup.layout
    check_layout(model, layout)
    check_node(layout, model, cluster)
    check_engine(study.configured_fleet, searches[STATED].speed)
    return study


def longest_by_concurrency(search: Search, sequences: Sequence[int]) -> dict[int, dict[int, Plan]]:
    """Plans on the best split, by engine TP and concurrency. Those that the cache cannot hold are left out."""
    best, found = search.best, {}
    gpus = best.generation.fleet.gpus
    for tp in engine_tps(search.speed):
        fitting = [n for n in sequences if n <= sequences_that_fit(search.workload, search.speed, tp)]
        fleets = {n: FleetSetup(engines=gpus // tp, tp=tp, concurrency=n) for n in fitting}
        if fleets and search.speed.kv_tokens(tp) >= search.workload.longest_tokens:
            found[tp] = {
                n: make_plan(search.workload, search.speed, best.training, fleet, best.max_staleness)
                for n, fleet in fleets.items()
            }
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIf:
    """A change of circumstances that the plan did not foresee."""

    what: str
    workload: Callable[[PlannedWorkload], PlannedWorkload] = lambda w: w
    cluster: Callable[[Cluster], Cluster] = lambda c: c
    constants: Callable[[Constants], Constants] = lambda c: c
    nodes_lost: int = 0

    def _cluster(self, cluster: Cluster) -> Cluster:
        return self.cluster(replace(cluster, nodes=cluster.nodes - self.nodes_lost))

    def applied(self, search: Search) -> Search:
        speed = search.speed
        changed = replace(speed, cluster=self._cluster(speed.cluster), constants=self.constants(speed.constants))
        return replace(search, workload=self.workload(search.workload), speed=changed)

    def unchanged_split(self, plan: Plan) -> Plan:
        """The old plan under the changed circumstances. On fewer nodes the fleet shrinks."""
        speed = replace(plan.speed, cluster=self._cluster(plan.speed.cluster), constants=self.constants(plan.speed.constants))
        workload, fleet = self.workload(plan.workload), plan.generation.fleet
        training = training_cost(workload, speed, plan.training.setup)
        left = (speed.cluster.shared_gpus - training.setup.gpus) // fleet.tp
        return make_plan(workload, speed, training, replace(fleet, engines=max(1, min(fleet.engines, left))), plan.max_staleness)


def _longer(workload: PlannedWorkload, factor: float) -> PlannedWorkload:
    lengths = workload.lengths
    return replace(workload, lengths=replace(lengths, mean_tokens=min(lengths.mean_tokens * factor, lengths.cap_tokens * 0.9)))


def _slower_engines(constants: Constants, factor: float) -> Constants:
    return replace(
        constants, decode_step_s=constants.decode_step_s * factor, sequence_s=constants.sequence_s * factor,
        weight_fraction=constants.weight_fraction / factor, kv_fraction=constants.kv_fraction / factor,
        prefill_fraction=constants.prefill_fraction / factor,
    )  # fmt: skip


WHAT_IFS = (
    WhatIf(what="as planned"),
    WhatIf(what="completions twice as long", workload=lambda w: _longer(w, 2.0)),
    WhatIf(what="completions half as long", workload=lambda w: _longer(w, 0.5)),
    WhatIf(what="engines 1.2 times slower", constants=lambda c: _slower_engines(c, 1.2)),
    WhatIf(what="engines 1.5 times slower", constants=lambda c: _slower_engines(c, 1.5)),
    WhatIf(what="engines 2 times slower", constants=lambda c: _slower_engines(c, 2.0)),
    WhatIf(what="training at 29% of peak", constants=lambda c: replace(c, train_fraction=c.train_fraction * 283 / 388)),
    WhatIf(what="tests take 30 s", workload=lambda w: replace(w, sandbox_s=30.0)),
    WhatIf(what="no KL penalty", workload=lambda w: replace(w, reference=False)),
    WhatIf(what="completions never cut", workload=lambda w: replace(w, segment_tokens=w.lengths.cap_tokens)),
    WhatIf(what="one node is lost", nodes_lost=1),
    WhatIf(what="two nodes are lost", nodes_lost=2),
    WhatIf(what="nodes fail 4 times as often", cluster=lambda c: replace(c, node_mtbf_s=c.node_mtbf_s / 4)),
)
