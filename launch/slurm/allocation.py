"""The machines of a run: this machine, the nodes of the launcher's Slurm job, or nodes that are only planned."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from conf.schema import ConfigError, RunConfig
from launch.placement.gpus import gpus_found, visible_gpus
from launch.placement.node_facts import port_is_free
from launch.placement.placement import Node
from launch.processes.local import LocalBackend
from launch.processes.prepare import PROJECT
from launch.processes.supervise import Backend
from launch.slurm.backend import SlurmBackend
from launch.slurm.job import SlurmJob, in_batch_job, probe, this_job, with_assigned_gpus
from launch.slurm.step import StepContext

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """The machines of a run, and how to start processes there."""

    nodes: list[Node]
    backend: Callable[[Path], Backend]  # takes the folder for the logs
    is_free: Callable[[int], bool]  # whether a port is free on every node
    job: SlurmJob | None = None


def allocation_of(config: RunConfig) -> Allocation:
    """Raises ConfigError, SlurmError."""
    if config.cluster.kind == "local":
        check_single_node(config)
        return Allocation(nodes=local_nodes(config), backend=LocalBackend, is_free=port_is_free)
    job = this_job(config.cluster.gpus_per_node)
    probed = probe(job.nodes, config.cluster.srun_args)
    nodes = with_assigned_gpus(job.nodes, probed) if config.cluster.device == "cuda" else job.nodes

    def backend(log_dir: Path) -> SlurmBackend:
        context = StepContext(cluster=config.cluster, folders=(Path.cwd(), PROJECT, log_dir.parent))
        return SlurmBackend(job, context, log_dir)

    return Allocation(nodes=list(nodes), backend=backend, is_free=lambda port: port not in probed.ports_in_use, job=job)


def check_single_node(config: RunConfig) -> None:
    """Raises ConfigError."""
    if config.cluster.nodes != 1:
        raise ConfigError(
            f"cluster.nodes={config.cluster.nodes}: with cluster.kind=local a run has this machine only; "
            "dry_run=true shows the placement of a larger run, and sbatch launch/kestrel_256.sh starts it"
        )


def nodes_at_hand(config: RunConfig) -> list[Node]:
    """The nodes of this Slurm job, if the run needs one, and otherwise the planned nodes. Raises ConfigError, SlurmError."""
    if config.cluster.kind == "local":
        check_single_node(config)
    if config.cluster.kind == "slurm" and in_batch_job():
        return list(this_job(config.cluster.gpus_per_node).nodes)
    return planned_nodes(config)


def planned_nodes(config: RunConfig) -> list[Node]:
    """This machine, or placeholders for the nodes of a larger run."""
    count = config.cluster.nodes
    if count == 1:
        return local_nodes(config)
    return [Node(name=f"node-{n:03d}", address=f"node-{n:03d}", gpus=config.cluster.gpus_per_node) for n in range(count)]


def local_nodes(config: RunConfig) -> list[Node]:
    """This machine, with the GPUs that the launcher may use. Raises ConfigError."""
    gpus, visible = config.cluster.gpus_per_node or gpus_found(), visible_gpus() or ()
    if visible and gpus > len(visible):
        raise ConfigError(
            f"cluster.gpus_per_node={gpus}, but CUDA_VISIBLE_DEVICES={','.join(visible)} names {len(visible)}: "
            "lower the one, or name more GPUs in the other"
        )
    return [Node(name=os.uname().nodename, address=LOOPBACK, gpus=gpus, visible=visible)]


def with_device(config: RunConfig) -> RunConfig:
    """The configuration with `cluster.device=auto` decided: cuda when there are GPUs."""
    if config.cluster.device != "auto":
        return config
    device = "cuda" if config.cluster.gpus_per_node or gpus_found() else "cpu"
    return replace(config, cluster=replace(config.cluster, device=device))
