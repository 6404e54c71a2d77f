"""Ctrl-C ends a run whose processes ignore signals, and a second Ctrl-C ends it at once. Nothing is left in either case."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from launch.processes.local import GRACE_S
from tests.launch.stand_ins import ENV, command, write_project

pytestmark = pytest.mark.slow

DEAF = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(900)"])
time.sleep(900)
"""
ROLES = ("rollout/queue/__main__.py", "rollout/__main__.py", "reward/__main__.py", "trainer/__main__.py")
START_S = 90.0
PROMISED_S = 10.0


@contextmanager
def deaf_run(project: Path, name: str) -> Iterator[tuple[subprocess.Popen[bytes], list[psutil.Process]]]:
    """A launcher as a terminal has it, and all that it started."""
    write_project(project)
    for role in ROLES:
        (project / role).write_text(DEAF)
    launcher = subprocess.Popen(
        command(f"name={name}"),
        cwd=project,
        env=ENV,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    members: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + START_S
        while sum("900" in " ".join(_line(p)) for p in members) < len(ROLES):
            assert time.monotonic() < deadline and launcher.poll() is None
            time.sleep(0.2)
            members = psutil.Process(launcher.pid).children(recursive=True)
        yield launcher, members
    finally:
        for process in members:
            if process.is_running():
                process.kill()
        launcher.kill()
        launcher.wait()


def _line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def left(members: list[psutil.Process]) -> list[psutil.Process]:
    _, alive = psutil.wait_procs(members, timeout=1.0)
    return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_ctrl_c_ends_everything_within_the_promised_time(tmp_path: Path) -> None:
    with deaf_run(tmp_path, "once") as (launcher, members):
        asked = time.monotonic()
        os.killpg(launcher.pid, signal.SIGINT)
        assert launcher.wait(timeout=60) == 130
        took_s = time.monotonic() - asked
        assert GRACE_S < took_s < PROMISED_S
        assert left(members) == []


@pytest.mark.parametrize("pause_s", [0.0, 1.0])
def test_second_ctrl_c_ends_everything_at_once(tmp_path: Path, pause_s: float) -> None:
    with deaf_run(tmp_path, "twice") as (launcher, members):
        asked = time.monotonic()
        os.killpg(launcher.pid, signal.SIGINT)
        time.sleep(max(pause_s, 0.02))  # two equal pending signals count as one
        os.killpg(launcher.pid, signal.SIGINT)
        assert launcher.wait(timeout=60) == 130
        assert time.monotonic() - asked < GRACE_S  # nothing was waited for
        assert left(members) == []
