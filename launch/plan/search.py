"""Searches the split of the GPUs and the layouts with the shortest step, and the fewest GPUs that meet the target.

Trainer, fleet and sandboxes work at the same time, so the slowest of them sets the length of a step. A completion may take
`max_staleness` steps from admission to training, so the longest completion bounds the step too: step >= longest / max_staleness.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import ceil

from conf.schema import ConfigError
from conf.shapes import Layout
from launch.plan.generation import FleetSetup, GenerationCost, drained_s, engine_tps, running_sequences
from launch.plan.inputs import Cluster, PlannedWorkload
from launch.plan.model_costs import weight_bytes
from launch.plan.reliability import Reliability, reliability
from launch.plan.speed import Speed
from launch.plan.training import USABLE, TrainerSetup, TrainingCost, push_s, training_cost, training_memory

CONCURRENCIES = (16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 160, 192, 256, 384, 512)
DEEPEST_PIPELINE, CONTEXTS = 16, (1, 2, 4, 8)
TIE = 0.005  # plans whose steps differ by less count as equal; then less staleness and fewer completions in flight win
MOST_NODES = 256  # the largest cluster that is tried when this one is too small, and the most splits of a larger one
SYNCHRONOUS = "generation, then training"


@dataclass(frozen=True, kw_only=True)
class Plan:
    workload: PlannedWorkload
    speed: Speed
    training: TrainingCost
    generation: GenerationCost
    max_staleness: int

    @cached_property
    def seconds(self) -> dict[str, float]:
        """The lower bounds of a step, by name."""
        workload = self.workload
        if not self.max_staleness:
            drain_s = drained_s(workload, self.speed, self.generation.fleet)
            return {SYNCHRONOUS: drain_s + workload.sandbox_s + self.training.step_s}
        return {
            "training": self.training.step_s,
            "generation": self.generation.step_s,
            "sandboxes": workload.completions * workload.sandbox_s / workload.sandbox_cores,
            "longest completion": (self.generation.longest_s + workload.sandbox_s) / self.max_staleness,
        }

    @property
    def step_s(self) -> float:
        return max(self.seconds.values())

    @property
    def limit(self) -> str:
        return max(self.seconds, key=lambda key: self.seconds[key])

    @property
    def trainer_idle(self) -> float:
        """Fraction of a step in which the trainer waits."""
        return 1 - self.training.step_s / self.step_s

    @property
    def fleet_idle(self) -> float:
        """Fraction of the fleet's capacity that a step leaves unused."""
        return 1 - min(1.0, self.generation.step_s / self.step_s)

    @property
    def in_flight(self) -> int:
        return round(self.generation.running * self.generation.fleet.engines)

    @property
    def split(self) -> str:
        """Nodes of the trainer and of the fleet, or their GPUs on a single node."""
        cluster, gpus = self.speed.cluster, self.training.setup.gpus
        return (
            f"{self.trainer_nodes} + {cluster.nodes - self.trainer_nodes}"
            if cluster.nodes > 1
            else f"{gpus} + {cluster.shared_gpus - gpus}"
        )

    @property
    def trainer_nodes(self) -> int:
        return -(-self.training.setup.gpus // self.speed.cluster.gpus_per_node)

    @cached_property
    def reliability(self) -> Reliability:
        return reliability(self.speed, self.training.setup, steps=self.workload.steps, step_s=self.step_s)

    @property
    def hours(self) -> float:
        """The duration of the run, with checkpoints and failures."""
        return self.reliability.run_s / 3600

    def __str__(self) -> str:
        return f"{self.training.setup} | {self.generation.fleet} | S={self.max_staleness}"


def make_plan(workload: PlannedWorkload, speed: Speed, training: TrainingCost, fleet: FleetSetup, max_staleness: int) -> Plan:
    running = running_sequences(workload, speed, fleet, max_staleness)
    push = push_s(speed, training.setup)
    generation = GenerationCost(workload=workload, speed=speed, fleet=fleet, push_s=push, running=running)
    return Plan(workload=workload, speed=speed, training=training, generation=generation, max_staleness=max_staleness)


def setups(speed: Speed, gpus: int, tokens_per_microbatch: int, max_cp: int) -> Iterator[TrainerSetup]:
    """All setups that divide the model and the GPUs. Recomputation is used where nothing else fits, and may not fit either."""
    for tp in engine_tps(speed):
        for pp in (p for p in range(1, DEEPEST_PIPELINE + 1) if not speed.model.layers % p):
            for cp in (c for c in CONTEXTS if c <= max_cp and not gpus % (tp * pp * c)):
                dp = gpus // (tp * pp * cp)
                layout = Layout(tp=tp, pp=pp, cp=cp, sequence_parallel=tp > 1)
                setup = TrainerSetup(layout=layout, dp=dp, tokens_per_microbatch=tokens_per_microbatch)
                yield setup if fits(setup, speed) else replace(setup, recompute=True)


def fits(setup: TrainerSetup, speed: Speed) -> bool:
    return training_memory(speed.model, setup).bytes <= USABLE * speed.cluster.gpu_bytes


@cache
def _trainers(
    workload: PlannedWorkload, speed: Speed, gpus: int, tokens_per_microbatch: int, max_cp: int
) -> tuple[TrainingCost, ...]:
    tried = setups(speed, gpus, tokens_per_microbatch, max_cp)
    costs = [training_cost(workload, speed, setup) for setup in tried if fits(setup, speed)]
    return tuple(sorted(costs, key=lambda cost: (cost.step_s, cost.setup.recompute, cost.setup.layout.tp)))


@dataclass(frozen=True, kw_only=True)
class Search:
    workload: PlannedWorkload
    speed: Speed
    tokens_per_microbatch: int
    staleness_limit: int
    max_cp: int

    @property
    def cluster(self) -> Cluster:
        return self.speed.cluster

    @property
    def trainer_gpus(self) -> range:
        """GPU counts to try for the trainer: whole nodes, single GPUs on one node, or several nodes of a very large cluster."""
        cluster = self.cluster
        unit = cluster.gpus_per_node * ceil(cluster.nodes / MOST_NODES) if cluster.nodes > 1 else 1
        return range(unit, cluster.shared_gpus, unit)

    def trainers(self, gpus: int) -> tuple[TrainingCost, ...]:
        """The setups that fit on this number of GPUs, the fastest first."""
        alone = replace(self.speed, cluster=replace(self.cluster, nodes=0))  # the result does not depend on the cluster's size
        return _trainers(self.workload, alone, gpus, self.tokens_per_microbatch, self.max_cp)

    def fleets(self, gpus: int) -> list[FleetSetup]:
        """Fleets whose engines hold the longest completion, by the number of sequences that the cache allows."""
        found = []
        for tp in (t for t in engine_tps(self.speed) if t <= gpus and self.speed.kv_tokens(t) >= self.workload.longest_tokens):
            room = self.speed.kv_tokens(tp) / self.workload.context_tokens
            found += [FleetSetup(engines=gpus // tp, tp=tp, concurrency=c) for c in CONCURRENCIES if c <= room]
        return found

    def best_on(self, trainer_gpus: int, *, engine_tp: int = 0, staleness: tuple[int, ...] = ()) -> Plan | None:
        """The best fleet beside the fastest trainer on this number of GPUs."""
        fitting = self.trainers(trainer_gpus)
        if not fitting:
            return None
        plans: list[Plan] = []
        for fleet in self.fleets(self.cluster.shared_gpus - trainer_gpus):
            if engine_tp in (0, fleet.tp):
                plans += self._plans(fitting[0], fleet, staleness or tuple(range(1, self.staleness_limit + 1)))
        return least(plans) if plans else None

    def _plans(self, training: TrainingCost, fleet: FleetSetup, staleness: tuple[int, ...]) -> list[Plan]:
        """One plan per staleness. They share what the staleness does not change."""
        plans = [make_plan(self.workload, self.speed, training, fleet, max(staleness))]
        for s in staleness:
            if s < max(staleness):
                same = running_sequences(self.workload, self.speed, fleet, s) == plans[0].generation.running
                made = make_plan(self.workload, self.speed, training, fleet, s)
                plans.append(replace(made, generation=plans[0].generation) if same else made)
        return plans

    def best_with(self, *, engine_tp: int = 0, staleness: tuple[int, ...] = ()) -> Plan | None:
        plans = [self.best_on(n, engine_tp=engine_tp, staleness=staleness) for n in self.trainer_gpus]
        return least([p for p in plans if p]) if any(plans) else None

    @cached_property
    def splits(self) -> list[Plan]:
        """The best plan for each number of GPUs that can hold the trainer."""
        plans = [self.best_on(gpus) for gpus in self.trainer_gpus]
        return [plan for plan in plans if plan]

    @cached_property
    def best(self) -> Plan:
        if not self.splits:
            raise ConfigError(self._why_nothing_fits())
        return least(self.splits)

    def on(self, nodes: int) -> "Search":
        return replace(self, speed=replace(self.speed, cluster=replace(self.cluster, nodes=nodes)))

    def fewest(self) -> Plan | None:
        """The best plan on the smallest cluster that meets the target with failures, which may be larger than this cluster."""
        low, high = 0, self.cluster.nodes
        while not self._meets(high):
            if high >= MOST_NODES:
                return None
            low, high = high, min(2 * high, MOST_NODES)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._meets(middle) else (middle, high)
        return self.on(high).best

    def _meets(self, nodes: int) -> bool:
        search = self.on(nodes)
        return bool(search.splits) and search.best.hours <= self.workload.target_hours

    def _why_nothing_fits(self) -> str:
        cluster, model = self.cluster, self.speed.model
        size = f"{model.name} ({weight_bytes(model) / 1e9:.0f} GB of weights)"
        if self.fleets(cluster.gpus_per_node):
            for nodes in range(1, MOST_NODES):
                if self.trainers(nodes * cluster.gpus_per_node):
                    return (
                        f"cluster.nodes={cluster.nodes} of {cluster.gpus_per_node} GPUs cannot hold a trainer of {size} and "
                        f"an engine beside it: the fewest that can are cluster.nodes={nodes + 1}"
                    )
        return (
            f"{size} fits no layout on GPUs of {cluster.gpu_bytes / 1e9:.0f} GB, {cluster.gpus_per_node} per node, with "
            f"trainer.tokens_per_microbatch={self.tokens_per_microbatch}: take larger GPUs (plan.gpu_memory_gb), more in a "
            "node, a smaller model or shorter completions"
        )


def least(plans: list[Plan]) -> Plan:
    """The plan with the shortest step. Among ties the least staleness wins, then the fewest completions in flight."""
    shortest = min(plan.step_s for plan in plans)
    close = [plan for plan in plans if plan.step_s <= shortest * (1 + TIE)]
    return min(close, key=lambda p: (p.max_staleness, p.in_flight, p.step_s))
