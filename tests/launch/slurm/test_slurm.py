"""`sbatch launch/kestrel_256.sh`, small, on a real Slurm, with stand-ins for what it starts (slurm_stand_ins.py)."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from conf.compose.run_folder import METRICS
from launch.placement.node_facts import port_is_free
from launch.report.metrics_file import MetricsFile
from launch.slurm.step import nodes_command
from tests.launch.slurm.slurm_cluster import SlurmCluster, until
from tests.launch.slurm.slurm_stand_ins import HOLD, PROJECT, environment, write_stand_ins

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

STEPS = 20
DEADLINE_S = 240.0  # for everything that a test waits for; far more than needed, since a machine may be slow
LOOK_S = 0.3


@dataclass(frozen=True, kw_only=True)
class Run:
    """A job that was submitted, and its run."""

    slurm: SlurmCluster
    job: int
    folder: Path  # where it was submitted

    @property
    def dir(self) -> Path:
        return self.folder / f"outputs/debug-{self.job}"

    def lines(self, name: str) -> list[str]:
        path = self.dir / name
        return path.read_text().splitlines() if path.exists() else []

    def steps(self) -> list[int]:
        return [line["step"] for line in MetricsFile(self.dir / METRICS, from_start=True).new_lines()]

    def said(self) -> str:
        path = self.folder / f"kestrel-{self.job}.log"
        return path.read_text() if path.exists() else ""

    def wait_for_step(self, step: int, timeout_s: float = DEADLINE_S) -> None:
        self.wait_until(f"step {step}", lambda: max(self.steps(), default=0) >= step, timeout_s)

    def wait_until(self, what: str, true: Callable[[], bool], timeout_s: float = DEADLINE_S) -> None:
        """Waits for something that is to happen while the job runs."""

        def happened() -> bool:
            assert self.slurm.state(self.job) in ("PENDING", "CONFIGURING", "RUNNING"), self.said()
            return true()

        until(what, happened, timeout_s, LOOK_S)

    def release(self) -> None:
        """Lets the trainer do its last step."""
        (self.folder / HOLD).unlink()

    def complete(self) -> None:
        """Waits for the end: every step was done."""
        try:
            self.slurm.wait(self.job, {"COMPLETED"}, DEADLINE_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.said()}") from error
        assert sorted(set(self.steps())) == list(range(1, STEPS + 1))


def submit(
    slurm: SlurmCluster,
    folder: Path,
    *overrides: str,
    nodes: int = 4,
    options: tuple[str, ...] = (),
    held: bool = False,
    **env: str,
) -> Run:
    """held: the trainer does its last step only after `Run.release`."""
    own = [*write_stand_ins(folder), f"trainer.steps={STEPS}"]
    if held:
        (folder / HOLD).touch()
    script = str(PROJECT / "launch/kestrel_256.sh")
    job = slurm.sbatch(f"--nodes={nodes}", *options, script, *own, *overrides, cwd=folder, env=environment() | env)
    return Run(slurm=slurm, job=job, folder=folder)


@pytest.fixture
def mended(slurm: SlurmCluster) -> Iterator[SlurmCluster]:
    """The cluster; nodes that the test kills come back after it."""
    yield slurm
    for node in slurm.killed:
        slurm.mend_node(node)


def test_run_goes_through_on_four_nodes(slurm: SlurmCluster, tmp_path: Path) -> None:
    run = submit(slurm, tmp_path)
    run.complete()
    assert run.steps() == list(range(1, STEPS + 1))
    assert run.lines("trainer") == ["n1 n2"]
    assert run.lines("fleet") == ["0 n3"]
    assert run.lines("judges") == ["judge-0 n3"]
    logs = {path.name for path in (run.dir / "logs").iterdir()}
    assert logs == {"queue-0.log", "trainer-0.log", "trainer-1.log", "rollout-0.log", "judge-0.log", "watchdog.log"}
    assert "the run uses the 4 nodes of its job; cluster.nodes=1 is for dry_run" in run.said()
    assert "on n2\n" in (run.dir / "logs/trainer-1.log").read_text()


def test_job_without_the_submitters_environment_runs(slurm: SlurmCluster, tmp_path: Path) -> None:
    submit(slurm, tmp_path, options=("--export=NONE",)).complete()


def test_script_alone_is_the_job_of_256_gpus(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Its placement at least, told by the script itself; any option of sbatch and any setting wins over what it says."""
    script = str(PROJECT / "launch/kestrel_256.sh")
    job = slurm.sbatch("--nodes=1", "--time=5", script, "dry_run=true", "trainer.lr=0.5", cwd=tmp_path, env=environment())
    slurm.wait(job, {"COMPLETED"}, DEADLINE_S)
    said = (tmp_path / f"kestrel-{job}.log").read_text()
    nodes = [line.split()[2] for line in said.splitlines() if line.startswith(("trainer-", "rollout-")) and " on node-" in line]
    assert len(nodes) == len(set(nodes)) == 32
    assert "lr: 0.5" in said


