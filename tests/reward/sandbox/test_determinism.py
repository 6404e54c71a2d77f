"""A verdict does not depend on what else the machine does."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from reward.sandbox.sandbox import Sandbox
from reward.task import Task, parse_task
from tests.reward.graded import grade
from tests.reward.programs import CHEATS_CALLS, CHEATS_STDIO, HONEST_CALLS, HONEST_STDIO, HOSTILE

BUSY_LOOPS = 8
LIMITS = {"cpu_limit_s": 1, "memory_limit_mb": 256, "credit": "fraction"}
SUM = parse_task({"kind": "stdio", "tests": [{"input": "3 4\n", "output": "7\n"}], **LIMITS})
SQUARE = parse_task({"kind": "calls", "entry_point": "f", "tests": [{"args": [x], "expected": x * x} for x in (3, -7)], **LIMITS})
CODE = parse_task({"kind": "asserts", "entry_point": "f", "tests": ["x = 3\nassert f(x) == 9", "assert f(-7) == 49"], **LIMITS})
HOSTILE_SHARE = 4  # one in so many
PROGRAMS: list[tuple[str, Task, str]] = [
    *((name, SUM, code) for name, code in {**HONEST_STDIO, **CHEATS_STDIO}.items()),
    *(
        (name, task, code)
        for name, code in {**HONEST_CALLS, **dict(list(CHEATS_CALLS.items())[::2])}.items()
        for task in (SQUARE, CODE)
    ),
    *((name, SUM, code) for name, code in list(HOSTILE.items())[::HOSTILE_SHARE]),
]


@pytest.fixture
def busy_machine() -> Iterator[list[subprocess.Popen[bytes]]]:
    loops: list[subprocess.Popen[bytes]] = []
    yield loops
    for loop in loops:
        loop.kill()
        loop.wait()


def verdicts(sandbox: Sandbox) -> dict[tuple[str, str], tuple[float, int, bool]]:
    found = {}
    for name, task, code in PROGRAMS:
        verdict = grade(task, f"```python\n{code}\n```", sandbox=sandbox)
        found[name, type(task).__name__] = (verdict.reward, verdict.parts["tests_passed"], verdict.parts["timed_out"])
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_verdicts_are_the_same_on_an_idle_and_on_an_overloaded_machine(
    sandbox: Sandbox, busy_machine: list[subprocess.Popen[bytes]]
) -> None:
    idle = verdicts(sandbox)
    busy_machine += [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(BUSY_LOOPS)]
    assert verdicts(sandbox) == idle
    assert {reward for reward, _, _ in idle.values()} == {0.0, 1.0}
