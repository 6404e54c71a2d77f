"""Whole runs through the command line. The launcher is the real one; the processes of the run are stand-ins.

`python -P` keeps the working folder off the launcher's own path. The processes that it starts there find the stand-ins first.
"""

import shlex
import stat
import subprocess
import sys
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
    assert "run outputs/one: 2 trainer ranks, 2 engines, 1 judge on 1 node, logs in outputs/one/logs\n" in ended.stdout
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


def test_user_code_is_loaded_before_anything_is_made_and_goes_on_with_the_run(project: Path) -> None:
    (project / "mine.py").write_text("def shaped(:")
    refused = launch(project, "name=one", "algo.advantage=mine:shaped")
    assert refused.returncode == 2 and "mine.py:1: SyntaxError" in refused.stderr
    assert not (project / "outputs/one").exists()
    (project / "mine.py").write_text("def shaped(): pass")
    assert launch(project, "name=one", "algo.advantage=mine:shaped").returncode == 0
    (project / "outputs/one/closed").unlink()
    (project / "mine.py").unlink()
    resumed = launch(project, "resume=outputs/one", "trainer.lr=0.5")
    assert (resumed.returncode, resumed.stderr) == (0, "")


@pytest.mark.parametrize("output", ["> /dev/full", ">&-", "2>&1 | true"])
def test_run_whose_output_is_full_closed_or_unread_goes_through(output: str, project: Path) -> None:
    words = shlex.join(command("name=unseen"))
    shell = f"set -o pipefail; {words} {output}"
    ended = subprocess.run(["bash", "-c", shell], cwd=project, env=ENV, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (project / "outputs/unseen/summary.json").exists()


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
def test_failed_trainer_is_reported_with_the_end_of_its_log_and_how_to_resume(project: Path) -> None:
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


WAITS_FOR_GO = """
import pathlib, sys, time
run = pathlib.Path(sys.argv[sys.argv.index("--run") + 1])
while not (run / "go").exists():
    time.sleep(0.05)
"""


@pytest.mark.slow
def test_run_goes_through_although_its_logs_are_removed_and_its_report_cannot_be_written(project: Path) -> None:
    (project / "trainer/__main__.py").write_text(WAITS_FOR_GO + (project / "trainer/__main__.py").read_text())
    with subprocess.Popen(
        command("name=one"), cwd=project, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as launcher:
        run_dir, deadline = project / "outputs/one", time.monotonic() + 60
        while not (run_dir / "logs/judge-0.log").exists():
            assert time.monotonic() < deadline and launcher.poll() is None
            time.sleep(0.1)
        for log in (run_dir / "logs").iterdir():
            log.unlink()
        (run_dir / "report.html").mkdir()
        (run_dir / "go").touch()
        said, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, said
    assert "warning: the run has no report: " in said and "done: 3 steps" in said


@pytest.mark.slow
def test_folder_that_another_run_has_filled_meanwhile_is_not_touched(project: Path) -> None:
    """As two launchers do that start at the same moment with one name, when the first one's run is over soon."""
    slow = project / "python"  # the nodes are examined with it
    slow.write_text(f'#!/bin/sh\ntouch asked; while [ ! -e go ]; do sleep 0.1; done; exec {sys.executable} "$@"\n')
    slow.chmod(0o755)
    words = command("name=one", f"cluster.trainer_python={slow}")
    with subprocess.Popen(words, cwd=project, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as launcher:
        deadline = time.monotonic() + 60
        while not (project / "asked").exists():
            assert time.monotonic() < deadline and launcher.poll() is None
            time.sleep(0.1)
        other = project / "outputs/one/config.yaml"
        other.parent.mkdir(parents=True)
        other.write_text("the other's")
        (project / "go").touch()
        said, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 2 and "outputs/one holds a run already" in said
    assert other.read_text() == "the other's" and not (other.parent / "keys").exists()


@pytest.mark.slow
def test_run_can_be_resumed_from_within_its_folder(project: Path) -> None:
    assert launch(project, "name=one").returncode == 0
    run_dir = project / "outputs/one"
    for name in ("model", "train.jsonl", "rollout", "reward", "trainer"):  # as paths from anywhere would be
        (run_dir / name).symlink_to(project / name)
    for _ in range(2):
        (run_dir / "closed").unlink()
        resumed = launch(run_dir, "resume=.")
        assert (resumed.returncode, resumed.stderr) == (0, "")
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["name"] == "one"
