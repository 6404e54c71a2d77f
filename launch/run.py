"""One run from start to end: check, place, prepare, start, watch, report."""

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from conf.compose.check import notes_on_resume
from conf.compose.load import as_yaml, read_run
from conf.compose.model_description import keep_description
from conf.compose.run_folder import CHECKPOINTS, LOGS, TRAINER_FAILURE
from conf.schema import RunConfig
from conf.user_code import changes
from launch.doctor.costs import costs
from launch.doctor.examine import check_before_start, check_inputs, input_findings, line
from launch.doctor.finding import Level
from launch.placement.placement import Node, ProcessSpec, describe, place, trainer_ranks
from launch.placement.port_claims import PortClaims
from launch.placement.ports import choose_base_port
from launch.processes.lifecycle import Lifecycle, RestartRules, RunEnd, RunOutcome, Start
from launch.processes.prepare import RECIPES, prepare
from launch.processes.run_dir import check_run_dir, locked_run_dir
from launch.processes.supervise import Interrupted, RunFailed, Signals, supervise
from launch.report.metrics_file import read_metrics
from launch.report.progress import Progress
from launch.report.recovery import Recoveries
from launch.report.run_report import write_report
from launch.report.screen import Screen
from launch.report.summary import outcome, summary
from launch.slurm.allocation import Allocation, allocation_of, planned_nodes
from launch.slurm.job import SlurmError, SlurmJob, requeue
from rollout.checkpoint_files import newest_version
from rollout.queue.client import QueueClient
from rollout.queue.keys import RunKeys

Placement = Callable[[frozenset[str]], list[ProcessSpec]]  # from the lost nodes to the processes on the others
QUEUE_ANSWER_S = 5.0
LOCK_PATIENCE_S = 180.0  # a file system needs time to notice that an earlier launcher's node is dead: NFS 90 s and more


def execute(config: RunConfig, run_dir: Path, *, write: Callable[[], None], resumed: bool, out: TextIO | None) -> float:
    """Runs to the end; `write` puts the configuration into the run's folder. Returns the run's outcome.

    Raises ConfigError, PrepareError, SlurmError before anything starts, RunFailed and Interrupted after that.
    """
    started_s, screen = time.monotonic(), Screen(out)
    with Signals() as signals, PortClaims() as claims:
        check_run_dir(run_dir, resumed=resumed)
        allocation = allocation_of(config)
        placed = _placement(config, run_dir, allocation, claims)
        _prepare(config, run_dir, allocation, placed(frozenset()), screen.say)
        patience_s = LOCK_PATIENCE_S if allocation.job is not None and allocation.job.restarts > 0 else 0.0
        with locked_run_dir(run_dir, patience_s=patience_s, say=screen.say):
            check_run_dir(run_dir, resumed=resumed)  # again: another launcher may have used the folder meanwhile
            began_at = newest_version(run_dir / CHECKPOINTS)
            for line in (*changes(config, run_dir), *notes_on_resume(read_run(run_dir), config)) if resumed else ():
                screen.say(line)
            write()
            keep_description(config, run_dir)
            RunKeys.create(run_dir)
            size = _size(config, allocation.nodes)
            screen.say(f"{'resuming' if resumed else 'run'} {run_dir}: {size}, logs in {run_dir / LOGS}")
            lifecycle = Lifecycle(placed, rules(config))
            progress = Progress(
                run_dir, config.trainer.steps, lifecycle.processes, screen,
                resumed=resumed, queue_status=_queue_status(run_dir, lifecycle.processes),
            )  # fmt: skip
            try:
                end = _supervised(run_dir, lifecycle, allocation, progress, signals)
            finally:
                _report(run_dir, progress.say)
        _conclude(end, config, run_dir, allocation.job, progress.say, began_at=began_at)
    if end.outcome is RunOutcome.DONE:
        progress.say(summary(run_dir, time.monotonic() - started_s))
    return outcome(read_metrics(run_dir))


def _placement(config: RunConfig, run_dir: Path, allocation: Allocation, claims: PortClaims) -> Placement:
    """Chooses the run's ports. Returns the processes as a function of the lost nodes."""
    job = allocation.job.id if allocation.job else None
    base_port = choose_base_port(run_dir, config, allocation.is_free, take=claims.take, job=job)
    return lambda lost: place(config, run_dir, allocation.nodes, base_port, lost=lost)


def _prepare(
    config: RunConfig, run_dir: Path, allocation: Allocation, processes: Sequence[ProcessSpec], say: Callable[[str], None]
) -> None:
    """Checks everything that can be checked before the start, and makes what `model.prepare` asks for."""
    check_inputs(config, run_dir, processes)
    if allocation.job is not None and len(allocation.nodes) != config.cluster.nodes:
        planned = f"cluster.nodes={config.cluster.nodes} is for dry_run and the planner only"
        say(f"the run uses the {len(allocation.nodes)} nodes of its job; {planned}")
    prepare(RECIPES[config.model.prepare], say)
    check_before_start(config, run_dir, processes, say)


def _queue_status(run_dir: Path, processes: Sequence[ProcessSpec]) -> Callable[[], Mapping[str, Any]]:
    queue = next(process for process in processes if process.role == "queue")
    endpoint, keys = f"tcp://{queue.address}:{queue.ports['queue']}", RunKeys.load(run_dir)

    def ask() -> Mapping[str, Any]:
        with QueueClient(endpoint, keys, "launcher", QUEUE_ANSWER_S) as client:
            return client.status()

    return ask


