"""One run from start to end: prepare, check, place, start, watch, report."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from conf.schema import ConfigError, RunConfig
from launch.costs import costs
from launch.doctor.examine import check_before_start
from launch.doctor.node import port_is_free
from launch.local import Interrupted, RunFailed, Supervisor
from launch.placement import Node, Process, choose_base_port, describe, place
from launch.prepare import RECIPES, prepare
from launch.progress import Progress, outcome, read_metrics, summary
from launch.report import write_report
from launch.run_dir import check_run_dir, held
from rollout.keys import RunKeys

LOGS = "logs"
LOOPBACK = "127.0.0.1"


def execute(config: RunConfig, run_dir: Path, *, write: Callable[[], None], resumed: bool, out: TextIO) -> float:
    """Runs to the end; `write` puts the configuration into the run's folder. Returns the run's outcome.

    Raises ConfigError, PrepareError before anything is started, RunFailed and Interrupted after.
    """

    def say(text: str) -> None:
        print(text, file=out, flush=True)

    started_s = time.monotonic()
    _check_place(config)
    check_run_dir(run_dir, resumed=resumed)
    prepare(RECIPES[config.model.prepare], say)
    base_port = choose_base_port(run_dir, config, port_is_free)
    processes = place(config, run_dir, local_nodes(config), base_port)
    check_before_start(config, run_dir, processes, say)
    with held(run_dir):
        write()
        RunKeys.create(run_dir)
        say(f"{'resuming' if resumed else 'run'} {run_dir}: {_counts(processes)}, logs in {run_dir / LOGS}")
        progress = Progress(run_dir, config.trainer.steps, processes, out, resumed=resumed)
        try:
            with Supervisor(processes, run_dir / LOGS, config.cluster.worker_restarts, progress.say) as supervisor:
                supervisor.run(progress.tick)
        except Interrupted:
            progress.say(f"interrupted; {_how_to_go_on(run_dir)}")
            raise
        except RunFailed as error:
            raise RunFailed(f"{error}\n{_how_to_go_on(run_dir)}") from error
        finally:
            write_report(run_dir)
    progress.say(summary(run_dir, time.monotonic() - started_s))
    return outcome(read_metrics(run_dir))


def _how_to_go_on(run_dir: Path) -> str:
    return f"go on from the last checkpoint with: make run resume={run_dir}   (python -m launch resume={run_dir})"


def dry_run(config: RunConfig) -> str:
    """The placement of a run and what it costs, on whatever machine; nothing is made or started."""
    run_dir = Path(config.output) / config.name
    base_port = choose_base_port(run_dir, config, is_free=lambda port: True)
    placed = place(config, run_dir, planned_nodes(config), base_port)
    return f"{describe(placed)}\n\n{costs(config)}"


def planned_nodes(config: RunConfig) -> list[Node]:
    """This machine, or stand-ins for the nodes of a larger run."""
    count = config.cluster.nodes
    if count == 1:
        return local_nodes(config)
    return [Node(name=f"node-{n:03d}", address=f"node-{n:03d}", gpus=config.cluster.gpus_per_node) for n in range(count)]


def local_nodes(config: RunConfig) -> list[Node]:
    """This machine."""
    gpus = config.cluster.gpus_per_node or gpus_found()
    return [Node(name=os.uname().nodename, address=LOOPBACK, gpus=gpus)]


def gpus_found() -> int:
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def with_device(config: RunConfig) -> RunConfig:
    """`cluster.device=auto` made definite: the GPUs when there are any."""
    if config.cluster.device != "auto":
        return config
    device = "cuda" if config.cluster.gpus_per_node or gpus_found() else "cpu"
    return replace(config, cluster=replace(config.cluster, device=device))


def _check_place(config: RunConfig) -> None:
    if config.cluster.kind != "local" or config.cluster.nodes != 1:
        raise ConfigError(
            f"cluster.kind={config.cluster.kind}, cluster.nodes={config.cluster.nodes}: this command starts runs on "
            "this machine only (cluster.kind=local, cluster.nodes=1); dry_run=true shows the placement of a larger one"
        )


def _counts(processes: list[Process]) -> str:
    roles = list(dict.fromkeys(p.role for p in processes))
    return ", ".join(f"{sum(p.role == role for p in processes)} {role}" for role in roles)
