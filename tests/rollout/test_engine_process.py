"""The engine as a process, with the fake server in SGLang's place; what only the real one shows is in test_engine_push."""

import asyncio
import glob
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from requests.utils import should_bypass_proxies  # as SGLang's own warm-up uses it

from rollout.engine_client import UNPUSHED
from rollout.engine_process import (
    SCRATCH_PREFIX,
    Engine,
    EngineSettings,
    EngineStartError,
    cause_of_death,
    check,
    command_line,
    environment,
    remove_left_scratch,
)
from tests.ports import free_port
from tests.rollout.engine_controls import version_of
from tests.rollout.fake_engine import FAKE_LAUNCHER

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 30.0


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.fixture
def settings(tmp_path: Path) -> Callable[..., EngineSettings]:
    (tmp_path / "config.json").write_text("{}")

    def make(*launcher: str, **changes: object) -> EngineSettings:
        values = {"port": free_port(), "device": "cpu", "launcher": launcher or FAKE_LAUNCHER} | changes
        return EngineSettings(model=tmp_path, log_file=tmp_path / "engine.log", **values)  # type: ignore[arg-type]

    return make


@pytest.fixture
def start() -> Iterator[Callable[[EngineSettings], Engine]]:
    started: list[Engine] = []

    def run(settings: EngineSettings) -> Engine:
        started.append(Engine(settings))
        started[-1].start()
        return started[-1]

    yield run
    for engine in started:
        engine.stop()


def test_it_starts_serves_and_stops(settings: Callable[..., EngineSettings], start: Callable[..., Engine]) -> None:
    engine = start(settings(api_key="user", admin_api_key="admin"))

    async def use() -> int:
        await engine.wait_ready(DEADLINE_S)
        async with engine.client() as client:
            await client.pause()
            return await version_of(client)

    assert asyncio.run(use()) == UNPUSHED
    assert engine.alive()
    pid = engine.pid
    engine.stop()
    assert not engine.alive()
    assert pid and gone(pid)


def test_it_starts_again_on_its_port_after_its_server_was_killed(
    settings: Callable[..., EngineSettings], start: Callable[..., Engine]
) -> None:
    engine = start(settings())
    asyncio.run(engine.wait_ready(DEADLINE_S))
    assert engine.pid
    os.kill(engine.pid, signal.SIGKILL)
    until(lambda: not engine.alive())
    engine.start()
    asyncio.run(engine.wait_ready(DEADLINE_S))


