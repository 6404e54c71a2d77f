"""The Slurm job that the launcher runs in: its number, its nodes, and what it asks of Slurm."""

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
    """A command of Slurm's failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    id: int
    restarts: int  # how often it was requeued
    nodes: tuple[Node, ...]  # the first one runs the batch script, and so this process


def in_batch_job() -> bool:
    """Whether this process runs in a batch script of Slurm's."""
    return "SLURM_JOB_ID" in os.environ and os.environ.get("SLURM_STEP_ID", "") in ("", "4294967291")


def second_life() -> bool:
    """Whether this job was requeued: then its run has begun already."""
    return in_batch_job() and int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0


def this_job(gpus_per_node: int) -> Job:
    """gpus_per_node: 0 for what Slurm gave. Raises ConfigError outside a job, SlurmError."""
    if not in_batch_job():
        raise ConfigError(
            "cluster.kind=slurm: this is no batch job of Slurm's; submit it: sbatch launch/kestrel_256.sh [override …]"
        )
    env = os.environ
    names = ask("scontrol", "show", "hostnames", env["SLURM_JOB_NODELIST"]).split()
    names.sort(key=lambda name: name != env.get("SLURMD_NODENAME"))  # the batch node first, the others as they come
    addresses = parse_addresses(ask("scontrol", "show", "node", "--oneliner", ",".join(names)))
    gpus = gpus_per_node or int(env.get("SLURM_GPUS_ON_NODE", "0"))
    return Job(
        id=int(env["SLURM_JOB_ID"]),
        restarts=int(env.get("SLURM_RESTART_COUNT", "0")),
        nodes=tuple(Node(name=name, address=addresses[name], gpus=gpus) for name in names),
    )


def parse_addresses(text: str) -> dict[str, str]:
    """Node names and addresses from `scontrol show node --oneliner`."""
    addresses: dict[str, str] = {}
    for line in text.splitlines():
        said: dict[str, str] = dict(re.findall(r"\b(NodeName|NodeAddr)=(\S+)", line))
        if name := said.get("NodeName"):
            addresses[name] = said.get("NodeAddr", name)
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


def requeue(job: Job) -> None:
    """Gives the nodes back and has the job start again later. Slurm ends this process then. Raises SlurmError."""
    ask("scontrol", "requeue", str(job.id))


def time_left_s(job: Job) -> float:
    """Until Slurm ends the job; inf if it has no limit, or Slurm does not say."""
    try:
        return parse_duration_s(ask("squeue", "--noheader", "--jobs", str(job.id), "--format", "%L", timeout_s=TIME_LEFT_S))
    except SlurmError:
        return inf


def parse_duration_s(text: str) -> float:
    """Slurm's `1-02:03:04`, `2:03:04` or `3:04` in seconds; inf for a word, as UNLIMITED."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text.strip())
    if found is None:
        return inf
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((24 * days + hours) * 60 + minutes) * 60 + seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class Probed:
    """What the job finds on its nodes."""

    taken: frozenset[int]  # ports, on any of them
    gpus: Mapping[str, tuple[str, ...]]  # of each node where Slurm hands out GPUs, those that are the job's


def probe(nodes: Sequence[Node], srun_args: Sequence[str]) -> Probed:
    """Asks every node. Raises SlurmError."""
    names = [node.name for node in nodes]
    return read_probe(ask(*probe_command(names, [sys.executable, "-S", str(PROBE)], srun_args), timeout_s=PROBE_S), names)


def read_probe(text: str, names: Sequence[str]) -> Probed:
    """Reads what the probes printed, a line a node. Raises SlurmError."""
    answers = [json.loads(line) for line in text.splitlines() if line.startswith("{")]  # a site's prolog may speak too
    said = {answer["node"]: answer for answer in answers}
    if silent := [name for name in names if name not in said]:
        raise SlurmError(f"no word from {', '.join(silent)} before the start")
    return Probed(
        taken=frozenset(port for answer in said.values() for port in answer["taken"]),
        gpus={name: cuda_devices(answer["gpus"]) for name, answer in said.items() if answer["gpus"] is not None},
    )


def given_gpus(nodes: Sequence[Node], probed: Probed) -> tuple[Node, ...]:
    """The nodes with the names of those of their GPUs that are the job's, as many as the run wants. Raises ConfigError."""
    for node in nodes:
        if len(names := probed.gpus.get(node.name, ())) < node.gpus and node.name in probed.gpus:
            raise ConfigError(
                f"the run wants {node.gpus} GPUs on {node.name}, and Slurm gave the job {len(names)} there "
                f"(CUDA_VISIBLE_DEVICES={','.join(names)}): ask for them (sbatch --gpus-per-node={node.gpus}), or set "
                f"cluster.gpus_per_node={len(names)}"
            )
    return tuple(replace(node, visible=probed.gpus.get(node.name, ())) for node in nodes)
