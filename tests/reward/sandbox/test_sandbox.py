"""Hostile programs get nothing, and the sandbox outlives them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from reward.jail.limits import Allowance, End, Ending, Limits, SandboxUnavailable
from reward.sandbox.host import Settings
from reward.sandbox.sandbox import Sandbox
from reward.task import parse_task
from rollout.ledger.records import Verdict
from tests.reward.graded import grade
from tests.reward.programs import HOSTILE, SLEEPERS

BREACH = parse_task({"kind": "stdio", "tests": [{"input": "x", "output": "BREACH"}], "cpu_limit_s": 0.5, "memory_limit_mb": 512})
SQUARE = parse_task({"kind": "calls", "entry_point": "f", "tests": [{"args": [3], "expected": 9}]})


def attack(code: str, sandbox: Sandbox) -> Verdict:
    return grade(BREACH, f"```python\n{code}\n```", sandbox=sandbox)


def run(code: str, sandbox: Sandbox, limits: Limits | None = None) -> End:
    limits = limits or Limits()
    job = sandbox.start(limits)
    job.send({"kind": "stdio", "code": code, "setup": "", "trim": False})
    return job.wait_end(Allowance(cpu_s=limits.cpu_s))


def family(pid: int) -> list[psutil.Process]:
    head = psutil.Process(pid)
    return [head, *head.children(recursive=True)]


def all_gone(processes: list[psutil.Process], timeout_s: float = 10.0) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while any(map(lives, processes)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return not any(map(lives, processes))


def lives(process: psutil.Process) -> bool:
    """A zombie does not: it only waits for whoever inherited it."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("name", HOSTILE)
def test_an_attack_gets_nothing(name: str, sandbox: Sandbox) -> None:
    before = sandbox.zygotes_started
    result = attack(HOSTILE[name], sandbox)
    assert "BREACH" not in result.reason.split(", expected")[0]
    assert (result.reward, result.parts["retries"]) == (0.0, 0), result.reason
    assert sandbox.zygotes_started == before
    assert grade(SQUARE, "```\ndef f(x): return x * x\n```", sandbox=sandbox).reward == 1.0


@pytest.mark.parametrize("name", ["sleep", "stops itself"])
def test_a_sleeper_is_ended(name: str, sandbox: Sandbox) -> None:
    end = run(SLEEPERS[name], sandbox, Limits(cpu_s=0.1))
    assert end.ending is Ending.ASLEEP
    assert end.cpu_s < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", SLEEPERS)
def test_every_sleeper_scores_nothing(name: str, sandbox: Sandbox) -> None:
    result = attack(SLEEPERS[name], sandbox)
    assert (result.reward, result.parts["retries"]) == (0.0, 1)


def test_secrets_in_the_judges_environment_stay_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KESTREL_KEY", "SECRET")
    with Sandbox() as fresh:
        assert attack(HOSTILE["environment"], fresh).reason.startswith('test 0: printed ""')
        assert attack(HOSTILE["environment in memory"], fresh).reward == 0.0


def test_no_process_or_file_descriptor_is_left() -> None:
    with Sandbox() as fresh:
        run("pass", fresh)
        open_files = len(os.listdir("/proc/self/fd"))
        assert fresh._process is not None
        resting = len(family(fresh._process.pid))
        for code in (
            "pass",
            "while True: pass",
            "import os\nos._exit(1)",
            "print('x' * 10**7)",
            "import ctypes\nctypes.string_at(0)",
        ):
            run(code, fresh, Limits(cpu_s=0.1))
        assert len(os.listdir("/proc/self/fd")) == open_files
        members = family(fresh._process.pid)
        assert len(members) == resting
    assert all_gone(members)


def test_a_job_sees_nothing_of_the_one_before(sandbox: Sandbox) -> None:
    run("open('/tmp/left', 'w').write('x')\nimport math\nmath.pi = 3", sandbox)
    assert run("import os, math\nprint(os.listdir('/tmp'), math.pi > 3.1)", sandbox).output == b"[] True\n"


