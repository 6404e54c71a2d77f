"""Test code as people write it, with pytest, unittest and the library: honest code passes, what knows no answer fails."""

import pytest

from reward.grade import grade
from reward.sandbox.sandbox import Sandbox
from reward.task import parse_task


def passes(sandbox: Sandbox, tests: str, code: str, entry_point: str = "f") -> bool:
    task = parse_task({"kind": "asserts", "tests": [tests], "entry_point": entry_point})
    return grade(task, f"```python\n{code}\n```", sandbox=sandbox).reward == 1.0


@pytest.mark.parametrize(
    ("expected", "code"),
    [
        ("FileExistsError", "raise FileExistsError('x')"),
        ("ConnectionError", "raise ConnectionResetError('x')"),
        ("UnicodeDecodeError", "b'\\xff'.decode()"),
        ("json.JSONDecodeError", "json.loads('{')"),
        ("decimal.InvalidOperation", "decimal.Decimal('x')"),
        ("dataclasses.FrozenInstanceError", "dataclasses.make_dataclass('A', ['x'], frozen=True)(1).x = 2"),
        ("queue.Empty", "queue.Queue().get_nowait()"),
        ("ValueError", "json.loads('{')"),
    ],
)
def test_an_exception_of_python_or_of_its_library_is_the_one_that_the_tests_expect(
    sandbox: Sandbox, expected: str, code: str
) -> None:
    imports = "import dataclasses, decimal, json, queue\n"
    tests = f"import pytest\n{imports}def test_f():\n    with pytest.raises({expected}):\n        f()"
    assert passes(sandbox, tests, f"{imports}def f():\n    {code}")
    assert not passes(sandbox, tests, "def f():\n    raise NotImplementedError")


def test_a_candidate_cannot_skip_a_test(sandbox: Sandbox) -> None:
    tests = "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): pass\n    def test_b(self): assert f() == 2"
    assert not passes(sandbox, tests, "import unittest\ndef f(): raise unittest.SkipTest('x')")
    assert not passes(sandbox, tests, "import unittest\nclass E(unittest.SkipTest): pass\ndef f(): raise E")


def test_marks_of_pytest_leave_a_test_as_it_is(sandbox: Sandbox) -> None:
    tests = (
        "import pytest\n@pytest.mark.asyncio\nasync def test_a():\n    assert await f(1) == 2\n"
        "@pytest.mark.slow\n@pytest.mark.timeout(5)\n@pytest.mark.parametrize('a, b', [pytest.param(1, 2, id='x'), (2, 3)])\n"
        "async def test_b(a, b):\n    assert await f(a) == b"
    )
    assert passes(sandbox, tests, "async def f(x): return x + 1")
    assert not passes(sandbox, tests, "async def f(x): return 2")


def test_tests_may_look_at_an_argument_after_a_call_that_returns_a_value(sandbox: Sandbox) -> None:
    tests = "def check(candidate):\n    nums = [3, 2, 2, 3]\n    k = candidate(nums, 3)\n    assert k == 2 and nums[:k] == [2, 2]"
    assert passes(sandbox, tests, "def f(nums, v):\n    nums[:] = [n for n in nums if n != v]\n    return len(nums)")
    assert not passes(sandbox, tests, "def f(nums, v):\n    return 2")


def test_a_literal_somewhere_in_the_tests_lets_no_candidate_empty_their_arguments(sandbox: Sandbox) -> None:
    tests = (
        "def check(candidate):\n    got = candidate([])\n    assert isinstance(got, list)\n    assert got == []\n"
        "    xs = [3, 1]\n    assert candidate(xs) == sorted(xs)"
    )
    assert passes(sandbox, tests, "def f(xs): return sorted(xs)")
    assert not passes(sandbox, tests, "def f(xs):\n    xs.clear()\n    return []")
