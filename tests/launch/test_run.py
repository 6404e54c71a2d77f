"""Whole runs through the command line, with stand-ins for the processes: what they write is theirs, the rest is the launcher's.

`python -P` keeps the working directory off the launcher's own path, so that it is the real one, while the processes that it
starts from there find the stand-ins first.
"""

import stat
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import yaml

from tests.launch.stand_ins import ENV, LIVES_UNTIL_CLOSED, command, launch, write_project


@pytest.fixture
def project(tmp_path: Path) -> Path:
    write_project(tmp_path)
    return tmp_path


def test_run_goes_through_and_is_not_overwritten(project: Path) -> None:
    ended = launch(project, "name=one")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "3/3  0.750" in ended.stdout
    assert "trained 42" in ended.stdout
    run_dir = project / "outputs/one"
    assert {"config.yaml", "keys", "logs", "metrics.jsonl"} <= {path.name for path in run_dir.iterdir()}
    assert stat.S_IMODE((run_dir / "keys").stat().st_mode) == 0o700
    assert {path.name for path in (run_dir / "logs").iterdir()} == {
        f"{role}-0.log" for role in ("queue", "trainer", "rollout", "judge")
    }
    again = launch(project, "name=one")
    assert again.returncode == 2
    assert "resume=outputs/one" in again.stderr


@pytest.mark.slow
def test_resumed_run_takes_its_own_configuration_and_what_is_given_on_top(project: Path) -> None:
    launch(project, "name=one", "trainer.clip_grad=0.25")
    run_dir = project / "outputs/one"
    (run_dir / "closed").unlink()
    resumed = launch(project, "resume=outputs/one", "trainer.lr=0.5")
    assert resumed.returncode == 0
    settings = yaml.safe_load((run_dir / "config.yaml").read_text())["trainer"]
    assert (settings["lr"], settings["clip_grad"]) == (0.5, 0.25)


@pytest.mark.slow
def test_failed_trainer_is_reported_with_its_words_and_how_to_go_on(project: Path) -> None:
    (project / "trainer/__main__.py").write_text("raise SystemExit('the loss is not a number')")
    ended = launch(project, "name=bad")
    assert ended.returncode == 1
    assert "the loss is not a number" in ended.stderr
    assert "make run resume=outputs/bad" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_second_launcher_of_a_run_is_refused_and_an_interrupt_leaves_nothing(project: Path) -> None:
    (project / "trainer/__main__.py").write_text(LIVES_UNTIL_CLOSED)
    with subprocess.Popen(
        command("name=busy"), cwd=project, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as launcher:
        log = project / "outputs/busy/logs/judge-0.log"
        deadline = time.monotonic() + 60
        while not log.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        second = launch(project, "resume=outputs/busy")
        assert second.returncode == 2
        assert "another launcher" in second.stderr
        time.sleep(1)
        pids = [child.pid for child in psutil.Process(launcher.pid).children(recursive=True)]
        started = time.monotonic()
        launcher.terminate()
        assert launcher.wait(timeout=15) == 130
        assert time.monotonic() - started < 10
    assert len(pids) >= 4
    assert not any(psutil.pid_exists(pid) for pid in pids)
