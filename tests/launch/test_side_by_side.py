"""Two runs on one machine use separate ports, and the end of one does not disturb the other."""

import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

from tests.launch.stand_ins import ENV, LIVES_UNTIL_CLOSED, TRAINER, command, write_project

pytestmark = pytest.mark.slow

LISTENS = """
import os, socket, sys
words = dict(zip(sys.argv, sys.argv[1:]))
port = int(words["--bind"].rpartition(":")[2]) if "--bind" in words else int(words["--engine-port"]) + 8 * int(os.environ["RANK"])
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
try:
    server.bind(("127.0.0.1", port))
except OSError as error:
    sys.exit(f"port {port}: {error.strerror}")
server.listen()
"""
WAITS_FOR_GO = """
import pathlib, sys, time
run = pathlib.Path(sys.argv[sys.argv.index("--run") + 1])
while not (run / "go").exists():
    time.sleep(0.05)
"""
LONG_S = 120.0
LISTENERS = 3  # the queue server and two engines; torchrun's stores come on top


@pytest.fixture
def project(tmp_path: Path) -> Path:
    write_project(tmp_path)
    for role in ("rollout/queue/__main__.py", "rollout/__main__.py"):
        (tmp_path / role).write_text(LISTENS + LIVES_UNTIL_CLOSED)
    (tmp_path / "trainer/__main__.py").write_text(WAITS_FOR_GO + TRAINER)
    return tmp_path


def start(project: Path, name: str) -> subprocess.Popen[bytes]:
    log = (project / f"{name}.out").open("wb")
    return subprocess.Popen(command(f"name={name}"), cwd=project, env=ENV, stdout=log, stderr=log, start_new_session=True)


def wait_until_up(project: Path, name: str, run: subprocess.Popen[bytes]) -> None:
    """The trainer runs, and queue and engines listen."""
    deadline = time.monotonic() + LONG_S
    while len(ports(run)) < LISTENERS or not (project / f"outputs/{name}/logs/trainer-0.log").exists():
        assert time.monotonic() < deadline and run.poll() is None, (project / f"{name}.out").read_text()
        time.sleep(0.2)


def ports(run: subprocess.Popen[bytes]) -> set[int]:
    found: set[int] = set()
    for process in psutil.Process(run.pid).children(recursive=True):
        with suppress(psutil.Error):
            found |= {c.laddr.port for c in process.net_connections() if c.status == psutil.CONN_LISTEN}
    return found


def test_runs_that_start_together_use_separate_ports(project: Path) -> None:
    runs = {name: start(project, name) for name in ("one", "two")}
    try:
        for name, run in runs.items():
            wait_until_up(project, name, run)
        one, two = (ports(run) for run in runs.values())
        assert not one & two
        for name, run in runs.items():
            (project / f"outputs/{name}/go").touch()
            assert run.wait(timeout=LONG_S) == 0, (project / f"{name}.out").read_text()
            assert yaml.safe_load((project / f"outputs/{name}/config.yaml").read_text())["name"] == name
    finally:
        for run in runs.values():
            run.terminate()
            run.wait(timeout=30)


def test_end_of_one_run_is_not_noticed_by_the_other(project: Path) -> None:
    one, two = start(project, "one"), start(project, "two")
    try:
        for name, run in (("one", one), ("two", two)):
            wait_until_up(project, name, run)
        before = {p.pid for p in psutil.Process(two.pid).children(recursive=True)}
        one.send_signal(signal.SIGINT)
        assert one.wait(timeout=30) == 130
        time.sleep(1)
        assert {p.pid for p in psutil.Process(two.pid).children(recursive=True)} == before
        (project / "outputs/two/go").touch()
        assert two.wait(timeout=LONG_S) == 0, (project / "two.out").read_text()
    finally:
        for run in (one, two):
            run.terminate()
            run.wait(timeout=30)