def test_run_goes_on_when_a_rollout_node_dies_and_a_spare_takes_its_place(mended: SlurmCluster, tmp_path: Path) -> None:
    run = submit(mended, tmp_path, held=True)
    run.wait_for_step(3)
    mended.kill_node("n3")
    run.wait_until("a spare has the place of n3", lambda: len(run.lines("fleet")) == len(run.lines("judges")) == 2)
    run.release()
    run.complete()
    assert run.lines("trainer") == ["n1 n2"]
    assert run.lines("fleet") == ["0 n3", "0 n4"]
    assert run.lines("judges") == ["judge-0 n3", "judge-0 n4"]
    assert run.steps() == list(range(1, STEPS + 1))


def test_run_goes_on_when_one_of_two_rollout_nodes_dies(mended: SlurmCluster, tmp_path: Path) -> None:
    run = submit(mended, tmp_path, "rollout.engines=4", held=True)
    run.wait_for_step(3)
    mended.kill_node("n4")
    run.wait_until("the loss is known", lambda: "n4 is lost" in run.said())
    run.release()
    run.complete()
    assert run.lines("trainer") == ["n1 n2"]
    assert sorted(run.lines("fleet")) == ["0 n3", "2 n4"]


def test_trainer_goes_on_from_its_checkpoint_on_a_spare_when_its_node_dies(mended: SlurmCluster, tmp_path: Path) -> None:
    run = submit(mended, tmp_path, held=True)
    run.wait_for_step(STEPS - 1)
    mended.kill_node("n2")
    run.release()
    run.complete()
    assert run.lines("trainer") == ["n1 n2", "n1 n4"]
    assert run.lines("fleet") == ["0 n3"]
    first = next(b for a, b in pairwise(run.steps()) if b != a + 1)
    assert first == STEPS - 4  # the step after a checkpoint
    recovery = json.loads(run.lines("recoveries.jsonl")[0])
    assert recovery["cause"] == "the loss of n2"
    assert recovery["step"] == first
    assert f"training again {sum(value for key, value in recovery.items() if key.endswith('_s')):.0f} s after" in run.said()


def test_trainer_takes_a_rollout_node_when_its_own_dies_silently_and_there_is_no_spare(
    mended: SlurmCluster, tmp_path: Path
) -> None:
    run = submit(mended, tmp_path, "rollout.engines=4", "cluster.heartbeat_s=8", held=True)
    run.wait_for_step(8)
    mended.kill_node("n2", reported=False)
    run.wait_until("the trainer is on n4", lambda: run.lines("trainer") == ["n1 n2", "n1 n4"])
    mended.report_down("n2")  # Slurm waits for it before it calls the job completed
    run.release()
    run.complete()
    assert sorted(run.lines("fleet")) == ["0 n3", "2 n4"]
    assert not mended.steps("n4")


def test_step_whose_srun_is_killed_alone_ends_and_is_started_again(slurm: SlurmCluster, tmp_path: Path) -> None:
    run = submit(slurm, tmp_path, held=True)
    run.wait_for_step(3)
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if words[:1] == ["srun"] and "--job-name=queue-0" in words and str(tmp_path) in " ".join(words):
            process.kill()
    run.wait_until("the queue runs again", lambda: sum("--- step " in line for line in run.lines("logs/queue-0.log")) > 1)
    run.release()
    run.complete()
    assert "queue-0 was killed by SIGKILL; it starts again" in run.said()


def test_job_without_nodes_for_the_trainer_is_requeued_and_goes_on(mended: SlurmCluster, tmp_path: Path) -> None:
    run = submit(mended, tmp_path, nodes=3, held=True)
    run.wait_for_step(8)
    mended.kill_node("n2")
    mended.wait(run.job, {"PENDING"}, DEADLINE_S)  # the trainer has taken n3, and the fleet has no node left
    run.release()
    mended.hasten(run.job)
    run.complete()
    assert mended.job(run.job)["Restarts"] == "1"


def test_job_whose_first_node_dies_is_requeued_by_a_watchdog_and_goes_on(mended: SlurmCluster, tmp_path: Path) -> None:
    run = submit(mended, tmp_path, nodes=3, held=True, WATCHDOG_POLL_S="2")
    run.wait_for_step(8)
    mended.kill_node("n1")
    mended.wait(run.job, {"PENDING"}, DEADLINE_S)
    run.release()
    mended.hasten(run.job)
    run.complete()
    assert run.lines("trainer") == ["n1 n2", "n2 n3"]


