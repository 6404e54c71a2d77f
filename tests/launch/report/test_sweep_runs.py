"""Sweeps through the command line, with stand-ins for the processes of each run: here, through Optuna, and through Slurm."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.report.sweep import main
from launch.report.sweep_jobs import State, read_jobs
from tests.launch.slurm.slurm_cluster import SlurmCluster
from tests.launch.stand_ins import ENV, command, launch, write_project

FAILS_WITH_LR_1 = """
import pathlib, sys
if "lr: 1.0\\n" in (pathlib.Path(sys.argv[sys.argv.index("--run") + 1]) / "config.yaml").read_text():
    sys.exit("the loss is not a number")
"""
DIES_WITH_LR_1 = """
import os, pathlib, signal, sys
if "lr: 1.0\\n" in (pathlib.Path(sys.argv[sys.argv.index("--run") + 1]) / "config.yaml").read_text():
    os.kill(int(os.environ["SLURM_TASK_PID"]), signal.SIGKILL)  # as for want of memory: of the whole job nothing is heard
"""

IN_THE_WAY_WITH_LR_1 = """
import pathlib, shutil, sys
run = pathlib.Path(sys.argv[sys.argv.index("--run") + 1])
if "lr: 1.0\\n" in (run / "config.yaml").read_text():
    shutil.rmtree(run / "logs")
    (run / "logs").touch()  # the launcher will look in it
    sys.exit(1)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    write_project(tmp_path)
    return tmp_path


def trainer_begins_with(project: Path, source: str) -> None:
    file = project / "trainer/__main__.py"
    file.write_text(source + file.read_text())


def only_sweep(project: Path) -> Path:
    (sweep,) = project.glob("multirun/*")
    return sweep


@pytest.mark.slow
def test_failed_jobs_are_rows_and_the_others_go_on(project: Path) -> None:
    trainer_begins_with(project, FAILS_WITH_LR_1)
    ended = launch(project, "-m", "trainer.lr=0.5,1.0,-1.0,0.25")
    assert ended.returncode == 2  # the worst of the jobs: one was asked for wrongly
    sweep = only_sweep(project)
    jobs = read_jobs(sweep)
    assert [job.state for job in jobs] == [State.DONE, State.FAILED, State.FAILED, State.DONE]
    assert "the loss is not a number" in jobs[1].failure and "trainer.lr=-1.0: must be above 0" in jobs[2].failure
    assert [job.outcome for job in jobs] == [0.5, None, None, 0.5]
    assert f"sweep {sweep.relative_to(project)}: 2 of 4 jobs are done" in ended.stdout
    assert "Traceback" not in ended.stderr
    assert {"config.yaml", "logs", "metrics.jsonl", "report.html"} <= {path.name for path in (sweep / jobs[0].name).iterdir()}
    assert main([str(sweep)]) == 0
    assert (sweep / "sweep.png").stat().st_size > 10_000


@pytest.mark.slow
def test_launcher_that_cannot_write_ends_its_job_alone(project: Path) -> None:
    trainer_begins_with(project, IN_THE_WAY_WITH_LR_1)
    ended = launch(project, "-m", "trainer.lr=1.0,0.25")
    assert ended.returncode == 1
    jobs = read_jobs(only_sweep(project))
    assert [job.state for job in jobs] == [State.FAILED, State.DONE]
    assert "NotADirectoryError" in jobs[0].failure and "logs" in jobs[0].failure
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_good_sweep_ends_with_0_and_each_job_has_a_folder(project: Path) -> None:
    ended = launch(project, "-m", "rollout.max_staleness=0,1", f"plan.out={'x' * 300}")  # longer than a file's name may be
    assert (ended.returncode, ended.stderr) == (0, "")
    assert [job.name[:2] for job in read_jobs(only_sweep(project))] == ["00", "01"]
    assert all((only_sweep(project) / job.name / "summary.json").exists() for job in read_jobs(only_sweep(project)))


@pytest.mark.slow
def test_optuna_compares_the_outcomes_and_outlives_a_failed_job(project: Path) -> None:
    trainer_begins_with(project, FAILS_WITH_LR_1)
    options = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1", "hydra.sweeper.direction=maximize"]
    sampler = ["hydra/sweeper/sampler=grid", "trainer.lr=choice(0.5,1.0,0.25)"]
    ended = launch(project, "-m", *options, *sampler)
    jobs = read_jobs(only_sweep(project))
    assert sorted(job.state for job in jobs) == [State.DONE, State.DONE, State.FAILED]
    assert "best_value: 0.5" in (only_sweep(project) / "optimization_results.yaml").read_text()
    assert ended.returncode == 1


@pytest.mark.slurm
@pytest.mark.timeout(900)
def test_sweep_through_slurm_outlives_a_job_that_dies_without_a_word(slurm: SlurmCluster, project: Path) -> None:
    trainer_begins_with(project, DIES_WITH_LR_1)
    tools = project / "bin"
    tools.mkdir()
    # This Slurm keeps no accounts, by which submitit learns of a job that died.
    (tools / "sacct").write_text(f"#!{sys.executable}\n{SACCT}")
    (tools / "sacct").chmod(0o755)
    jobs = ["-m", "trainer.lr=0.5,1.0,0.25", "hydra/launcher=submitit_slurm", "hydra.launcher.timeout_min=10"]
    env = {**slurm.env, "PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": ENV["PYTHONPATH"]}
    ended = subprocess.run(command(*jobs), cwd=project, env=env, capture_output=True, text=True, timeout=600)
    sweep = only_sweep(project)
    found = {job.said["trainer.lr"]: job for job in read_jobs(sweep)}
    assert {lr: job.state for lr, job in found.items()} == {"0.5": State.DONE, "1.0": State.RUNNING, "0.25": State.DONE}, said_by(
        sweep, ended
    )
    assert found["0.5"].outcome == 0.5
    assert "job 1 of the sweep died" in ended.stderr and ended.returncode == 1
    assert (sweep / found["0.5"].name / "metrics.jsonl").exists()
    assert main([str(sweep)]) == 0


@pytest.mark.slurm
@pytest.mark.timeout(900)
def test_sweep_that_slurm_refuses_ends_in_one_line(slurm: SlurmCluster, project: Path) -> None:
    jobs = ["-m", "trainer.lr=0.5,1.0", "hydra/launcher=submitit_slurm", "hydra.launcher.partition=nowhere"]
    ended = subprocess.run(
        command(*jobs),
        cwd=project,
        env={**slurm.env, "PYTHONPATH": ENV["PYTHONPATH"]},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 2 and "Traceback" not in ended.stderr, ended.stderr
    assert "sbatch refused the jobs of the sweep" in ended.stderr and "partition" in ended.stderr


def said_by(sweep: Path, ended: subprocess.CompletedProcess[str]) -> str:
    """What the sweep and each of its Slurm jobs printed."""
    logs = sorted(sweep.glob(".submitit/*/*_log.*"))
    return "\n".join([ended.stderr, *(f"--- {log}\n{log.read_text()[-2000:]}" for log in logs)])


SACCT = """
import subprocess
print("JobID|State|NodeList")
for line in subprocess.run(["scontrol", "show", "job", "-o"], capture_output=True, text=True).stdout.splitlines():
    words = dict(word.split("=", 1) for word in line.split() if "=" in word)
    task = words.get("ArrayTaskId", "")
    job = f"{words['ArrayJobId']}_{task if task.isdigit() else f'[{task}]'}" if task else words["JobId"]
    print("|".join([job, words["JobState"], words.get("NodeList", "")]))
"""
