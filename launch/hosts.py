"""Where a run takes place: on this machine, on the nodes of the Slurm job that the launcher is in, or, on paper, on any."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from conf.schema import ConfigError, RunConfig
from launch.placement.gpus import gpus_found, visible_gpus
from launch.placement.node_facts import port_is_free
from launch.placement.placement import Node
from launch.processes.local import LocalHost
from launch.processes.prepare import PROJECT
from launch.processes.supervise import Host
from launch.slurm.host import SlurmHost
from launch.slurm.job import Job, given_gpus, in_batch_job, probe, this_job
from launch.slurm.step import Where

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """Where a run takes place."""

    nodes: list[Node]
    host: Callable[[Path], Host]  # from the folder of the logs
    is_free: Callable[[int], bool]  # a port
    job: Job | None = None  # of Slurm


def site_of(config: RunConfig) -> Site:
    """Raises ConfigError, SlurmError."""
    if config.cluster.kind == "local":
        _check_local(config)
        return Site(nodes=local_nodes(config), host=LocalHost, is_free=port_is_free)
    job = this_job(config.cluster.gpus_per_node)
    probed = probe(job.nodes, config.cluster.srun_args)
    nodes = given_gpus(job.nodes, probed) if config.cluster.device == "cuda" else job.nodes

    def host(log_dir: Path) -> SlurmHost:
        return SlurmHost(job, Where(cluster=config.cluster, folders=(Path.cwd(), PROJECT, log_dir.parent)), log_dir)

    return Site(nodes=list(nodes), host=host, is_free=lambda port: port not in probed.taken, job=job)


def _check_local(config: RunConfig) -> None:
    """Raises ConfigError."""
    if config.cluster.nodes != 1:
        raise ConfigError(
            f"cluster.nodes={config.cluster.nodes}: with cluster.kind=local a run has this machine only; "
            "dry_run=true shows the placement of a larger one, sbatch launch/kestrel_256.sh starts it"
        )


def nodes_at_hand(config: RunConfig) -> list[Node]:
    """Those of the Slurm job that this process is in, if the run is for one; else as planned. Raises ConfigError, SlurmError."""
    if config.cluster.kind == "local":
        _check_local(config)
    if config.cluster.kind == "slurm" and in_batch_job():
        return list(this_job(config.cluster.gpus_per_node).nodes)
    return planned_nodes(config)


def planned_nodes(config: RunConfig) -> list[Node]:
    """This machine, or stand-ins for the nodes of a larger run."""
    count = config.cluster.nodes
    if count == 1:
        return local_nodes(config)
    return [Node(name=f"node-{n:03d}", address=f"node-{n:03d}", gpus=config.cluster.gpus_per_node) for n in range(count)]


def local_nodes(config: RunConfig) -> list[Node]:
    """This machine, with those of its GPUs that the launcher was given. Raises ConfigError."""
    gpus, visible = config.cluster.gpus_per_node or gpus_found(), visible_gpus() or ()
    if visible and gpus > len(visible):
        raise ConfigError(f"cluster.gpus_per_node={gpus}, but CUDA_VISIBLE_DEVICES={','.join(visible)} leaves {len(visible)}")
    return [Node(name=os.uname().nodename, address=LOOPBACK, gpus=gpus, visible=visible)]


def with_device(config: RunConfig) -> RunConfig:
    """`cluster.device=auto` made definite: the GPUs when there are any."""
    if config.cluster.device != "auto":
        return config
    device = "cuda" if config.cluster.gpus_per_node or gpus_found() else "cpu"
    return replace(config, cluster=replace(config.cluster, device=device))