def test_a_killed_zygote_is_started_again() -> None:
    with Sandbox() as fresh:
        assert run("print(1)", fresh).output == b"1\n"
        process = fresh._process
        assert process is not None
        members = family(process.pid)[1:]
        os.kill(process.pid, signal.SIGKILL)
        assert all_gone(members)
        assert grade(SQUARE, "```\ndef f(x): return x * x\n```", sandbox=fresh).reward == 1.0
        assert fresh.zygotes_started == 2


def test_the_jail_dies_with_its_judge() -> None:
    script = (
        "from reward.jail.limits import Allowance, Limits\nfrom reward.sandbox.sandbox import Sandbox\n"
        "s = Sandbox().__enter__()\n"
        "print('up', flush=True)\ns.start(Limits()).wait_end(Allowance(cpu_s=60))"
    )
    judge = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert judge.stdout is not None
    assert judge.stdout.readline() == b"up\n"
    deadline_s = time.monotonic() + 10
    while len(members := family(judge.pid)) < 4 and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert len(members) == 4  # judge, launcher, zygote, job
    judge.kill()
    judge.wait()
    judge.stdout.close()
    assert all_gone(members)


def test_the_memory_limit_is_the_jobs_own(sandbox: Sandbox) -> None:
    code = "x = bytearray(200 << 20)\nprint('fits')"
    assert run(code, sandbox, Limits(memory_bytes=300 << 20)).output == b"fits\n"
    assert run(code, sandbox, Limits(memory_bytes=100 << 20)).output == b""


def test_output_beyond_what_is_kept_ends_the_job(sandbox: Sandbox) -> None:
    end = run("while True: print('x' * 1000)", sandbox)
    assert end.ending is Ending.FLOOD
    assert len(end.output) == 1 << 20


FILLS_THE_CHANNEL = "import os\nos.write(3, b'\\2\\0\\0\\0{}')\nwhile True: os.write(3, bytes(1 << 20))"


def test_what_nobody_reads_from_a_job_ends_it(sandbox: Sandbox) -> None:
    assert run(FILLS_THE_CHANNEL, sandbox).ending is Ending.FLOOD
    task = parse_task({"kind": "asserts", "entry_point": "f", "tests": ["y = f(2)\nassert y == 4"]})
    code = "def f(x):\n    " + FILLS_THE_CHANNEL.replace("\n", "\n    ")
    assert grade(task, f"```\n{code}\n```", sandbox=sandbox).reason == "test 0: wrote more than the test asks for"


def test_a_job_learns_nothing_from_the_flags_of_its_open_files(sandbox: Sandbox) -> None:
    code = "import fcntl\nfor fd in 0, 1, 2, 3:\n    print(f := fcntl.fcntl(fd, 3))\n    fcntl.fcntl(fd, 4, f | 0o6000)"
    assert run(code, sandbox).output == run(code, sandbox).output


def test_no_device_gives_memory_that_stays_in_use_unseen(sandbox: Sandbox) -> None:
    lines = ("import mmap", "print(open('/dev/zero'))", "mmap.mmap(-1, 4096)")
    for line in lines[1:]:
        assert run(f"import mmap\n{line}\nprint('BREACH')", sandbox).output == b""
    assert run("import mmap\nprint(len(mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE)))", sandbox).output == b"4096\n"


def test_time_that_the_judge_takes_for_itself_is_no_sleep_of_the_job(sandbox: Sandbox) -> None:
    job = sandbox.start(Limits())
    call = {"args": [1], "kwargs": {}}
    job.send({"kind": "calls", "code": "def f(x): return x", "setup": "", "trim": False, "entry_point": "f", "calls": 2})
    for expected in (b'{"ok":null}', b'{"ok":1}', b'{"ok":1}'):
        assert job.wait_frame(Allowance(cpu_s=1, asleep_s=0.5)) == expected
        time.sleep(0.6)
        job.send(call)
    job.stop()