def test_job_saves_before_its_time_limit_and_goes_on_after_its_requeue(slurm: SlurmCluster, tmp_path: Path) -> None:
    """The limit is set when the run goes on, so that its signal is due at once: Slurm looks for that every half minute."""
    options = ("--time=30", f"--signal=B:USR1@{3 * 60 - 10}")
    run = submit(slurm, tmp_path, "trainer.checkpoint_every=0", options=options, held=True)
    run.wait_for_step(3)
    hours, minutes, _ = slurm.job(run.job)["RunTime"].split(":")
    slurm.run("scontrol", "update", f"jobid={run.job}", f"timelimit={60 * int(hours) + int(minutes) + 3}")
    slurm.wait(run.job, {"PENDING"}, DEADLINE_S)
    within = re.search(r"asked to save and to end within (\d+) s", run.said())
    assert within is not None and int(within[1]) <= 2 * 60  # not cluster.save_s: the job has less left
    reached = run.steps()[-1]
    assert (run.dir / f"checkpoints/version-{reached}").exists()
    run.release()
    slurm.run("scontrol", "update", f"jobid={run.job}", "timelimit=30")
    slurm.hasten(run.job)
    run.complete()
    assert run.steps() == list(range(1, STEPS + 1))
    assert slurm.job(run.job)["Restarts"] == "1"


def test_cancelled_job_leaves_no_process_and_no_port(slurm: SlurmCluster, tmp_path: Path) -> None:
    run = submit(slurm, tmp_path, held=True)
    run.wait_for_step(6)  # it has a checkpoint then
    members = [process for node in slurm.nodes for process in slurm.steps(node)]
    ports = listening(members)
    assert len(members) > 20 and len(ports) >= 3
    slurm.run("scancel", str(run.job))
    slurm.wait(run.job, {"CANCELLED"}, DEADLINE_S)
    _, alive = psutil.wait_procs(members, timeout=60)
    assert not alive
    assert not [process for node in slurm.nodes for process in slurm.steps(node)]
    assert all(port_is_free(port) for port in ports)
    assert "go on from the last checkpoint with" in run.said()


def test_two_runs_on_the_same_nodes_do_not_disturb_each_other(slurm: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    shared = ("--oversubscribe", "--no-requeue", "--gpus-per-node=4", "--cpus-per-task=8")
    runs = [submit(slurm, tmp_path / name, options=shared, held=True) for name in ("a", "b")]
    for run in runs:
        run.wait_for_step(1)
    assert slurm.state(runs[0].job) == slurm.state(runs[1].job) == "RUNNING"
    for run in runs:
        run.release()
        run.complete()
        assert run.steps() == list(range(1, STEPS + 1))
        assert run.lines("trainer") == ["n1 n2"]


def test_job_that_shares_its_nodes_knows_which_one_slurm_took_from_it(mended: SlurmCluster, tmp_path: Path) -> None:
    def nodes(job: int) -> list[str]:
        try:
            return mended.run(*nodes_command(job)).split()
        except subprocess.CalledProcessError:
            return []

    shared = ("--nodes=4", "--no-kill", "--oversubscribe", "--gpus-per-node=4", "--cpus-per-task=8", "--no-requeue")
    jobs = [mended.sbatch(*shared, f"--output={tmp_path}/%j", "--wrap", "sleep 600") for _ in range(2)]
    for job in jobs:
        mended.wait(job, {"RUNNING"}, DEADLINE_S)
        assert nodes(job) == list(mended.nodes)
    mended.kill_node("n3")
    assert [nodes(job) for job in jobs] == [["n1", "n2", "n4"]] * 2
    mended.mend_node("n3")
    assert [nodes(job) for job in jobs] == [["n1", "n2", "n4"]] * 2
    mended.run("scancel", *map(str, jobs))
    mended.wait(jobs[0], {"CANCELLED"}, DEADLINE_S)
    assert [nodes(job) for job in jobs] == [[], []]


def test_jobs_that_share_their_nodes_have_separate_gpus_on_each(slurm: SlurmCluster, tmp_path: Path) -> None:
    def said(name: str) -> str:
        return (tmp_path / name).read_text() if (tmp_path / name).exists() else ""

    code = (
        "from launch.slurm.job import with_assigned_gpus, probe, this_job; nodes = this_job(0).nodes; "
        "print([(node.name, node.gpus, *node.visible) for node in with_assigned_gpus(nodes, probe(nodes, []))], flush=True)"
    )
    jobs = []
    for name, gpus in (("first", 5), ("second", 3)):
        command = f"cd {PROJECT} && {sys.executable} -c '{code}'; while [ ! -e {tmp_path}/closed ]; do sleep 0.2; done"
        jobs.append(slurm.sbatch("--nodes=4", f"--gpus-per-node={gpus}", f"--output={tmp_path}/{name}", "--wrap", command))
        until("the job knows its GPUs", lambda: said(name).endswith("\n"), DEADLINE_S)  # noqa: B023
    (tmp_path / "closed").touch()
    for job in jobs:
        slurm.wait(job, {"COMPLETED"}, DEADLINE_S)
    assert said("first") == f"{[(node, 5, *'01234') for node in slurm.nodes]}\n"
    assert said("second") == f"{[(node, 3, *'567') for node in slurm.nodes]}\n"


def listening(processes: list[psutil.Process]) -> set[int]:
    pids = {process.pid for process in processes}
    return {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.pid in pids}
