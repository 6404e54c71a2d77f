"""`sbatch launch/kestrel_256.sh`, small, on a real Slurm, with stand-ins for what it starts (slurm_stand_ins.py)."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.launch.slurm_cluster import SlurmCluster, until
from tests.launch.slurm_stand_ins import PROJECT, environment, write_stand_ins

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(240)]


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
        return [json.loads(line)["step"] for line in self.lines("metrics.jsonl")]

    def said(self) -> str:
        path = self.folder / f"kestrel-{self.job}.log"
        return path.read_text() if path.exists() else ""

    def wait_for_step(self, step: int, timeout_s: float = 90.0) -> None:
        def reached() -> bool:
            assert self.slurm.state(self.job) in ("PENDING", "CONFIGURING", "RUNNING"), self.said()
            return max(self.steps(), default=0) >= step

        until(f"step {step}", reached, timeout_s)

    def complete(self, timeout_s: float = 90.0) -> None:
        """Waits for the end; every step was done, and nothing of the run is left."""
        try:
            self.slurm.wait(self.job, {"COMPLETED"}, timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.said()}") from error
        assert sorted(set(self.steps()))[-1] == 20


def submit(slurm: SlurmCluster, folder: Path, *overrides: str, nodes: int = 4, options: tuple[str, ...] = ()) -> Run:
    own = write_stand_ins(folder) if not (folder / "python").exists() else []
    script = str(PROJECT / "launch/kestrel_256.sh")
    job = slurm.sbatch(f"--nodes={nodes}", *options, script, *own, *overrides, cwd=folder, env=environment())
    return Run(slurm=slurm, job=job, folder=folder)


@pytest.fixture
def mended(slurm: SlurmCluster) -> Iterator[SlurmCluster]:
    """The cluster; nodes that the test kills come back after it."""
    yield slurm
    for node in slurm.nodes:
        if slurm.node_state(node).startswith("down"):
            slurm.mend_node(node)


def test_run_goes_through_on_four_nodes(slurm: SlurmCluster, tmp_path: Path) -> None:
    run = submit(slurm, tmp_path)
    run.complete()
    assert run.steps() == list(range(1, 21))
    assert run.lines("trainer") == ["n1 n2"]
    assert run.lines("fleet") == ["0 n3"]
    assert run.lines("judges") == ["judge-0 n3"]
    logs = {path.name for path in (run.dir / "logs").iterdir()}
    assert logs == {"queue-0.log", "trainer-0.log", "trainer-1.log", "rollout-0.log", "judge-0.log"}
    assert "on n2\n" in (run.dir / "logs/trainer-1.log").read_text()
