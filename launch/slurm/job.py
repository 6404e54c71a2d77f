"""The Slurm job in which the launcher runs: its number, its nodes, and the questions that it asks Slurm."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from conf.schema import ConfigError
from launch.placement.gpus import cuda_devices
from launch.placement.placement import Node
from launch.slurm.step import probe_command

ASK_S = 60.0
TIME_LEFT_S = 15.0
PROBE_S = 180.0
PROBE = Path(__file__).with_name("probe.py")


class SlurmError(RuntimeError):
    """A Slurm command failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmJob:
    id: int
    restarts: int  # how often the job was requeued
    nodes: tuple[Node, ...]  # the batch script, and so this process, runs on the first one


def in_batch_job() -> bool:
    """Whether this process runs in a Slurm batch script."""
    return "SLURM_JOB_ID" in os.environ and os.environ.get("SLURM_STEP_ID", "") in ("", "4294967291")


def was_requeued() -> bool:
    """Whether this job was requeued. Then its run exists already."""
    return in_batch_job() and int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0


def this_job(gpus_per_node: int) -> SlurmJob:
    """gpus_per_node: 0 means the number that Slurm assigned. Raises SlurmError, and ConfigError outside of a batch job."""
    if not in_batch_job():
        raise ConfigError(
            "cluster.kind=slurm: this process is not in a Slurm batch job; submit one: sbatch launch/kestrel_256.sh [override …]"
        )
    env = os.environ
    names = ask("scontrol", "show", "hostnames", env["SLURM_JOB_NODELIST"]).split()
    names.sort(key=lambda name: name != env.get("SLURMD_NODENAME"))  # the batch node first, the others in their order
    addresses = parse_addresses(ask("scontrol", "show", "node", "--oneliner", ",".join(names)))
    gpus = gpus_per_node or int(env.get("SLURM_GPUS_ON_NODE", "0"))
    return SlurmJob(
        id=int(env["SLURM_JOB_ID"]),
        restarts=int(env.get("SLURM_RESTART_COUNT", "0")),
        nodes=tuple(Node(name=name, address=addresses[name], gpus=gpus) for name in names),
    )


def parse_addresses(text: str) -> dict[str, str]:
    """Node names and addresses, from the output of `scontrol show node --oneliner`."""
    addresses: dict[str, str] = {}
    for line in text.splitlines():
        fields: dict[str, str] = dict(re.findall(r"\b(NodeName|NodeAddr)=(\S+)", line))
        if name := fields.get("NodeName"):
            addresses[name] = fields.get("NodeAddr", name)
    return addresses


def ask(*command: str, timeout_s: float = ASK_S) -> str:
    """A command's output. Raises SlurmError."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SlurmError(f"`{' '.join(command)}`: {error}") from error
    if done.returncode:
        raise SlurmError(f"`{' '.join(command)}` ended with exit code {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def requeue(job: SlurmJob) -> None:
    """Returns the nodes and makes Slurm start the job again later. Slurm then ends this process. Raises SlurmError."""
    ask("scontrol", "requeue", str(job.id))


def time_left_s(job: SlurmJob) -> float:
    """The time until Slurm ends the job; inf if the job has no limit, or if Slurm does not answer."""
    try:
        return parse_duration_s(ask("squeue", "--noheader", "--jobs", str(job.id), "--format", "%L", timeout_s=TIME_LEFT_S))
    except SlurmError:
        return inf


def parse_duration_s(text: str) -> float:
    """Converts Slurm's `1-02:03:04`, `2:03:04` or `3:04` to seconds; inf for a word such as UNLIMITED."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text.strip())
    if found is None:
        return inf
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((24 * days + hours) * 60 + minutes) * 60 + seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeResult:
    """The answers of all nodes."""

    ports_in_use: frozenset[int]  # on any of the nodes
    gpus: Mapping[str, tuple[str, ...]]  # the job's GPUs, for each node where Slurm assigns GPUs


def probe(nodes: Sequence[Node], srun_args: Sequence[str]) -> ProbeResult:
    """Asks every node. Raises SlurmError."""
    names = [node.name for node in nodes]
    return read_probe(ask(*probe_command(names, [sys.executable, "-S", str(PROBE)], srun_args), timeout_s=PROBE_S), names)


def read_probe(text: str, names: Sequence[str]) -> ProbeResult:
    """Reads what the probes printed, one line per node. Raises SlurmError."""
    answers = [json.loads(line) for line in text.splitlines() if line.startswith("{")]  # a cluster's prolog may print other lines
    by_node = {answer["node"]: answer for answer in answers}
    if silent := [name for name in names if name not in by_node]:
        raise SlurmError(f"no answer from {', '.join(silent)} before the start")
    return ProbeResult(
        ports_in_use=frozenset(port for answer in by_node.values() for port in answer["ports_in_use"]),
        gpus={name: cuda_devices(answer["gpus"]) for name, answer in by_node.items() if answer["gpus"] is not None},
    )


def with_assigned_gpus(nodes: Sequence[Node], probed: ProbeResult) -> tuple[Node, ...]:
    """The nodes with the names of the GPUs that the job has there. Raises ConfigError if a node has too few."""
    for node in nodes:
        if len(names := probed.gpus.get(node.name, ())) < node.gpus and node.name in probed.gpus:
            raise ConfigError(
                f"the run needs {node.gpus} GPUs on {node.name}, but Slurm assigned {len(names)} to the job there "
                f"(CUDA_VISIBLE_DEVICES={','.join(names)}): ask for them (sbatch --gpus-per-node={node.gpus}), or set "
                f"cluster.gpus_per_node={len(names)}"
            )
    return tuple(replace(node, visible=probed.gpus.get(node.name, ())) for node in nodes)
