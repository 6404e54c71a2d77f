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
from tests.reward.grading import grade
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
