"""After which outcomes of a run its job is requeued."""

from pathlib import Path

import pytest

from conf.compose.run_folder import CHECKPOINTS
from conf.schema import RunConfig
from launch import run
from launch.processes.lifecycle import RunEnd, RunOutcome
from launch.slurm.job import SlurmError, SlurmJob

JOB = SlurmJob(id=7, restarts=1, nodes=())


@pytest.fixture
def requeued(monkeypatch: pytest.MonkeyPatch) -> list[SlurmJob]:
    jobs: list[SlurmJob] = []
    monkeypatch.setattr(run, "requeue", jobs.append)
    return jobs


def settle(run_dir: Path, outcome: RunOutcome, *, began_at: int, newest: int) -> None:
    if newest:
        (run_dir / CHECKPOINTS / f"version-{newest}").mkdir(parents=True)
    run._conclude(RunEnd(outcome=outcome), RunConfig(), run_dir, JOB, lambda text: None, began_at=began_at)


def test_job_that_saved_further_steps_is_requeued(requeued: list[SlurmJob], tmp_path: Path) -> None:
    settle(tmp_path, RunOutcome.SAVED, began_at=8, newest=12)
    assert requeued == [JOB]


@pytest.mark.parametrize("version", [0, 8])
def test_job_that_saved_nothing_new_is_not_requeued_without_end(requeued: list[SlurmJob], tmp_path: Path, version: int) -> None:
    with pytest.raises(run.RunFailed, match="its --time is too short"):
        settle(tmp_path, RunOutcome.SAVED, began_at=version, newest=version)
    assert requeued == []


def test_job_that_may_not_be_requeued_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refused(job: SlurmJob) -> None:
        raise SlurmError("`scontrol requeue 7` ended with exit code 1: Requested operation is presently disabled")

    monkeypatch.setattr(run, "requeue", refused)
    run_dir = tmp_path / "with a blank"
    with pytest.raises(run.RunFailed, match=rf"disabled\n.*sbatch launch/kestrel_256.sh resume='{run_dir}'$"):
        settle(run_dir, RunOutcome.SAVED, began_at=8, newest=12)


def test_job_that_lost_its_nodes_is_requeued_even_before_its_first_checkpoint(requeued: list[SlurmJob], tmp_path: Path) -> None:
    settle(tmp_path, RunOutcome.TOO_FEW_NODES, began_at=0, newest=0)
    assert requeued == [JOB]
