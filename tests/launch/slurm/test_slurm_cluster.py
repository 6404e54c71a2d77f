"""The Slurm cluster of the tests is a real one, and leaves nothing behind."""

import subprocess
from pathlib import Path

import psutil
import pytest

from tests.launch.slurm import slurm_cluster as module
from tests.launch.slurm.slurm_cluster import NoSlurm, SlurmCluster, install, slurm_cluster, until

pytestmark = pytest.mark.slurm


def test_job_runs_on_every_node_with_its_gpus(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = slurm.sbatch(
        "--nodes=4", "--gpus-per-node=8", f"--output={tmp_path}/out", "--wrap",
        "srun -N4 bash -c 'echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES'", cwd=tmp_path,
    )  # fmt: skip
    slurm.wait(job, {"COMPLETED"}, timeout_s=60)
    assert sorted((tmp_path / "out").read_text().split()) == sorted([*slurm.nodes, *4 * ["0,1,2,3,4,5,6,7"]])


def test_without_slurm_the_tests_fail_and_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROGRAMS", ("slurmctld-that-is-not-there",))
    monkeypatch.setattr("os.getuid", lambda: 1000)
    with pytest.raises(NoSlurm, match=r"apt-get install -y --no-install-recommends slurmctld .* as root, or .*-m 'not slurm'"):
        install()


def test_killed_node_has_no_job_until_it_is_mended(slurm: SlurmCluster) -> None:
    job = slurm.sbatch("--nodes=1", "--nodelist=n3", "--no-requeue", "--output=/dev/null", "--wrap", "sleep 600")
    until("n3 runs the job", lambda: len(slurm.steps("n3")) >= 2, 60)
    slurm.kill_node("n3")
    slurm.wait(job, {"NODE_FAIL"}, timeout_s=60)
    with pytest.raises(subprocess.CalledProcessError):
        slurm.run("srun", "--immediate=2", "--nodelist=n3", "true")
    assert slurm.killed == ["n3"]
    slurm.mend_node("n3")
    assert slurm.killed == []


def test_cluster_leaves_no_process_and_no_folder(tmp_path: Path) -> None:
    with slurm_cluster(nodes=2) as cluster:
        cluster.sbatch("--nodes=2", "--output=/dev/null", "--wrap", "srun --overlap -N2 sleep 601")
        until("both nodes work", lambda: all(len(cluster.steps(node)) >= 2 for node in cluster.nodes), 60)
        processes = [psutil.Process(d.pid) for d in cluster._daemons.values()]
        processes += [step for node in cluster.nodes for step in cluster.steps(node)]
    assert not psutil.wait_procs(processes, timeout=5)[1]
    assert not cluster.folder.exists()