def test_units_of_tests_cannot_sleep_for_longer_than_one_completion_may(sandbox: Sandbox) -> None:
    code = "import os, time\ndef f(x):\n    time.sleep(1.2)\n    os._exit(0)"
    units = [f"y = f({index})\nassert y == 4" for index in range(9)]
    task = parse_task({"kind": "asserts", "entry_point": "f", "credit": "fraction", "cpu_limit_s": 0.2, "tests": units})
    verdict = grade(task, f"```\n{code}\n```", sandbox=sandbox)
    assert verdict.parts["timed_out"] == 1.0
    assert verdict.wall_s < 9 * 1.2


def test_jobs_run_side_by_side_in_one_sandbox(sandbox: Sandbox) -> None:
    first, second = sandbox.start(Limits()), sandbox.start(Limits())
    for job, word in ((first, "one"), (second, "two")):
        job.send({"kind": "stdio", "code": f"print('{word}')", "setup": "", "trim": False})
    assert second.wait_end(Allowance(cpu_s=5)).output == b"two\n"
    assert first.wait_end(Allowance(cpu_s=5)).output == b"one\n"


def test_offered_packages_can_be_imported_and_others_cannot() -> None:
    with Sandbox(Settings(packages=("numpy",))) as fresh:
        assert run("import numpy as np\nprint(np.arange(4).sum(), (np.eye(3) @ np.eye(3)).trace())", fresh).output == b"6 3.0\n"
        assert run("import pytest\nprint(1)", fresh).output == b""


def test_tests_compare_arrays_by_their_contents() -> None:
    tests = ["import numpy as np\nassert np.allclose(f(3), [0, 1, 4])\nassert f(3).sum() == 5 and f(2).shape == (2,)"]
    task = parse_task({"kind": "asserts", "entry_point": "f", "tests": tests})
    with Sandbox(Settings(packages=("numpy",))) as fresh:
        assert grade(task, "```\nimport numpy as np\ndef f(n): return np.arange(n) ** 2\n```", sandbox=fresh).reason == ""
        assert grade(task, "```\nimport numpy as np\ndef f(n): return np.arange(n)\n```", sandbox=fresh).reward == 0.0
        lie = "class A(np.ndarray):\n    def __array__(s, *a, **k): return np.array([0, 1, 4])\n    def sum(s): return 5"
        code = f"import numpy as np\n{lie}\ndef f(n): return np.zeros(n).view(A)"
        assert grade(task, f"```\n{code}\n```", sandbox=fresh).reward == 0.0


def test_what_is_offered_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "single.py").write_text("answer = 1\n")
    tmp_path.chmod(0o755)
    monkeypatch.syspath_prepend(tmp_path)
    with Sandbox(Settings(packages=("single",))) as fresh:
        code = "import single\nprint(single.answer)\nopen(single.__file__, 'w').write('answer = 2')\nprint('BREACH')"
        assert run(code, fresh).output == b"1\n"
    assert (tmp_path / "single.py").read_text() == "answer = 1\n"


def test_a_package_that_is_not_installed_is_refused() -> None:
    with pytest.raises(SandboxUnavailable, match="nonesuch"), Sandbox(Settings(packages=("nonesuch",))):
        pass


def test_host_that_lacks_something_for_a_while_is_told_from_one_that_forbids_jails() -> None:
    program = Path(__file__).with_name("exhausted.py")
    command = ["unshare", "--user", "--map-root-user", sys.executable, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["7", "exhausted", "7", "exhausted", "7"], done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(os.geteuid() != 0, reason="this already runs as an ordinary user")
def test_all_of_this_holds_for_an_ordinary_user(tmp_path: Path) -> None:
    helper = Path(__file__).with_name("as_ordinary_user.py")
    tests = str(Path(__file__).parents[1])
    pytest_call = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", tests]
    tmp_path.chmod(0o777)
    done = subprocess.run(
        [sys.executable, str(helper), *pytest_call, "--ignore-glob=*test_generated*", "--ignore-glob=*readers*"],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "HOME": "/tmp", "HYPOTHESIS_STORAGE_DIRECTORY": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 0, done.stdout[-3000:]
