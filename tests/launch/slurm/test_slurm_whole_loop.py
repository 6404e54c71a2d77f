"""The real thing on a real Slurm, small: Megatron's ranks on two nodes, SGLang on a third, and one node spare.

A trainer node is killed on the way, and later the job is told to save, as before its time limit. The run goes on both times,
does every step once, and loses no token.
"""

import json
import sys
from pathlib import Path

import pytest

from tests.launch.slurm.slurm_cluster import SlurmCluster
from tests.launch.slurm.slurm_stand_ins import PROJECT
from tests.launch.slurm.test_slurm import Run
from tests.test_whole_loop import SMALL, check_finished

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS = 12
DEADLINE_S = 600.0


def test_run_that_loses_a_trainer_node_and_is_requeued_trains_every_step_once(slurm: SlurmCluster, tmp_path: Path) -> None:
    command = [str(PROJECT / "launch/kestrel_256.sh"), "experiment=debug", f"output={tmp_path}/outputs", *SMALL]
    job = slurm.sbatch(
        "--nodes=4", f"--output={tmp_path}/kestrel-%j.log", *command, f"trainer.steps={STEPS}", "cluster.heartbeat_s=60",
        cwd=PROJECT, env={"KESTREL_PYTHON": sys.executable},
    )  # fmt: skip
    run = Run(slurm=slurm, job=job, folder=tmp_path)
    run.wait_for_step(3, DEADLINE_S)
    slurm.kill_node("n2")
    run.wait_for_step(5, DEADLINE_S)
    slurm.mend_node("n2")
    slurm.run("scancel", "--batch", "--signal=USR1", str(job))
    slurm.wait(job, {"PENDING"}, DEADLINE_S)
    slurm.hasten(job)
    slurm.wait(job, {"COMPLETED"}, DEADLINE_S)
    check_finished(run.dir, STEPS)
    recovery = json.loads(run.lines("recoveries.jsonl")[0])
    assert recovery["cause"] == "the loss of n2"
