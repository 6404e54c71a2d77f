"""One run from start to end: prepare, check, place, start, watch, report."""

import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from conf.compose.load import as_yaml
from conf.schema import RunConfig
from conf.user_code import changes
from launch.doctor.costs import costs
from launch.doctor.examine import check_before_start
from launch.doctor.problems import check_files
from launch.doctor.user_code import check_user_code
from launch.hosts import Site, planned_nodes, site_of
from launch.placement.placement import Node, Process, describe, place, trainer_ranks
from launch.placement.port_claims import PortClaims
from launch.placement.ports import choose_base_port
from launch.processes.lifecycle import End, Lifecycle, Outcome, Rules
from launch.processes.prepare import RECIPES, prepare
from launch.processes.run_dir import check_run_dir, held
from launch.processes.supervise import Interrupted, RunFailed, Signals, supervise
from launch.report.metrics import read_metrics
from launch.report.progress import Progress
from launch.report.recovery import Recoveries
from launch.report.run_report import write_report
from launch.report.summary import outcome, summary
from launch.report.terminal import Shown
from launch.slurm.job import Job, SlurmError, requeue
from rollout.queue.keys import RunKeys

LOGS = "logs"
CHECKPOINTS = "checkpoints"
DEAD_LAUNCHER_S = 180.0  # for a file system to notice that the node of the job's earlier life is dead: NFS takes 90 s and more


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
    site = site_of(config)
    if site.job is not None and len(site.nodes) != config.cluster.nodes:
        planned = f"cluster.nodes={config.cluster.nodes} is for dry_run and the planner"
        say(f"the run takes the {len(site.nodes)} nodes of its job; {planned}")
    check_files(config)
    base_port = choose_base_port(run_dir, config, site.is_free, take=claims.take, job=site.job.id if site.job else None)

    def placed(lost: frozenset[str]) -> list[Process]:
        return place(config, run_dir, site.nodes, base_port, lost=lost)

    processes = placed(frozenset())
    check_user_code(config, run_dir, processes)
    prepare(RECIPES[config.model.prepare], say)
    check_before_start(config, run_dir, processes, say)
    is_second_life = site.job is not None and site.job.restarts > 0
    with held(run_dir, patience_s=DEAD_LAUNCHER_S if is_second_life else 0.0, say=say):
        check_run_dir(run_dir, resumed=resumed)  # again: another launcher may have begun and ended it since
        began_at = newest_checkpoint(run_dir / CHECKPOINTS)
        if resumed:
            for line in changes(config, run_dir):
                say(line)
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


def _supervised(config: RunConfig, run_dir: Path, life: Lifecycle, site: Site, progress: Progress, signals: Signals) -> End:
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


def dry_run(config: RunConfig) -> str:
    """Placement, configuration and, last, what it comes to: of a run on whatever machine; nothing is made or started."""
    run_dir = Path(config.output) / config.name
    base_port = choose_base_port(run_dir, config, is_free=lambda port: True)
    nodes = planned_nodes(config)
    placed = place(config, run_dir, nodes, base_port)
    return f"{describe(placed)}\n\n{as_yaml(config)}\n{'processes':<12} {_size(config, nodes)}\n{costs(config)}"


def _size(config: RunConfig, nodes: Sequence[Node]) -> str:
    """What does the work: a trainer's or fleet's process on a node is but the torchrun of its ranks there."""
    counts = (
        (trainer_ranks(config), "trainer rank"),
        (config.rollout.engines, "engine"),
        (config.reward.judges, "judge"),
    )
    sizes = ", ".join(f"{count} {what}{'s' if count != 1 else ''}" for count, what in counts)
    return f"{sizes} on {len(nodes)} node{'s' if len(nodes) != 1 else ''}"