def _report(run_dir: Path, say: Callable[[str], None]) -> None:
    """Writes the report however the run ended. A full disk must not decide how the run ends."""
    try:
        write_report(run_dir)
    except OSError as error:
        say(f"warning: the run has no report: {error}")


def _supervised(run_dir: Path, lifecycle: Lifecycle, allocation: Allocation, progress: Progress, signals: Signals) -> RunEnd:
    recoveries = Recoveries(run_dir, progress.say)

    def tick() -> None:
        progress.tick()
        recoveries.tick()

    def note(what: object) -> None:
        if isinstance(what, Start) and what.process.role == "trainer":
            (run_dir / TRAINER_FAILURE).unlink(missing_ok=True)  # left by an earlier start
        recoveries.note(what)

    return supervise(
        lifecycle,
        allocation.backend(run_dir / LOGS),
        signals,
        progress.say,
        tick=tick,
        newest_checkpoint=lambda: newest_version(run_dir / CHECKPOINTS),
        note=note,
    )


def _conclude(
    end: RunEnd, config: RunConfig, run_dir: Path, job: SlurmJob | None, say: Callable[[str], None], *, began_at: int
) -> None:
    """What follows from a run's end: a job that is not done is requeued. Raises RunFailed, Interrupted.

    began_at: the version of the newest checkpoint when the job last started. A job that added none would only repeat itself.
    """
    newest = newest_version(run_dir / CHECKPOINTS)
    how_to_resume = _how_to_resume(run_dir, newest, in_job=job is not None)
    match end.outcome:
        case RunOutcome.INTERRUPTED:
            say(f"interrupted; {how_to_resume}")
            raise Interrupted
        case RunOutcome.SAVED if job is not None and newest <= began_at:
            raise RunFailed(
                f"the job was told to save before it had a step more than version {newest}, so starting it again would not help: "
                f"its --time is too short, or saving fails (logs/trainer-0.log). {end.why}\n{how_to_resume}"
            )
        case RunOutcome.SAVED | RunOutcome.TOO_FEW_NODES if job is not None and job.restarts < config.cluster.requeues:
            start = f"version {newest}" if newest else "the beginning: it has no checkpoint yet"
            say(f"the job asks to be requeued, to go on from {start}. {end.why}".rstrip())
            try:
                requeue(job)
            except SlurmError as error:
                raise RunFailed(f"{error}\n{how_to_resume}") from error
        case RunOutcome.SAVED if job is None:
            say(f"saved version {newest}; {how_to_resume}" if newest else how_to_resume)
        case RunOutcome.SAVED | RunOutcome.TOO_FEW_NODES:
            times = config.cluster.requeues
            raise RunFailed(f"the job was requeued {times} times (cluster.requeues). {end.why}\n{how_to_resume}")
        case RunOutcome.FAILED:
            raise RunFailed(f"{end.why}\n{how_to_resume}")


def _how_to_resume(run_dir: Path, newest: int, *, in_job: bool) -> str:
    resume = f"resume={shlex.quote(str(run_dir))}"
    command = f"sbatch launch/kestrel_256.sh {resume}" if in_job else f"make run {resume}   (python -m launch {resume})"
    return f"{'go on from the last checkpoint' if newest else 'it has no checkpoint yet; begin it again'} with: {command}"


def rules(config: RunConfig) -> RestartRules:
    cluster = config.cluster
    return RestartRules(
        worker_restarts=cluster.worker_restarts,
        trainer_restarts=cluster.trainer_restarts,
        steps=config.trainer.steps,
        save_s=cluster.save_s,
    )


def dry_run(config: RunConfig, out: TextIO) -> None:
    """Prints placement, configuration and costs of a run on any machine, and what is missing here. Nothing is made or started.

    Raises ConfigError if a launch on this machine would be refused.
    """
    run_dir = Path(config.output) / config.name
    base_port = choose_base_port(run_dir, config, is_free=lambda port: True)
    nodes = planned_nodes(config)
    processes = place(config, run_dir, nodes, base_port)
    size = f"{'processes':<12} {_size(config, nodes)}"
    print(f"{describe(processes)}\n\n{as_yaml(config)}\n{size}\n{costs(config)}", file=out, flush=True)
    if config.cluster.kind == "local" and config.cluster.nodes == 1:
        check_inputs(config, run_dir, processes)
    for name, finding in input_findings(config, run_dir, processes).items():
        if finding.level is Level.FAILURE:
            print(f"{'missing here':<12} {line(finding)}", file=out, flush=True)
        elif name == "problems":
            print(f"{name:<12} {line(finding)}", file=out, flush=True)


def _size(config: RunConfig, nodes: Sequence[Node]) -> str:
    """The number of ranks, engines and judges. The processes of trainer and fleet on a node are only the torchrun of these."""
    counts = (
        (trainer_ranks(config), "trainer rank"),
        (config.rollout.engines, "engine"),
        (config.reward.judges, "judge"),
    )
    sizes = ", ".join(f"{count} {what}{'s' if count != 1 else ''}" for count, what in counts)
    return f"{sizes} on {len(nodes)} node{'s' if len(nodes) != 1 else ''}"
