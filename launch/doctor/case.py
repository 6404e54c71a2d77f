"""A case to examine: a run that is about to start, and the facts that its nodes report.

A small script (placement/node_facts.py) collects the facts on every node, with every Python of the run.
"""

import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from conf.schema import ConfigError, RunConfig
from conf.shapes import shape_of
from launch.doctor.pins import pinned_packages
from launch.placement import node_facts
from launch.placement.placement import ProcessSpec
from launch.processes.prepare import PROJECT, RECIPES, will_make
from launch.slurm.job import in_batch_job
from launch.slurm.step import StepContext, everywhere_command
from rollout.servers import servers

NODE_SCRIPT = Path(node_facts.__file__)
NODES_S = 60.0  # the time that all nodes have to answer
IMAGE_S = 1200.0  # the same, when each node may have to download the container image first
SHARED_S = 10.0  # the time until a file that one node wrote must be visible on another


class DoctorError(RuntimeError):
    """The facts could not be collected. The message says from which nodes, and why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeReport:
    """The facts about a node as one Python on it sees them, with the fields of `node_facts.facts`."""

    node: str
    time_s: float
    python: str
    python_version: str
    packages: dict[str, str]
    env: dict[str, str]
    limits: dict[str, int]  # soft limits; -1: unlimited
    shm_bytes: int  # free in /dev/shm
    memory_bytes: int  # available
    overcommit: int  # vm.overcommit_memory
    ephemeral_from: int  # the first port that the kernel assigns by itself
    interfaces: list[str]
    gpus: list[dict[str, Any]]
    canary: dict[str, str]
    unseen: list[str]  # the paths of the request that do not exist there
    busy_ports: list[int]


@dataclass(frozen=True, kw_only=True)
class Case:
    config: RunConfig
    run_dir: Path
    processes: Sequence[ProcessSpec]
    nodes: Sequence[NodeReport] = ()
    asked_s: tuple[float, float] = (0.0, 0.0)  # by this machine's clock, before and after the nodes were asked
    lost_canaries: Sequence[str] = ()  # the nodes whose file did not become visible here

    @property
    def on_gpus(self) -> bool:
        return self.config.cluster.device == "cuda"

    @property
    def asked_any(self) -> bool:
        """Whether a node of the run has answered. Outside of the Slurm job, only this machine answers."""
        return not {process.node for process in self.processes}.isdisjoint(node.node for node in self.nodes)

    def made_later(self, path: str) -> bool:
        """Whether the launch will make the file or folder, which is not there yet."""
        return not Path(path).exists() and will_make(RECIPES[self.config.model.prepare], path)

    @cached_property
    def parameters(self) -> float:
        """The number of the model's parameters; 0 when it is not known."""
        try:
            return shape_of(self.config.model).parameters
        except ConfigError:
            return 0.0

    @cached_property
    def roles_of(self) -> dict[str, list[str]]:
        """Python interpreter -> the roles that it runs."""
        found: dict[str, list[str]] = {}
        for process in self.processes:
            roles = found.setdefault(process.argv[0], [])
            if process.role not in roles:
                roles.append(process.role)
        return found


def gather(config: RunConfig, run_dir: Path, processes: Sequence[ProcessSpec]) -> Case:
    """Asks every node with every Python of the run. Raises DoctorError."""
    case = Case(config=config, run_dir=run_dir, processes=processes)
    request = json.dumps(
        {
            "node": processes[0].node if config.cluster.kind == "local" else "",
            "canary": str(existing(run_dir).resolve()),
            "paths": [str(Path(path).resolve()) for path in inputs(config) if Path(path).exists()],
            "ports": sorted({port for process in processes for port in process.ports.values()}),
            "packages": pinned_packages(),
        }
    )
    before_s = time.time()
    with ThreadPoolExecutor() as pool:
        within_s = IMAGE_S if config.cluster.container else NODES_S

        def ask(python: str) -> list[NodeReport]:
            """The reports name the Python as the run does, since `python3` reports its own path."""
            command = everywhere([python, str(NODE_SCRIPT), request], config, run_dir, processes)
            return [replace(node, python=python) for node in _ask(command, within_s)]

        nodes = [node for answers in pool.map(ask, case.roles_of) for node in answers]
    after_s = time.time()
    lost = tuple(_missing_canaries(nodes))
    return Case(config=config, run_dir=run_dir, processes=processes, nodes=nodes, asked_s=(before_s, after_s), lost_canaries=lost)


def existing(path: Path) -> Path:
    """The path itself, or the nearest folder above it that exists."""
    return next(p for p in (path.absolute(), *path.absolute().parents) if p.is_dir())


def inputs(config: RunConfig) -> Iterator[str]:
    """The files that every node must see as this machine does. Other checks report those that are missing here."""
    yield config.model.path
    yield from (server.frozen for server in servers(config) if server.frozen)
    yield from (source for source in (*config.data.train, *config.data.heldout) if "://" not in source)


def everywhere(command: list[str], config: RunConfig, run_dir: Path, processes: Sequence[ProcessSpec]) -> list[str]:
    """The command for this machine or, inside of the run's Slurm job, for a step on every node of these processes."""
    if config.cluster.kind != "slurm" or not in_batch_job():
        return command
    nodes = list(dict.fromkeys(process.node for process in processes))
    context = StepContext(cluster=config.cluster, folders=(Path.cwd(), PROJECT, existing(run_dir).resolve()))
    return everywhere_command(nodes, context, command)


def _ask(command: list[str], within_s: float) -> list[NodeReport]:
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=within_s)
    except OSError as error:
        raise DoctorError(f"{command[0]} cannot be run: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise DoctorError(f"`{' '.join(command[:6])} …` did not end within {within_s:g} s") from error
    nodes = [NodeReport(**report) for report in node_facts.read(answer.stdout)]
    if answer.returncode or not nodes:
        raise DoctorError(f"`{' '.join(command[:6])} …` ended with {answer.returncode}: {answer.stderr.strip()[-600:]}")
    return nodes


def _missing_canaries(nodes: Sequence[NodeReport]) -> Iterator[str]:
    """The nodes whose file does not become visible here in time. Removes the files."""
    until = time.monotonic() + SHARED_S
    for node in nodes:
        if "path" not in node.canary:
            continue
        path = Path(node.canary["path"])
        while not _holds(path, node.canary["word"]) and time.monotonic() < until:
            time.sleep(0.2)
        if not _holds(path, node.canary["word"]):
            yield node.node
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _holds(path: Path, word: str) -> bool:
    try:
        return path.read_text() == word
    except OSError:
        return False
