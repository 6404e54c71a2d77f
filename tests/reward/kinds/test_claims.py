"""Assertions that are read instead of run mean what Python means by them."""
# ruff: noqa: E501

from typing import Any

import pytest

from reward.kinds.asserts import AssertsTask
from reward.kinds.claims import NotAClaim, read_claims
from reward.sandbox.sandbox import Sandbox
from reward.task import TaskError, parse_task
from tests.reward.graded import grade


def task(*tests: str, **fields: Any) -> AssertsTask:
    found = parse_task({"kind": "asserts", "entry_point": "f", "tests": list(tests), "cpu_limit_s": 2, **fields})
    assert isinstance(found, AssertsTask)
    return found


@pytest.mark.parametrize(
    "test",
    [
        "assert f(3) == 9",
        "assert f(1) == 2, 'a message'\nassert not f(2)\nassert f(x=3) is None",
        "METADATA = {'author': 'x'}\n\ndef check(candidate):\n    '''A docstring.'''\n    assert abs(candidate(2) - 0.5) < 1e-6\n    assert candidate([])",
    ],
)
def test_plain_comparisons_need_no_jail_of_their_own(test: str) -> None:
    assert task(test).called == "f"


@pytest.mark.parametrize(
    "test",
    [
        "assert f(3) == f(4)",
        "assert sorted(f(3)) == [1]",
        "x = 3\nassert f(x) == 9",
        "for i in range(3):\n    assert f(i) == i",
        "assert f(3) == 9 or True",
        "assert f(3).x == 9",
        "import math\nassert f(3) == 9",
        "try:\n    f(1)\nexcept ValueError:\n    pass\nassert f(3) == 9",
        "assert f(3) != 9",
        "assert f(3) > 9",
        "assert f(f(3)) == 9",
        "assert f(3) == 9\nassert g(3) == 9",
        "def test_f():\n    assert f(3) == 9",
        "def check(candidate, other):\n    assert candidate(3) == 9",
        "assert f(3) == {**{}}",
        "assert len(f) == 3",
        "assert f(lambda x: x) == 3",
    ],
)
def test_anything_else_runs_in_one(test: str) -> None:
    assert task(test).called == ""


def test_a_helper_of_the_setup_is_not_taken_for_the_candidates() -> None:
    assert task("assert helper(3) == 9", setup="def helper(x): return 9").called == ""
    assert task("assert helper(3) == 9").called == ""
    assert task("assert helper(3) == 9", entry_point="").called == "helper"
    with pytest.raises(TaskError, match="defines all that it tests"):
        task("assert helper(3) == 9", entry_point="", setup="from x import helper")


def test_code_that_is_not_python_holds_no_claims() -> None:
    for code in ("assert (", "\0", "assert f(1) == " + "(" * 500 + ")" * 500, ""):
        with pytest.raises(NotAClaim):
            read_claims(code)


@pytest.mark.parametrize(
    ("code", "test"),
    [
        ("import re\ndef f(x): return re.match('a', x)", "assert f('abc')"),
        ("class A:\n    def __bool__(self): return False\ndef f(x): return A()", "assert not f(1)"),
        ("from fractions import Fraction\ndef f(x): return Fraction(1, 2)", "assert f(1) == 0.5"),
        ("def f(x): return bytearray(b'a')", "assert f(1) == b'a'"),
        ("from collections import Counter\ndef f(x): return Counter(x)", "assert f('aab') == {'a': 2, 'b': 1}"),
        ("def f(x): return True", "assert f(1) == 1"),
        ("def f(x): return 2.0", "assert f(1) == 2"),
    ],
)
def test_results_that_are_no_data_are_judged_by_the_tests_themselves(code: str, test: str, sandbox: Sandbox) -> None:
    assert grade(task(test), f"```python\n{code}\n```", sandbox=sandbox).reason == ""


@pytest.mark.parametrize(
    "code",
    [
        "class A:\n    def __eq__(s, o): return True\ndef f(x): return A()",
        "class A(int):\n    def __eq__(s, o): return True\n    __hash__ = None\ndef f(x): return A(4)",
        "def f(x): return {'__ref__': 1}",
        'import os, struct\ndef f(x):\n    d = b\'{"error":"x","not_data":true}\'\n    os.write(3, struct.pack(\'<I\', len(d)) + d)\n    os._exit(0)',
        "import os, struct\ndef f(x):\n    d = b'{\"ok\":null}'\n    os.write(3, (struct.pack('<I', len(d)) + d) * 100)",
        "import sys\ndef f(x):\n    sys._getframe(1).f_globals['codec'].encode = lambda v, d=0: 9\n    return 1",
    ],
)
def test_faked_results_do_not_pass(code: str, sandbox: Sandbox) -> None:
    result = grade(task("assert f(3) == 9\nassert f(4) == 16"), f"```python\n{code}\n```", sandbox=sandbox)
    assert result.reward == 0.0
    assert result.reason


def test_units_have_partial_credit_and_one_death_costs_one_unit(sandbox: Sandbox) -> None:
    tests = ("assert f(1) == 1\nassert f(1) == 1", "assert f(2) == 2\nassert f(1) == 1", "assert f(3) == 3", "assert f(4) == 5")
    code = "import os\ndef f(x):\n    if x == 2: os._exit(0)\n    return x"
    result = grade(task(*tests, credit="fraction"), f"```python\n{code}\n```", sandbox=sandbox)
    assert result.parts["tests_passed"] == 0.5
