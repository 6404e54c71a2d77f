"""Whole runs through the command line, with stand-ins for the processes: what they write is theirs, the rest is the launcher's.

`python -P` keeps the working directory off the launcher's own path, so that it is the real one, while the processes that it
starts from there find the stand-ins first.
"""

import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from tests.launch.stand_ins import write_model, write_problems

LIVES_UNTIL_CLOSED = """
import pathlib, sys, time
run = pathlib.Path(sys.argv[sys.argv.index("--run") + 1])
while not (run / "closed").exists():
    time.sleep(0.05)
"""
TRAINER = """
import json, os, pathlib, sys, time
run = pathlib.Path(sys.argv[sys.argv.index("--run") + 1])
assert (run / "config.yaml").exists()
if os.environ["RANK"] == "0":
    with (run / "metrics.jsonl").open("a") as file:
        for step in range(1, 4):
            line = {"step": step, "time": time.time(), "reward/mean": step / 4, "time/step_s": 0.1}
            print(json.dumps(line), file=file, flush=True)
            time.sleep(0.1)
    (run / "summary.json").write_text(json.dumps({"queue": {"trained_tokens": 42}}))
    (run / "closed").touch()
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, source in {
        "rollout/queue.py": LIVES_UNTIL_CLOSED,
        "rollout/__main__.py": LIVES_UNTIL_CLOSED,
        "reward/__main__.py": LIVES_UNTIL_CLOSED,
        "trainer/__main__.py": TRAINER,
    }.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(source)
    write_model(tmp_path / "model")
    write_problems(tmp_path / "train.jsonl")
    return tmp_path


def command(*arguments: str) -> list[str]:
    own = ["model.path=model", "model.prepare=", "data.train=[train.jsonl]", "data.heldout=[]", "trainer.tp=1", "trainer.steps=3"]
    given = [] if any(a.startswith("resume=") for a in arguments) else own
    return [sys.executable, "-P", "-m", "launch", *arguments, "experiment=debug", *given]


def launch(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), cwd=project, capture_output=True, text=True, timeout=120)


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
    with subprocess.Popen(command("name=busy"), cwd=project, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as launcher:
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


@pytest.mark.slow
def test_sweep_leaves_a_folder_for_each_job(project: Path) -> None:
    ended = launch(project, "-m", "rollout.max_staleness=0,1")
    assert ended.returncode == 0
    folders = sorted(path.name for path in project.glob("multirun/*/*") if path.is_dir())
    assert [name[:2] for name in folders] == ["00", "01"]
    assert all("max_staleness" in name for name in folders)
