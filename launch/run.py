"""One run from start to end: prepare, check, place, start, watch, report."""

import os
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from conf.load import as_yaml
from conf.schema import ConfigError, RunConfig
from launch.costs import costs
from launch.doctor.examine import check_before_start
from launch.doctor.node import port_is_free
from launch.doctor.problems import check_files
from launch.lifecycle import End, Lifecycle, Outcome, Rules
from launch.local import LocalHost
from launch.metrics import read_metrics
from launch.placement import Node, Process, cuda_devices, describe, place, trainer_ranks
from launch.port_claims import PortClaims
from launch.ports import choose_base_port
from launch.prepare import PROJECT, RECIPES, prepare
from launch.progress import Progress
from launch.recovery import Recoveries
from launch.report import write_report
from launch.run_dir import check_run_dir, held
from launch.shown import Shown
from launch.slurm.host import SlurmHost
from launch.slurm.job import Job, SlurmError, given_gpus, in_batch_job, probe, requeue, this_job
from launch.slurm.step import Where
from launch.summary import outcome, summary
from launch.supervise import Host, Interrupted, RunFailed, Signals, supervise
from rollout.keys import RunKeys

LOGS = "logs"
CHECKPOINTS = "checkpoints"
LOOPBACK = "127.0.0.1"
DEAD_LAUNCHER_S = 180.0  # for a file system to notice that the node of the job's earlier life is dead: NFS takes 90 s and more


@dataclass(frozen=True, kw_only=True, slots=True)
class _Site:
    """Where a run takes place."""

    nodes: list[Node]
    host: Callable[[Path], Host]  # from the folder of the logs
    is_free: Callable[[int], bool]  # a port
    job: Job | None = None  # of Slurm


def execute(config: RunConfig, run_dir: Path, *, write: Callable[[], None], resumed: bool, out: TextIO | None) -> float:
    """Runs to the end; `write` puts the configuration into the run's folder. Returns the run's outcome.

    Raises ConfigError, PrepareError, SlurmError before anything is started, RunFailed and Interrupted after.
    """

    with Signals() as signals, PortClaims() as claims:
        return _execute(config, run_dir, signals, claims, write=write, resumed=resumed, out=Shown(out))


def _execute(
    config: RunConfig,
    run_dir: Path,
    signals: Signals,
    claims: PortClaims,
    *,
    write: Callable[[], None],
    resumed: bool,
    out: Shown,
) -> float:
    def say(text: str) -> None:
        print(text, file=out, flush=True)

    started_s = time.monotonic()
    check_run_dir(run_dir, resumed=resumed)
    site = _site(config)
    if site.job is not None and len(site.nodes) != config.cluster.nodes:
        planned = f"cluster.nodes={config.cluster.nodes} is for dry_run and the planner"
        say(f"the run takes the {len(site.nodes)} nodes of its job; {planned}")
    check_files(config)
    prepare(RECIPES[config.model.prepare], say)
    base_port = choose_base_port(run_dir, config, site.is_free, take=claims.take, job=site.job.id if site.job else None)

    def placed(lost: frozenset[str]) -> list[Process]:
        return place(config, run_dir, site.nodes, base_port, lost=lost)

    processes = placed(frozenset())
    check_before_start(config, run_dir, processes, say)
    is_second_life = site.job is not None and site.job.restarts > 0
    with held(run_dir, patience_s=DEAD_LAUNCHER_S if is_second_life else 0.0, say=say):
        check_run_dir(run_dir, resumed=resumed)  # again: another launcher may have begun and ended it since
        began_at = newest_checkpoint(run_dir / CHECKPOINTS)
        write()
        RunKeys.create(run_dir)
        say(f"{'resuming' if resumed else 'run'} {run_dir}: {_size(config, site.nodes)}, logs in {run_dir / LOGS}")
        progress = Progress(run_dir, config.trainer.steps, processes, out, resumed=resumed)
        try:
            end = _supervised(config, run_dir, Lifecycle(placed, rules(config)), site, progress, signals)
        finally:
            _report(run_dir, progress.say)
    _settle(end, config, run_dir, site.job, progress.say, began_at=began_at)
    if end.outcome is Outcome.DONE:
        progress.say(summary(run_dir, time.monotonic() - started_s))
    return outcome(read_metrics(run_dir))


def _report(run_dir: Path, say: Callable[[str], None]) -> None:
    """However the run ended: what becomes of it is not for a report to decide that a full disk has no room for."""
    try:
        write_report(run_dir)
    except OSError as error:
        say(f"warning: the run has no report: {error}")


def _supervised(config: RunConfig, run_dir: Path, life: Lifecycle, site: _Site, progress: Progress, signals: Signals) -> End:
    recoveries = Recoveries(run_dir, progress.say)

    def tick() -> None:
        progress.tick()
        recoveries.tick()

    return supervise(
        life,
        site.host(run_dir / LOGS),
        signals,
        progress.say,
        tick=tick,
        newest=lambda: newest_checkpoint(run_dir / CHECKPOINTS),
        note=recoveries.note,
    )


