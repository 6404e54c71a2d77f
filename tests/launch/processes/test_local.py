"""The supervisor with the local backend and small real processes in the roles of a run."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from launch.placement.placement import ProcessSpec, Restart
from launch.processes.lifecycle import Lifecycle, RestartRules, RunEnd, RunOutcome
from launch.processes.local import GRACE_S, LocalBackend
from launch.processes.supervise import Exited, Signals, supervise
from rollout.guard import guarded

FOREVER = "import time; time.sleep(600)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def fake(role: str, code: str, restart: Restart = Restart.ON_FAILURE, n: int = 0) -> ProcessSpec:
    return ProcessSpec(
        role=role,
        name=f"{role}-{n}",
        node="here",
        argv=(sys.executable, "-c", code),
        restart=Restart.NEVER if role == "trainer" else restart,
    )


def life_of(processes: list[ProcessSpec], *, restarts: int = 5, closing_s: float = 5.0, trainer_restarts: int = 0) -> Lifecycle:
    rules = RestartRules(worker_restarts=restarts, trainer_restarts=trainer_restarts, steps=1, save_s=480.0, closing_s=closing_s)
    return Lifecycle(lambda lost: processes, rules)


def run(processes: list[ProcessSpec], log_dir: Path, **rules: float) -> tuple[RunEnd, list[str]]:
    said: list[str] = []
    with Signals() as signals:
        end = supervise(life_of(processes, **rules), LocalBackend(log_dir, grace_s=1.0), signals, said.append)  # type: ignore[arg-type]
    return end, said


def complete(processes: list[ProcessSpec], log_dir: Path, **rules: float) -> list[str]:
    """The lines that were printed in a run that reached its end."""
    end, said = run(processes, log_dir, **rules)
    assert end == RunEnd(outcome=RunOutcome.DONE)
    return said


def failure(processes: list[ProcessSpec], log_dir: Path, **rules: float) -> str:
    end, _ = run(processes, log_dir, **rules)
    assert end.outcome is RunOutcome.FAILED
    return end.why


def trainer_waiting_for(path: Path) -> ProcessSpec:
    return fake("trainer", f"import os, time\nwhile not os.path.exists({str(path)!r}): time.sleep(0.05)")


def eventually(condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_run_is_complete_when_the_trainer_is_and_the_others_left(tmp_path: Path) -> None:
    started = time.monotonic()
    said = complete([fake("trainer", "print('trained')"), fake("judge", "import time; time.sleep(0.5)")], tmp_path)
    assert said == []
    assert time.monotonic() - started < 4
    assert "trained" in (tmp_path / "trainer-0.log").read_text()


def test_process_that_does_not_leave_is_killed(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    stubborn = fake("judge", f"import os; open({str(pid_file)!r}, 'w').write(str(os.getpid()))\n{DEAF}")
    said = complete([trainer_waiting_for(pid_file), stubborn], tmp_path, closing_s=0.5)
    assert "judge-0 did not leave" in said[0]
    assert not alive(int(pid_file.read_text()))


def test_killed_worker_is_restarted_and_the_run_goes_on(tmp_path: Path) -> None:
    once, twice = tmp_path / "once", tmp_path / "twice"
    worker = fake(
        "rollout",
        f"""
import os, signal
if os.path.exists({str(once)!r}):
    open({str(twice)!r}, "w")
else:
    open({str(once)!r}, "w")
    os.kill(os.getpid(), signal.SIGKILL)
""",
    )
    said = complete([trainer_waiting_for(twice), worker], tmp_path)
    assert len(said) == 1
    assert "rollout-0 was killed by SIGKILL" in said[0]
    assert (tmp_path / "rollout-0.log").read_text().count("--- started") == 2


def test_queue_that_exits_with_zero_is_restarted_but_a_worker_is_not(tmp_path: Path) -> None:
    lives = tmp_path / "lives"
    enough = tmp_path / "enough"
    count = f"""
with open({str(lives)!r}, "a") as file:
    file.write("x")
if len(open({str(lives)!r}).read()) >= 2:
    open({str(enough)!r}, "w")
    import time
    time.sleep(600)
