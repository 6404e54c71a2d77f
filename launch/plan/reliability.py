"""Checkpoints and failures: how much is written, how often nodes fail, what a failure costs, and how often to save."""

from dataclasses import dataclass
from math import ceil, inf, sqrt

from launch.plan.speed import Speed
from launch.plan.training import OPTIMIZER_BYTES, PCIE_BYTES_S, STATE_BYTES, TrainerSetup, stage_parameters

ONE_BUCKET = 5 / 3  # factor on what a save gathers when gradients have one bucket (docs/trainer.md, "Checkpoints")
FLAT = 0.001  # intervals that cost at most this fraction of a run more than the best one count as equally good


@dataclass(frozen=True, kw_only=True, slots=True)
class Reliability:
    state_bytes: float
    write_s: float  # to the shared storage, while training goes on
    stall_s: float  # to gather optimizer state across data-parallel ranks and to copy it into host memory
    job_mtbf_s: float  # between two failures of any node
    trainer_mtbf_s: float  # mean time between failures of any trainer node; only these cost steps
    young_s: float  # sqrt(2 x stall x MTBF) of the trainer's nodes
    young_blocking_s: float  # the same for saves that block
    interval_steps: int  # the longest interval that is as good as the best
    run_s: float  # all steps, with checkpoints and failures; infinite when failures come faster than a run recovers
    failures: float  # expected in that time, of any node
    trainer_failures: float
    lost_s_per_failure: float  # per trainer failure: repeated steps, loading, restarting


def host_bytes(parameters: float, *, one_bucket: bool = False, reference_bytes: int = 0) -> float:
    """Host memory of a rank with this number of parameters: what a save gathers and keeps until it is written, and the weights of
    the reference. With `one_bucket` (no trainer.overlap_grad_reduce) a save gathers more."""
    return (OPTIMIZER_BYTES * (ONE_BUCKET if one_bucket else 1.0) + reference_bytes) * parameters


def gathered_bytes(speed: Speed, setup: TrainerSetup) -> float:
    """Bytes that each rank gathers: master weights and moments of its share of the model, from all data-parallel ranks."""
    return host_bytes(stage_parameters(speed.model, setup))


def save_stall_s(speed: Speed, setup: TrainerSetup) -> float:
    """Gathering over the network, and copying over PCIe. The bf16 weights, which one rank per share copies, are left out."""
    shards = setup.dp * setup.layout.cp
    network = speed.cluster.network_bytes_s * speed.constants.network_fraction
    return gathered_bytes(speed, setup) * ((shards - 1) / shards / network + 1 / PCIE_BYTES_S)


def reliability(speed: Speed, setup: TrainerSetup, *, steps: int, step_s: float) -> Reliability:
    cluster = speed.cluster
    state = STATE_BYTES * speed.model.parameters
    write_s, stall_s = state / cluster.storage_bytes_s, save_stall_s(speed, setup)
    trainer_nodes = ceil(setup.gpus / cluster.gpus_per_node)
    trainer_mtbf_s = cluster.node_mtbf_s / trainer_nodes
    shortest = max(1, ceil(write_s / step_s))  # one checkpoint is written before the next begins

    def lost_s(interval: int) -> float:
        return (interval * step_s + write_s) / 2 + write_s + cluster.restart_s

    def overhead(interval: int) -> float:
        """Fraction of the work that checkpoints and trainer failures add, to first order."""
        return stall_s / (interval * step_s) + lost_s(interval) / trainer_mtbf_s

    best = min(overhead(k) for k in range(shortest, max(steps, shortest) + 1))
    interval = max(k for k in range(shortest, max(steps, shortest) + 1) if overhead(k) <= best + FLAT)
    work_s = steps * (step_s + stall_s / interval)
    working = 1 - lost_s(interval) / trainer_mtbf_s  # nodes also fail during recovery
    run_s = work_s / working if working > 0 else inf
    return Reliability(
        state_bytes=state, write_s=write_s, stall_s=stall_s, job_mtbf_s=cluster.node_mtbf_s / cluster.nodes,
        trainer_mtbf_s=trainer_mtbf_s, young_s=sqrt(2 * stall_s * trainer_mtbf_s),
        young_blocking_s=sqrt(2 * write_s * trainer_mtbf_s),
        interval_steps=interval, run_s=run_s, failures=run_s * cluster.nodes / cluster.node_mtbf_s,
        trainer_failures=run_s / trainer_mtbf_s, lost_s_per_failure=lost_s(interval),
    )  # fmt: skip
