"""What is examined: a run that is about to start, and what its nodes say about themselves.

The facts are gathered here, by a small script on every node and by every Python of the run (`node.py`); checks read them.
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
from launch.placement.placement import Process
from launch.processes.prepare import PROJECT, RECIPES, makes
from launch.slurm.job import in_batch_job
from launch.slurm.step import Where, everywhere_command

NODE_SCRIPT = Path(node_facts.__file__)
NODES_S = 60.0  # for all nodes to answer
IMAGE_S = 1200.0  # the same, when each may have to fetch the container's image first
SHARED_S = 10.0  # for a file written on one node to be seen on another


class DoctorError(RuntimeError):
    """The facts could not be gathered; the message says from which nodes, and why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """What a node says, as one Python on it sees it. The fields are those of `node.facts`."""

    node: str
    time_s: float
    python: str
    python_version: str
    packages: dict[str, str]
    env: dict[str, str]
    limits: dict[str, int]  # soft ones; -1: none
    shm_bytes: int  # free in /dev/shm
    memory_bytes: int  # available
    overcommit: int  # vm.overcommit_memory
    ephemeral_from: int  # first port that the kernel hands out by itself
    interfaces: list[str]
    gpus: list[dict[str, Any]]
    canary: dict[str, str]
    unseen: list[str]  # of the paths that were asked for
    busy_ports: list[int]


@dataclass(frozen=True, kw_only=True)
class Case:
    config: RunConfig
    run_dir: Path
    processes: Sequence[Process]
    nodes: Sequence[Node] = ()
    asked_s: tuple[float, float] = (0.0, 0.0)  # this machine's clock, before and after the nodes were asked
    lost_canaries: Sequence[str] = ()  # nodes whose file did not come to be seen here

    @property
    def on_gpus(self) -> bool:
        return self.config.cluster.device == "cuda"

    @property
    def asked_any(self) -> bool:
        """Whether a node of the run has answered; outside of its Slurm job it is another machine that does."""
        return not {process.node for process in self.processes}.isdisjoint(node.node for node in self.nodes)

    def made_later(self, path: str) -> bool:
        """Whether the launch will make what is not there yet."""
        return not Path(path).exists() and makes(RECIPES[self.config.model.prepare], path)

    @cached_property
    def parameters(self) -> float:
        """Of the model; 0 when that is not known."""
        try:
            return shape_of(self.config.model).parameters
        except ConfigError:
            return 0.0

    @cached_property
    def roles_of(self) -> dict[str, list[str]]:
        """Python -> the roles that it runs."""
        found: dict[str, list[str]] = {}
        for process in self.processes:
            roles = found.setdefault(process.argv[0], [])
            if process.role not in roles:
                roles.append(process.role)
        return found


def gather(config: RunConfig, run_dir: Path, processes: Sequence[Process]) -> Case:
    """Asks every node, with every Python that the run uses. Raises DoctorError."""
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

        def ask(python: str) -> list[Node]:
            """Named as the run names it: `python3` calls itself by its path."""
            command = everywhere([python, str(NODE_SCRIPT), request], config, run_dir, processes)
            return [replace(node, python=python) for node in _ask(command, within_s)]

        nodes = [node for answers in pool.map(ask, case.roles_of) for node in answers]
    after_s = time.time()
    lost = tuple(_missing_canaries(nodes))
    return Case(config=config, run_dir=run_dir, processes=processes, nodes=nodes, asked_s=(before_s, after_s), lost_canaries=lost)


def existing(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    return next(p for p in (path.absolute(), *path.absolute().parents) if p.is_dir())


def inputs(config: RunConfig) -> Iterator[str]:
    """What every node must see as this machine does; what is not even here is for other checks to say."""
    yield config.model.path
    yield from (source for source in (*config.data.train, *config.data.heldout) if "://" not in source)


def everywhere(command: list[str], config: RunConfig, run_dir: Path, processes: Sequence[Process]) -> list[str]:
    """A command on this machine, or as a step on every node of these processes, if this one is in the run's Slurm job."""
    if config.cluster.kind != "slurm" or not in_batch_job():
        return command
    nodes = list(dict.fromkeys(process.node for process in processes))
    where = Where(cluster=config.cluster, folders=(Path.cwd(), PROJECT, existing(run_dir).resolve()))
    return everywhere_command(nodes, where, command)


def _ask(command: list[str], within_s: float) -> list[Node]:
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=within_s)
    except OSError as error:
        raise DoctorError(f"{command[0]} cannot be run: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise DoctorError(f"`{' '.join(command[:6])} …` did not end within {within_s:g} s") from error
    nodes = [Node(**json.loads(line)) for line in answer.stdout.splitlines() if line.startswith("{")]
    if answer.returncode or not nodes:
        raise DoctorError(f"`{' '.join(command[:6])} …` ended with {answer.returncode}: {answer.stderr.strip()[-600:]}")
    return nodes


def _missing_canaries(nodes: Sequence[Node]) -> Iterator[str]:
    """Looks for the nodes' files, with patience for a shared file system, and removes them."""
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
