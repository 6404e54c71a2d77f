"""On one machine no process of a run listens where another machine could reach it. The kernel says who listens."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from rollout.engine_process import Engine, EngineSettings
from tests.ports import free_port
from tests.rollout.stage import QWEN2

PROJECT = Path(__file__).resolve().parents[2]
LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
WAIT_S = 60.0
TORCHRUN = ("-m", "rollout.patched.torchrun", "--nnodes", "1", "--node-rank", "0", "--nproc-per-node", "2")
RANK = "import time, torch.distributed as d; d.init_process_group('gloo'); d.barrier(); time.sleep(60)"
SMALL = (
    "experiment=debug", "trainer.steps=1", "trainer.eval_every=0", "data.heldout=[]", "algo.groups_per_step=4",
    "algo.completions_per_group=2", "algo.minibatches=1",
)  # fmt: skip


def listening(pid: int) -> set[tuple[str, str, int]]:
    """Program, address and port of every TCP socket that a process and its descendants listen on."""
    found = set[tuple[str, str, int]]()
    try:
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return found
    for process in family:
        try:
            sockets, name = process.net_connections(kind="tcp"), " ".join(process.cmdline())[:120]
        except psutil.Error:  # it has just ended
            continue
        found |= {(name, socket.laddr.ip, socket.laddr.port) for socket in sockets if socket.status == psutil.CONN_LISTEN}
    return found


def open_to_others(sockets: set[tuple[str, str, int]]) -> list[tuple[str, str, int]]:
    return sorted(one for one in sockets if one[1] not in LOOPBACK)


@contextmanager
def running(*arguments: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, *arguments], cwd=PROJECT, stdout=out, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        for one in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []:
            one.kill()
        process.kill()
        process.wait()


def until(true: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.1)


def test_torchrun_and_its_ranks_listen_on_the_loopback_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    port = free_port()
    where = ("--master-addr", "127.0.0.1", "--master-port", str(port))
    with running(*TORCHRUN, *where, "--no-python", "--", sys.executable, "-c", RANK, log=tmp_path / "log") as torchrun:
        until(lambda: len(listening(torchrun.pid)) >= 3, torchrun, tmp_path / "log")  # the store, and gloo of both ranks
        sockets = listening(torchrun.pid)
    assert port in {number for _, _, number in sockets} and open_to_others(sockets) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tp", [1, 2])
def test_engine_listens_at_its_own_address_alone(tmp_path: Path, tp: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN2))
    settings = EngineSettings(
        model=tmp_path, port=free_port(), log_file=tmp_path / "log", device="cpu", dtype="float32", max_total_tokens=2048,
        max_running_requests=4, api_key="key", tp=tp,
    )  # fmt: skip
    engine = Engine(settings)
    try:
        engine.start()
        asyncio.run(engine.wait_ready(300.0))
        assert engine.pid is not None
        sockets = listening(engine.pid)
    finally:
        engine.stop()
    assert settings.port in {port for _, _, port in sockets} and open_to_others(sockets) == []


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_no_process_of_a_run_listens_where_another_machine_could_reach_it(tmp_path: Path) -> None:
    output = (f"output={tmp_path}", "name=run")
    sockets = set[tuple[str, str, int]]()
    with running("-m", "launch", *SMALL, *output, log=tmp_path / "log") as launcher:
        while launcher.poll() is None:
            sockets |= listening(launcher.pid)
            time.sleep(0.2)
    assert launcher.returncode == 0, (tmp_path / "log").read_text()[-3000:]
    assert len({port for _, _, port in sockets}) > 5 and open_to_others(sockets) == []