def _settle(end: End, config: RunConfig, run_dir: Path, job: Job | None, say: Callable[[str], None], *, began_at: int) -> None:
    """What follows from a run's end: a job that may still be finished is requeued. Raises RunFailed, Interrupted.

    began_at: the version of the newest checkpoint when this life of the run began; one that added none would repeat itself.
    """
    newest = newest_checkpoint(run_dir / CHECKPOINTS)
    start = f"version {newest}" if newest else "the beginning: it has no checkpoint yet"
    goes_on = "go on from the last checkpoint" if newest else "it has no checkpoint yet; begin it again"
    resume = f"resume={shlex.quote(str(run_dir))}"
    by_hand = f"make run {resume}   (python -m launch {resume})"
    how_to_go_on = f"{goes_on} with: {by_hand if job is None else f'sbatch launch/kestrel_256.sh {resume}'}"
    match end.outcome:
        case Outcome.INTERRUPTED:
            say(f"interrupted; {how_to_go_on}")
            raise Interrupted
        case Outcome.SAVED if job is not None and newest <= began_at:
            raise RunFailed(
                f"the job was told to save before it had done a step more than version {newest}, so a further life would do no "
                f"more: its --time is too short, or saving fails (logs/trainer-0.log). {end.why}\n{how_to_go_on}"
            )
        case Outcome.SAVED | Outcome.SHORT if job is not None and job.restarts < config.cluster.requeues:
            say(f"the job asks to be requeued, to go on from {start}. {end.why}".rstrip())
            try:
                requeue(job)
            except SlurmError as error:
                raise RunFailed(f"{error}\n{how_to_go_on}") from error
        case Outcome.SAVED if job is None:
            say(f"saved version {newest}; {how_to_go_on}" if newest else how_to_go_on)
        case Outcome.SAVED | Outcome.SHORT:
            raise RunFailed(f"the job was requeued {config.cluster.requeues} times (cluster.requeues). {end.why}\n{how_to_go_on}")
        case Outcome.FAILED:
            raise RunFailed(f"{end.why}\n{how_to_go_on}")


def rules(config: RunConfig) -> Rules:
    cluster = config.cluster
    return Rules(
        worker_restarts=cluster.worker_restarts,
        trainer_restarts=cluster.trainer_restarts,
        steps=config.trainer.steps,
        save_s=cluster.save_s,
    )


def newest_checkpoint(folder: Path) -> int:
    """The version of the newest whole checkpoint, by the names that the trainer gives them; 0 if there is none."""
    versions = [path.name.removeprefix("version-") for path in folder.glob("version-*")]
    return max((int(version) for version in versions if version.isdigit()), default=0)


def _site(config: RunConfig) -> _Site:
    """Raises ConfigError, SlurmError."""
    if config.cluster.kind == "local":
        _check_local(config)
        return _Site(nodes=local_nodes(config), host=LocalHost, is_free=port_is_free)
    job = this_job(config.cluster.gpus_per_node)
    probed = probe(job.nodes, config.cluster.srun_args)
    nodes = given_gpus(job.nodes, probed) if config.cluster.device == "cuda" else job.nodes

    def host(log_dir: Path) -> SlurmHost:
        return SlurmHost(job, Where(cluster=config.cluster, folders=(Path.cwd(), PROJECT, log_dir.parent)), log_dir)

    return _Site(nodes=list(nodes), host=host, is_free=lambda port: port not in probed.taken, job=job)


def _check_local(config: RunConfig) -> None:
    """Raises ConfigError."""
    if config.cluster.nodes != 1:
        raise ConfigError(
            f"cluster.nodes={config.cluster.nodes}: with cluster.kind=local a run has this machine only; "
            "dry_run=true shows the placement of a larger one, sbatch launch/kestrel_256.sh starts it"
        )


def dry_run(config: RunConfig) -> str:
    """Placement, configuration and, last, what it comes to: of a run on whatever machine; nothing is made or started."""
    run_dir = Path(config.output) / config.name
    base_port = choose_base_port(run_dir, config, is_free=lambda port: True)
    nodes = planned_nodes(config)
    placed = place(config, run_dir, nodes, base_port)
    return f"{describe(placed)}\n\n{as_yaml(config)}\n{'processes':<12} {_size(config, nodes)}\n{costs(config)}"


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


def gpus_found() -> int:
    visible = visible_gpus()
    return len(visible if visible is not None else list(Path("/proc/driver/nvidia/gpus").glob("*")))


def visible_gpus() -> tuple[str, ...] | None:
    """The names in CUDA_VISIBLE_DEVICES, by which whoever started this gave it a share of the machine; None: no word of it."""
    said = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if said is None else cuda_devices(said)


def with_device(config: RunConfig) -> RunConfig:
    """`cluster.device=auto` made definite: the GPUs when there are any."""
    if config.cluster.device != "auto":
        return config
    device = "cuda" if config.cluster.gpus_per_node or gpus_found() else "cpu"
    return replace(config, cluster=replace(config.cluster, device=device))


def _size(config: RunConfig, nodes: Sequence[Node]) -> str:
    """What does the work: a trainer's or fleet's process on a node is but the torchrun of its ranks there."""
    counts = (
        (trainer_ranks(config), "trainer rank"),
        (config.rollout.engines, "engine"),
        (config.reward.judges, "judge"),
    )
    sizes = ", ".join(f"{count} {what}{'s' if count != 1 else ''}" for count, what in counts)
    return f"{sizes} on {len(nodes)} node{'s' if len(nodes) != 1 else ''}"