"""
    said = complete([trainer_waiting_for(enough), fake("queue", count, Restart.ALWAYS), fake("judge", "pass")], tmp_path)
    assert [line.split()[0] for line in said] == ["queue-0"]


def test_failed_trainer_ends_everything_with_the_end_of_its_log(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    worker = fake("rollout", f"import os; open({str(pid_file)!r}, 'w').write(str(os.getpid()))\n{FOREVER}")
    trainer = fake(
        "trainer",
        f"import os, time\nwhile not os.path.exists({str(pid_file)!r}): time.sleep(0.05)\nraise ValueError('loss is nan')",
    )
    assert re.match(r"(?s)trainer-0 ended with exit code 1.*loss is nan", failure([trainer, worker], tmp_path))
    assert not alive(int(pid_file.read_text()))


def test_killed_trainer_ends_the_run(tmp_path: Path) -> None:
    why = failure([fake("trainer", "import os; os.kill(os.getpid(), 9)"), fake("judge", FOREVER)], tmp_path)
    assert why.startswith("trainer-0 was killed by SIGKILL")


def test_process_that_cannot_start_is_not_restarted(tmp_path: Path) -> None:
    queue = fake("queue", "import sys; print('broken line 7'); sys.exit(2)", Restart.ALWAYS)
    assert re.match(r"(?s)queue-0 ended with exit code 2.*broken line 7", failure([fake("trainer", FOREVER), queue], tmp_path))
    assert (tmp_path / "queue-0.log").read_text().count("--- started") == 1


def test_process_that_fails_soon_after_each_start_ends_the_run(tmp_path: Path) -> None:
    why = failure([fake("trainer", FOREVER), fake("judge", "raise SystemExit(5)")], tmp_path)
    assert why.startswith("judge-0 ended with exit code 5")
    assert (tmp_path / "judge-0.log").read_text().count("--- started") == 3


def test_restarts_are_bounded(tmp_path: Path) -> None:
    why = failure([fake("trainer", FOREVER), fake("judge", "import os; os.kill(os.getpid(), 9)")], tmp_path, restarts=1)
    assert why.startswith("after 1 restarts (cluster.worker_restarts): judge-0 was killed")


def test_two_trainers_that_exit_at_the_same_moment_are_one_failure(tmp_path: Path) -> None:
    """The second one's end is known to the host when the first one's has it stopped."""
    with LocalBackend(tmp_path) as host:
        for n in (0, 1):
            host.start(fake("trainer", "raise SystemExit(1)", n=n))
        time.sleep(1.5)
        ended = [event for event in host.events() if isinstance(event, Exited)]
        assert [event.name for event in ended] == ["trainer-0", "trainer-1"]
        for event in ended:
            host.stop(event.name)
            host.request_save(event.name)


def test_daemon_that_a_process_left_behind_is_killed(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    daemon = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {DEAF!r}], start_new_session=True)
open({str(pid_file)!r}, "w").write(str(child.pid))
"""
    complete([trainer_waiting_for(pid_file), fake("judge", daemon)], tmp_path)
    assert not alive(int(pid_file.read_text()))


LAUNCHER = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_local import DEAF, FOREVER, fake
from launch.processes.local import LocalBackend
from launch.placement.placement import ProcessSpec
from launch.processes.supervise import Signals, supervise
from rollout.guard import guarded
from test_local import life_of
with Signals() as signals:
    end = supervise(life_of({processes}), LocalBackend(Path({log_dir!r}), grace_s={grace_s}), signals, print)
