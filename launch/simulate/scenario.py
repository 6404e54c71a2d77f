"""What is simulated: the rules of the ledger, the hardware, the work, and what fails."""

from dataclasses import dataclass
from enum import StrEnum
from math import inf

from launch.simulate.speeds import EngineSpeeds, TrainerSpeeds
from launch.simulate.workload import Workload
from rollout.ledger.ledger import Rules

DAY_S = 86_400.0


class PushMode(StrEnum):
    """When engines take new weights."""

    INTERRUPT = "interrupt"  # at once: running sequences are retracted and continue
    DRAIN = "drain"  # after all running sequences have ended; nothing new starts before
    BATCH = "batch"  # after the whole batch has been generated


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineGroup:
    """Engines of one kind."""

    engines: int
    gpus_per_engine: int
    concurrency: int
    speeds: EngineSpeeds
    tail: bool = False  # they take only completions that were cut before


@dataclass(frozen=True, kw_only=True, slots=True)
class Failures:
    node_mtbf_s: float = 20 * DAY_S  # 0: nothing fails
    gpus_per_node: int = 8
    lease_s: float = 30.0  # until the leases of a dead engine return
    engine_restart_s: float = 600.0  # until a failed rollout node serves again (another node, weights by the next push)
    trainer_restart_s: float = 600.0  # until the trainer is back at its last checkpoint
    planned: tuple[tuple[float, int], ...] = ()  # (time_s, node): these, beside what chance brings
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    name: str
    rules: Rules  # total_steps: the steps that are simulated
    engine_groups: tuple[EngineGroup, ...]
    trainer: TrainerSpeeds
    trainer_gpus: int
    colocated: bool = False  # trainer and engines take turns on the same GPUs
    push_mode: PushMode = PushMode.INTERRUPT
    sandboxes: int
    workload: Workload
    checkpoint_every: int  # steps; 0: only at the end
    failures: Failures

    @property
    def steps(self) -> int:
        assert self.rules.total_steps is not None
        return self.rules.total_steps

    @property
    def patience_s(self) -> float:
        """A simulation without progress for this time is stuck. Everything that is simulated takes less, slow tests included."""
        failures = self.failures
        restarts_s = (failures.lease_s, failures.trainer_restart_s, failures.engine_restart_s)
        return 6 * 3600.0 + 10 * sum(s for s in restarts_s if s < inf) + 100 * self.workload.grading_mean_s

    @property
    def rollout_nodes(self) -> int:
        return -(-self.engine_gpus // self.failures.gpus_per_node)

    @property
    def trainer_nodes(self) -> int:
        """The fleet's nodes have the first numbers. The trainer's nodes follow, or are the same nodes."""
        return -(-self.trainer_gpus // self.failures.gpus_per_node)

    @property
    def engine_gpus(self) -> int:
        return sum(fleet.engines * fleet.gpus_per_engine for fleet in self.engine_groups)
