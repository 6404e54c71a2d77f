"""The doctor in a Slurm job asks every node of the run with every Python of the run."""

import sys
from pathlib import Path

import pytest

from tests.launch.slurm.slurm_cluster import SlurmCluster
from tests.launch.stand_ins import ENV, write_model, write_problems

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]


def ask_doctor(slurm: SlurmCluster, folder: Path, *overrides: str, fast: bool = True) -> tuple[str, str]:
    """The job's last state, and its output."""
    write_model(folder / "model")
    write_problems(folder / "train.jsonl")
    words = [
        "experiment=debug", "model.path=model", "model.prepare=", "data.train=[train.jsonl]", "data.heldout=[]",
        "cluster.kind=slurm", "cluster.nodes=2", *overrides,
    ]  # fmt: skip
    command = f"COLUMNS=400 {sys.executable} -m launch.doctor {'--fast' if fast else ''} {' '.join(words)}"
    env = {"PYTHONPATH": ENV["PYTHONPATH"]}
    job = slurm.sbatch("--nodes=2", f"--output={folder}/said", "--wrap", command, cwd=folder, env=env)
    state = slurm.wait(job, {"COMPLETED", "FAILED"}, timeout_s=240)
    return state, (folder / "said").read_text()


def test_both_nodes_answer_and_see_one_folder(slurm: SlurmCluster, tmp_path: Path) -> None:
    state, said = ask_doctor(slurm, tmp_path)
    assert state == "COMPLETED", said
    assert "n1, n2" in said and "written by 2 node(s)" in said
    assert not list(tmp_path.glob(".canary-*"))


def test_missing_python_is_named(slurm: SlurmCluster, tmp_path: Path) -> None:
    state, said = ask_doctor(slurm, tmp_path, "cluster.trainer_python=/nowhere/python")
    assert state == "FAILED"
    assert "/nowhere/python" in said and "Traceback" not in said


def test_set_up_lines_are_run_before_the_nodes_are_asked(slurm: SlurmCluster, tmp_path: Path) -> None:
    state, said = ask_doctor(slurm, tmp_path, "'cluster.setup=[\"export NCCL_SOCKET_IFNAME=nothing\"]'")
    assert state == "FAILED"
    assert "NCCL_SOCKET_IFNAME=nothing" in said


NO_SANDBOX_ON_N2 = """#!/bin/sh
case "$SLURMD_NODENAME $*" in
  "n2 -m reward.check"*) echo "user namespaces are forbidden on $SLURMD_NODENAME" >&2; exit 2 ;;
esac
exec {python} "$@"
"""


@pytest.mark.slow
def test_sandbox_is_tried_on_the_nodes_where_judges_run(slurm: SlurmCluster, tmp_path: Path) -> None:
    """The batch script runs on n1, the trainer's node; the engines, and the judges beside them, are on n2."""
    python = tmp_path / "python-of-the-fleet"
    python.write_text(NO_SANDBOX_ON_N2.format(python=sys.executable))
    python.chmod(0o755)
    state, said = ask_doctor(slurm, tmp_path, f"cluster.rollout_python={python}", fast=False)
    assert state == "FAILED"
    assert "a tiny job did not pass" in said and "user namespaces are forbidden on n2" in said
    assert not list(tmp_path.glob(".tiny-job-*"))