sys.exit({{"interrupted": 130, "saved": 75}}[end.outcome])
"""


START_S = 120.0  # far more than needed: the import of torch takes long on a busy machine


def start_launcher(log_dir: Path, processes: str, count: int, grace_s: float = 6.0) -> tuple[subprocess.Popen[bytes], list[int]]:
    """A supervisor in a process of its own, and the pids of what it runs, once all of that runs."""
    text = LAUNCHER.format(tests=str(Path(__file__).parent), processes=processes, log_dir=str(log_dir), grace_s=grace_s)
    launcher = subprocess.Popen([sys.executable, "-c", text])
    me = psutil.Process(launcher.pid)

    def running() -> list[int]:
        return [child.pid for child in me.children(recursive=True) if guarded([])[-1] not in child.cmdline()[1:4]]

    if not eventually(lambda: len(running()) >= count, timeout_s=START_S):
        launcher.kill()
        raise AssertionError(f"only {running()} came up")
    time.sleep(0.5)  # until the stand-ins have installed their signal handlers
    return launcher, running()


def test_interrupt_ends_within_ten_seconds_even_processes_that_ignore_signals(tmp_path: Path) -> None:
    launcher, pids = start_launcher(tmp_path, "[fake('trainer', DEAF), fake('judge', FOREVER)]", count=2, grace_s=2.0)
    started = time.monotonic()
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(timeout=10) == 130
    assert time.monotonic() - started > 1.9  # the process that ignores signals had its time
    assert GRACE_S + 3 < 10
    assert not any(alive(pid) for pid in pids)


def test_second_interrupt_ends_everything_at_once(tmp_path: Path) -> None:
    launcher, pids = start_launcher(tmp_path, "[fake('trainer', DEAF), fake('judge', DEAF)]", count=2, grace_s=60.0)
    launcher.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(timeout=2) == 130
    assert not any(alive(pid) for pid in pids)


def test_killed_launcher_leaves_nothing_behind(tmp_path: Path) -> None:
    launcher, pids = start_launcher(tmp_path, "[fake('trainer', DEAF), fake('judge', DEAF)]", count=2)
    launcher.kill()
    launcher.wait()
    assert eventually(lambda: not any(alive(pid) for pid in pids))


TORCHRUN = """
[ProcessSpec(role="trainer", name="trainer-0", node="here", argv=(
    sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1",
    "--master-port", "{port}", "--no-python", "--", *guarded([sys.executable, "-c", {code!r}])))]
"""


SAVES = """
import pathlib, signal, sys, time
path = pathlib.Path(sys.argv[1])
while signal.SIGUSR1 not in signal.sigpending():
    time.sleep(0.05)
path.write_text("saved")
"""


def test_request_to_save_reaches_every_process_of_the_trainer_and_kills_none(tmp_path: Path) -> None:
    """A parent that knows nothing of the signal, as torchrun, and a child that waits for it."""
    saved = tmp_path / "saved"
    parent = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {SAVES!r}, {str(saved)!r}]))"
    launcher, pids = start_launcher(tmp_path, f"[fake('trainer', {parent!r}), fake('judge', FOREVER)]", count=3)
    launcher.send_signal(signal.SIGUSR1)
    assert launcher.wait(timeout=10) == 75
    assert saved.read_text() == "saved"
    assert not any(alive(pid) for pid in pids)


def test_failed_trainer_restarts_if_allowed_and_the_others_keep_running(tmp_path: Path) -> None:
    lives = tmp_path / "lives"
    trainer = f"""
with open({str(lives)!r}, "a") as file:
    file.write("x")
if len(open({str(lives)!r}).read()) < 2:
    raise SystemExit(3)
"""
    said = complete([fake("trainer", trainer), fake("judge", "import time; time.sleep(3)")], tmp_path, trainer_restarts=1)
    assert "starts again after trainer-0 ended with exit code 3" in said[0]
    assert (tmp_path / "judge-0.log").read_text().count("--- started") == 1


@pytest.mark.slow
def test_killed_launcher_leaves_no_torchrun_workers_behind(tmp_path: Path) -> None:
    processes = TORCHRUN.format(port=21987, code=DEAF)
    launcher, pids = start_launcher(tmp_path, processes, count=3)
    launcher.kill()
    launcher.wait()
    assert eventually(lambda: not any(alive(pid) for pid in pids))


@pytest.mark.slow
def test_failed_torchrun_worker_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    code = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit('the reason')\ntime.sleep(60)"
    argv = (
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1",
        "--master-port", "21988", "--no-python", "--", *guarded([sys.executable, "-c", code]),
    )  # fmt: skip
    process = ProcessSpec(role="trainer", name="trainer-0", node="here", argv=argv)
    message = failure([process], tmp_path)
    assert "trainer-0 (worker 1) ended with exit code 1" in message
    assert message.rstrip().endswith("the reason")