def test_a_port_in_use_is_refused_before_anything_starts(settings: Callable[..., EngineSettings]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        engine = Engine(settings(port=taken.getsockname()[1]))
        with pytest.raises(EngineStartError, match=r"cannot listen on 127\.0\.0\.1:\d+ \(Address already in use\)"):
            engine.start()
    assert engine.pid is None


def test_a_folder_that_is_no_model_is_refused_before_anything_starts(
    settings: Callable[..., EngineSettings], tmp_path: Path
) -> None:
    (tmp_path / "config.json").unlink()
    with pytest.raises(EngineStartError, match=f"{tmp_path} is no Hugging Face model folder"):
        Engine(settings()).start()


def test_a_server_that_dies_while_starting_is_an_error_with_the_tail_of_its_log(
    settings: Callable[..., EngineSettings], start: Callable[..., Engine], tmp_path: Path
) -> None:
    (tmp_path / "engine.log").write_text("of an earlier start\n")
    engine = start(settings("-c", "print('no such model'); raise SystemExit(3)"))
    with pytest.raises(EngineStartError, match=r"(?s)died while starting.*no such model.*exit code 3") as caught:
        asyncio.run(engine.wait_ready(DEADLINE_S))
    assert "of an earlier start" not in str(caught.value)


@pytest.mark.parametrize(
    ("program", "hopeless"),
    [
        ("import argparse; argparse.ArgumentParser(usage='x' * 99).parse_args(['--a-typo'])", True),
        ("import a_package_that_is_missing", True),
        ("def prepare_server_args(): raise ValueError('bad pair')\nprepare_server_args()", True),
        ("raise OSError('address already in use')", False),
        ("raise RuntimeError('not enough memory')", False),
    ],
)
def test_a_start_that_would_fail_again_is_told_from_one_that_may_not(
    settings: Callable[..., EngineSettings], start: Callable[..., Engine], program: str, hopeless: bool
) -> None:
    engine = start(settings("-c", program))
    with pytest.raises(EngineStartError) as caught:
        asyncio.run(engine.wait_ready(DEADLINE_S))
    assert caught.value.hopeless is hopeless
    assert "a-typo" in str(caught.value) or "argparse" not in program


def test_a_server_that_is_not_ready_in_time_is_ended(
    settings: Callable[..., EngineSettings], start: Callable[..., Engine]
) -> None:
    engine = start(settings("-c", "import time; print('loading', flush=True); time.sleep(1000)"))
    until(lambda: "loading" in engine.log_tail())
    pid = engine.pid
    with pytest.raises(EngineStartError, match=r"(?s)within 0\.3 s.*loading"):
        asyncio.run(engine.wait_ready(0.3))
    assert pid and gone(pid)


SERVER_WITH_CHILD = "import subprocess, time; print(subprocess.Popen(['sleep', '1000']).pid, flush=True); time.sleep(1000)"


def test_stop_ends_the_servers_children_too(settings: Callable[..., EngineSettings], start: Callable[..., Engine]) -> None:
    engine = start(settings("-c", SERVER_WITH_CHILD))
    until(lambda: engine.log_tail().strip().isdigit())
    child = int(engine.log_tail())
    engine.stop()
    until(lambda: gone(child))


def test_when_the_server_dies_its_children_die_too(settings: Callable[..., EngineSettings], start: Callable[..., Engine]) -> None:
    engine = start(settings("-c", SERVER_WITH_CHILD))
    until(lambda: engine.log_tail().strip().isdigit())
    child = int(engine.log_tail())
    server = psutil.Process(child).ppid()
    os.kill(server, signal.SIGKILL)
    until(lambda: gone(child))
    until(lambda: not engine.alive())


def test_the_server_dies_with_its_guard(settings: Callable[..., EngineSettings], start: Callable[..., Engine]) -> None:
    engine = start(settings("-c", SERVER_WITH_CHILD))
    until(lambda: engine.log_tail().strip().isdigit())
    child = int(engine.log_tail())
    server = psutil.Process(child).ppid()
    assert engine.pid
    os.kill(engine.pid, signal.SIGKILL)
    until(lambda: gone(server))
    engine.stop()
    until(lambda: gone(child))


WORKER = """
import sys, time
from pathlib import Path
from rollout.engine_process import Engine, EngineSettings
model, port, server = Path(sys.argv[1]), int(sys.argv[2]), ("-c", sys.argv[3])
engine = Engine(EngineSettings(model=model, port=port, log_file=model / "engine.log", device="cpu", launcher=server))
engine.start()
time.sleep(1000)
"""


def test_server_and_children_die_with_a_worker_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    log = tmp_path / "engine.log"
    command = [sys.executable, "-c", WORKER, str(tmp_path), str(free_port()), SERVER_WITH_CHILD]
    with subprocess.Popen(command, cwd=ROOT) as worker:
        until(lambda: log.is_file() and log.read_text().strip().isdigit())
        child = int(log.read_text())
        server = psutil.Process(child).ppid()
        worker.kill()
    until(lambda: gone(server))
    until(lambda: gone(child))
    left = glob.glob(f"{tempfile.gettempdir()}/{SCRATCH_PREFIX}{worker.pid}-*")
    assert left
    remove_left_scratch()
    assert not any(Path(folder).exists() for folder in left)


def test_keys_reach_the_server_but_no_command_line_environment_or_repr(
    settings: Callable[..., EngineSettings], start: Callable[..., Engine]
) -> None:
    engine = start(settings(api_key="user-secret", admin_api_key="admin-secret"))
    asyncio.run(engine.wait_ready(DEADLINE_S))
    assert engine.pid
    (server,) = psutil.Process(engine.pid).children()
    visible = " ".join(server.cmdline()) + str(server.environ()) + repr(engine.settings)
    assert "secret" not in visible.replace("secrets.yaml", "")
    config = Path(server.cmdline()[server.cmdline().index("--config") + 1])
    assert config.parent.stat().st_mode & 0o077 == 0
    assert not config.exists()  # read by now
    assert engine.settings.log_file.stat().st_mode & 0o077 == 0
    engine.stop()
    assert not config.parent.exists()


def test_a_server_does_not_inherit_the_rendezvous_of_the_workers_torchrun(
    settings: Callable[..., EngineSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, "1")
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "OMP_NUM_THREADS"):  # as torchrun sets them for its workers
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("MY_SETTING", "kept")
    env = environment(settings(device="cuda"), tmp_path)
    assert not {name for name in env if name.startswith(("RANK", "LOCAL_", "WORLD_", "MASTER_", "TORCHELASTIC_", "TORCH_NCCL"))}
    assert "OMP_NUM_THREADS" not in env
    assert env["MY_SETTING"] == "kept"


@pytest.mark.parametrize("excess", [0, 1])
def test_temporary_folder_is_refused_when_it_is_too_long_for_an_engines_sockets(
    settings: Callable[..., EngineSettings], excess: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = Path(f"{SCRATCH_PREFIX}{os.getpid()}-12345678/tmp12345678")
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        folder = Path(base, "x" * (107 + excess - len(f"{base}//{below}")))
        (folder / below.parent).mkdir(parents=True)
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        with socket.socket(socket.AF_UNIX) as listener:
            if not excess:
                listener.bind(str(folder / below))
                check(settings())
                return
            with pytest.raises(OSError, match="too long"):
                listener.bind(str(folder / below))
        with pytest.raises(EngineStartError, match="is 1 bytes too long for the sockets"):
            check(settings())


def test_user_that_the_machine_has_no_name_for_has_an_environment(
    settings: Callable[..., EngineSettings], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in a container that was started with another user's number."""
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 54_321)
    assert environment(settings(), tmp_path)["TMPDIR"] == str(tmp_path)


SERVER = """
import multiprocessing
from sglang.child import say

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn", force=True)
    child = multiprocessing.Process(target=say)
    child.start()
    child.join()
"""
CHILD = """
import multiprocessing, sys
from torch.distributed import TCPStore

def say():
    print(multiprocessing.get_start_method(), TCPStore.__init__.__module__, sys.argv[1:], flush=True)
"""


@pytest.mark.parametrize(("device", "method"), [("cpu", "fork"), ("cuda", "spawn")])
def test_every_process_of_sglangs_server_has_the_mended_store_and_is_forked_on_cpu_only(
    settings: Callable[..., EngineSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, method: str
) -> None:
    (tmp_path / "sglang").mkdir()
    for name, source in (("__init__", ""), ("launch_server", SERVER), ("child", CHILD)):
        (tmp_path / "sglang" / f"{name}.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    server = replace(settings(device=device), launcher=())
    command = command_line(server, tmp_path / "secrets.yaml")
    said = subprocess.run(command, env=environment(server, tmp_path), cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said.startswith(f"{method} rollout.patched.tcp_store ['--config',")


def test_stand_ins_are_on_the_path_on_cpu_only(settings: Callable[..., EngineSettings], tmp_path: Path) -> None:
    assert "patched/cpu" in environment(settings(device="cpu"), tmp_path)["PYTHONPATH"]
    on_gpu = environment(settings(device="cuda"), tmp_path)
    assert "patched/cpu" not in on_gpu.get("PYTHONPATH", "")
    assert "SGLANG_USE_CPU_ENGINE" not in on_gpu


CHAIN = """INFO: started
Traceback (most recent call last):
  File "urllib3.py", line 1
ConnectionRefusedError: [Errno 111] Connection refused

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
requests.exceptions.ProxyError: HTTPConnectionPool(host='10.0.0.1', port=3128): Max retries exceeded
[2026-11-30 12:00:00] Initialization failed
Traceback (most recent call last):
RuntimeError: the server was killed
python ended with exit code -9
"""


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (CHAIN, "requests.exceptions.ProxyError: HTTPConnectionPool(host='10.0.0.1', port=3128): Max retries exceeded"),
        ("[TP0] torch.OutOfMemoryError: CUDA out of memory.\nlater\n", "[TP0] torch.OutOfMemoryError: CUDA out of memory."),
        ("loading\npython ended with exit code -9\n\n", "python ended with exit code -9"),
        ("", "it wrote nothing to its log"),
    ],
)
def test_line_that_tells_why_a_server_died_is_the_end_of_its_first_traceback(log: str, cause: str) -> None:
    assert cause_of_death(log) == cause


@given(st.text())
def test_whatever_a_log_holds_there_is_one_line_that_tells_why(log: str) -> None:
    assert len(cause_of_death(log).splitlines()) == 1


def test_server_does_not_reach_itself_through_a_proxy_of_the_environment(
    settings: Callable[..., EngineSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "intranet.example")
    monkeypatch.delenv("no_proxy", raising=False)
    server = settings(host="10.1.2.3")  # its node's own address
    env = environment(server, tmp_path)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert all(
        should_bypass_proxies(f"http://{host}:80/", None) for host in ("127.0.0.1", "localhost", "10.1.2.3", "intranet.example")
    )
    assert not should_bypass_proxies("http://huggingface.example/", None) and env["http_proxy"] == "http://127.0.0.1:9"
