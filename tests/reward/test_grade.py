"""Verdicts: honest code passes, faked passes do not, and nothing a completion does is an exception in the judge."""

from typing import Any

import pytest

from reward.sandbox.sandbox import Sandbox
from reward.task import Task, parse_task
from rollout.ledger.records import Verdict
from tests.reward.graded import grade
from tests.reward.programs import CHEATS_CALLS, CHEATS_STDIO, HONEST_CALLS, HONEST_STDIO

SUM = parse_task({"kind": "stdio", "tests": [{"input": f"{a} {a}\n", "output": f"{a + a}\n"} for a in (3, 50)], "cpu_limit_s": 4})
SQUARE = parse_task({"kind": "calls", "entry_point": "f", "tests": [{"args": [x], "expected": x * x} for x in (3, 0, -7)]})
SQUARE_PLUS_7 = parse_task(
    {"kind": "calls", "entry_point": "f", "tests": [{"args": [x], "expected": x * x + 7} for x in (3, 5)], "cpu_limit_s": 1}
)
CHECKED = parse_task({"kind": "asserts", "entry_point": "f", "tests": ["for x in range(3):\n    assert f(x) == x * x"]})
CLAIMED = parse_task({"kind": "asserts", "entry_point": "f", "tests": ["assert f(3) == 9"]})
SEVEN = parse_task({"kind": "stdio", "tests": [{"input": "3 4\n", "output": "7\n"}], "cpu_limit_s": 0.5})


def fenced(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```\n"


def calls(*tests: tuple[list[Any], Any], **fields: Any) -> Task:
    data = {"kind": "calls", "entry_point": "f", "tests": [{"args": a, "expected": e} for a, e in tests]}
    return parse_task({**data, **fields})


def verdict(task: Task, code: str, sandbox: Sandbox) -> Verdict:
    return grade(task, fenced(code), sandbox=sandbox)


@pytest.mark.parametrize("name", HONEST_STDIO)
def test_odd_but_honest_programs_pass(name: str, sandbox: Sandbox) -> None:
    result = verdict(SUM, HONEST_STDIO[name], sandbox)
    assert (result.reward, result.reason) == (1.0, "")


@pytest.mark.parametrize("name", HONEST_CALLS)
def test_odd_but_honest_functions_pass(name: str, sandbox: Sandbox) -> None:
    result = verdict(SQUARE, HONEST_CALLS[name], sandbox)
    assert (result.reward, result.reason) == (1.0, "")


@pytest.mark.parametrize("name", CHEATS_CALLS)
def test_faked_results_do_not_pass(name: str, sandbox: Sandbox) -> None:
    result = verdict(SQUARE_PLUS_7, CHEATS_CALLS[name], sandbox)
    assert (result.reward, result.parts["tests_passed"]) == (0.0, 0.0)
    assert result.reason


@pytest.mark.parametrize("name", CHEATS_STDIO)
def test_faked_output_does_not_pass(name: str, sandbox: Sandbox) -> None:
    result = verdict(SEVEN, CHEATS_STDIO[name], sandbox)
    assert result.reward == 0.0
    assert result.reason


BAD_COMPLETIONS = (
    "",
    "\0",
    "x" * (1 << 20),
    fenced("x = '" + "y" * (1 << 20) + "'"),
    fenced("x = 1\0"),
    fenced("def f(x):\n\treturn x\n        return x"),
    fenced("def f(x): return f(x)\nprint(f(1))"),
    fenced("x = []\nfor _ in range(10**6): x = [x]\ndef f(n): return x\nprint(x)"),
    fenced("def f(x): return float('nan')\nprint(f(1))"),
    fenced("def f(x): return 10 ** 100000\nprint(f(1))"),
    fenced("def f(x): return {float('nan'): float('inf')}\nprint(f(1))"),
    fenced("import sys\nsys.stdout.buffer.write(bytes(range(256)) * 10)\ndef f(x): return bytes(range(256)).decode('latin-1')"),
    fenced("def f(x): return '\\ud800' * 1000\nprint('\\udcff')"),
    fenced("(" * 10_000),
    fenced("\udc80"),
    fenced("raise ValueError('\\udc80 \\x1b[2J\\x07\\r \\u202e' * 1000)"),
    fenced("def f(x): raise ValueError('\\udc80 \\x1b[2J\\x07\\r \\u202e')\nf(1)"),
    fenced("def f(x): return '\\udc80 \\x1b[2J\\x07\\r \\u202e'\nprint('\\x1b[2J\\x07\\r \\u202e')"),
    "```\x1b[2J\udc80\nls\n```",
    fenced("x = = 1"),
    fenced("\n".join(" " * i + "if 1:" for i in range(200))),
    fenced("# -*- coding: nonsense -*-"),
    fenced("-" * 100_000 + "1"),
    fenced("x = 1" + "0" * 100_000),
)


@pytest.mark.parametrize("completion", BAD_COMPLETIONS)
@pytest.mark.parametrize("task", [SQUARE, SUM, CHECKED, CLAIMED], ids=["calls", "stdio", "asserts", "claims"])
def test_a_bad_completion_is_a_verdict_with_a_reason(task: Task, completion: str, sandbox: Sandbox) -> None:
    result = grade(task, completion, sandbox=sandbox)
    assert result.reward == 0.0
    assert result.reason
    assert result.reason.isprintable() and len(result.reason) <= 500


def test_credit_is_the_share_of_passed_tests_where_asked(sandbox: Sandbox) -> None:
    task = calls(([1], 1), ([2], 99), ([3], 3), ([4], 4), credit="fraction")
    result = verdict(task, "def f(x):\n    return x", sandbox)
    assert result.reward == 0.75
    assert result.parts == {
        "task": 0.75, "truncated": 0.0, "tests_passed": 0.75, "all_passed": 0.0, "timed_out": 0.0, "retries": 0.0,
    }  # fmt: skip


def test_without_partial_credit_one_failed_test_is_enough(sandbox: Sandbox) -> None:
    assert verdict(calls(([1], 1), ([2], 99), ([3], 3)), "def f(x):\n    return x", sandbox).reward == 0.0


def test_a_test_that_kills_the_process_costs_only_itself(sandbox: Sandbox) -> None:
    task = calls(([1], 1), ([2], 2), ([3], 3), credit="fraction")
    code = "import os\ndef f(x):\n    if x == 2:\n        os._exit(0)\n    return x"
    assert verdict(task, code, sandbox).parts["tests_passed"] == 2 / 3


def test_a_test_that_loops_costs_only_itself(sandbox: Sandbox) -> None:
    task = calls(([1], 1), ([2], 2), ([3], 3), credit="fraction", cpu_limit_s=2, test_cpu_limit_s=0.2)
    result = verdict(task, "def f(x):\n    while x == 2:\n        pass\n    return x", sandbox)
    assert (result.parts["tests_passed"], result.parts["timed_out"]) == (2 / 3, 1.0)
    assert "CPU-seconds" in result.reason


def test_the_completion_as_a_whole_has_a_limit(sandbox: Sandbox) -> None:
    task = calls(*(([x], x) for x in range(50)), credit="fraction", cpu_limit_s=0.5, test_cpu_limit_s=0.2)
    result = verdict(task, "def f(x):\n    while True:\n        pass", sandbox)
    assert result.parts["timed_out"]
    assert 0.4 < result.cpu_s < 1.5


def test_sleeping_is_retried_once_and_then_costs_the_job(sandbox: Sandbox) -> None:
    task = calls(([1], 1), cpu_limit_s=0.1)
    result = verdict(task, "import time\ndef f(x):\n    time.sleep(60)\n    return x", sandbox)
    assert (result.reward, result.parts["retries"]) == (0.0, 1)
    assert result.cpu_s < 0.1


def test_types_must_agree_unless_a_tolerance_is_asked_for(sandbox: Sandbox) -> None:
    third = "def f(x):\n    return x / 3"
    assert verdict(calls(([1], 0.333333333)), third, sandbox).reward == 0.0
    assert verdict(calls(([1], 0.333333333), tolerance=1e-6), third, sandbox).reward == 1.0
    assert verdict(calls(([3], 1)), third, sandbox).reward == 0.0


def test_rich_values_go_in_and_come_out(sandbox: Sandbox) -> None:
    value = {
        "__tuple__": [
            {"__set__": [1, 2]},
            {"__dict__": [[1, "a"]]},
            {"__float__": "nan"},
            {"__bytes__": "00ff"},
            {"__int__": hex(7**5000)},
        ]
    }
    assert verdict(calls(([value], value)), "def f(x):\n    assert type(x) is tuple\n    return x", sandbox).reward == 1.0


def test_keyword_arguments_are_passed(sandbox: Sandbox) -> None:
    task = parse_task({"kind": "calls", "entry_point": "f", "tests": [{"args": [2], "kwargs": {"y": 3}, "expected": 8}]})
    assert verdict(task, "def f(x, y=1):\n    return x ** y", sandbox).reward == 1.0


def test_setup_code_runs_before_the_candidate(sandbox: Sandbox) -> None:
    task = calls(([9.0], 3.0), setup="import math\ndef helper(x):\n    return math.sqrt(x)")
    assert verdict(task, "def f(x):\n    return helper(x)", sandbox).reward == 1.0


JSON_CALLS: list[tuple[str, Any, bool]] = [
    ("(1, 2)", [1, 2], True),
    ("[1.0, 2]", [1, 2.0], True),
    ("{1: (2,)}", {"1": [2]}, True),
    ("[True]", [1], False),
    ("{1, 2}", [1, 2], False),
    ("'1'", 1, False),
    ("float('nan')", 1, False),
]


@pytest.mark.parametrize(("returned", "expected", "passes"), JSON_CALLS)
def test_results_may_be_compared_as_json_would_have_them(returned: str, expected: Any, passes: bool, sandbox: Sandbox) -> None:
    result = verdict(calls(([0], expected), match="json"), f"def f(x):\n    return {returned}", sandbox)
    assert result.reward == float(passes)


def test_answers_that_were_given_before_the_job_died_count(sandbox: Sandbox) -> None:
    task = calls(*(([x], "x" * 30_000) for x in range(9)), ([9], 0), credit="fraction")
    code = "import os\ndef f(x):\n    if x == 9: os._exit(0)\n    return 'x' * 30_000"
    assert verdict(task, code, sandbox).parts["tests_passed"] == 0.9


def test_a_prefilled_answer_is_completed(sandbox: Sandbox) -> None:
    assert grade(SQUARE, "    return x * x\n", prefill="def f(x):\n", sandbox=sandbox).reward == 1.0


@pytest.mark.parametrize("rest", ["\n\nThis squares x.", "\n\nprint(f(", "\n```\nDone."])
def test_prose_after_a_prefilled_answer_does_no_harm(rest: str, sandbox: Sandbox) -> None:
    assert grade(SQUARE, "    return x * x" + rest, prefill="def f(x):\n", sandbox=sandbox).reward == 1.0


def test_the_same_completion_gets_the_same_verdict(sandbox: Sandbox) -> None:
    code = "import random\ndef f(x):\n    return random.random() < 0.5 and list({'a', 'b', 'c', str(x)})[0] < 'c'"
    task = calls(*(([x], True) for x in range(20)), credit="fraction")
    assert len({verdict(task, code, sandbox).parts["tests_passed"] for _ in range(5)}) == 1


def test_all_the_sleep_of_a_completion_has_one_limit(sandbox: Sandbox) -> None:
    task = calls(*(([x], x) for x in range(20)), credit="fraction", cpu_limit_s=0.5)
    result = verdict(task, "import time\ndef f(x):\n    time.sleep(0.4)\n    return x", sandbox)
    assert (result.reward, result.parts["all_passed"]) != (1.0, 1.0)
    assert result.wall_s < 5


@pytest.mark.parametrize("kind", ["stdio", "calls"])
def test_a_stack_may_be_larger_than_the_memory_limit_while_it_is_not_used(kind: str, sandbox: Sandbox) -> None:
    code = "import sys, threading\nsys.setrecursionlimit(1 << 25)\nthreading.stack_size(1 << 29)\ndef f(x):\n    found = []\n"
    code += "    def depth(k):\n        return 0 if k == 0 else 1 + depth(k - 1)\n"
    code += "    t = threading.Thread(target=lambda: found.append(depth(x)))\n    t.start()\n    t.join()\n    return found[0]\n"
    if kind == "calls":
        assert verdict(calls(([5000], 5000), memory_limit_mb=256), code, sandbox).reason == ""
    else:
        task = parse_task({"kind": "stdio", "tests": [{"input": "5000", "output": "5000"}], "memory_limit_mb": 256})
        assert verdict(task, code + "print(f(int(input())))", sandbox).reason == ""


@pytest.mark.parametrize(
    "task",
    [
        calls(([3], 9), memory_limit_mb=64),
        parse_task({"kind": "asserts", "entry_point": "f", "tests": ["x = f(3)\nassert x == 9"], "memory_limit_mb": 64}),
        parse_task({"kind": "stdio", "tests": [{"input": "", "output": "9"}], "memory_limit_mb": 64}),
    ],
    ids=["calls", "asserts", "stdio"],
)
def test_memory_beyond_the_limit_costs_the_completion_even_where_it_was_given_back(task: Task, sandbox: Sandbox) -> None:
    code = "def f(x):\n    data = b'x' * ({} << 20)\n    del data\n    return 9\nprint(f(3))"
    assert verdict(task, code.format(32), sandbox).reason == ""
    result = verdict(task, code.format(200), sandbox)
    assert result.reward == 0.0
    assert "memory" in result.reason.lower()


def test_output_may_be_as_long_as_the_expected_one(sandbox: Sandbox) -> None:
    output = "12345678\n" * (1 << 18)
    task = parse_task({"kind": "stdio", "tests": [{"input": "", "output": output}]})
    assert verdict(task, "print('12345678\\n' * (1 << 18))", sandbox).reason == ""
    assert verdict(task, "print('12345678\\n' * (1 << 20))", sandbox).reward == 0.0


def test_a_long_result_may_be_looked_at_by_the_tests(sandbox: Sandbox) -> None:
    task = parse_task({"kind": "asserts", "entry_point": "f", "tests": ["x = f(10 ** 6)\nassert len(x) == 10 ** 6"]})
    assert verdict(task, "def f(n):\n    return [1] * n", sandbox).reason == ""


def test_method_may_be_named_on_an_instance_as_some_problem_sets_do(sandbox: Sandbox) -> None:
    code = "```python\nclass Solution:\n    def double(self, x):\n        return 2 * x\n```"
    for kind in (
        {"kind": "calls", "tests": [{"args": [2], "expected": 4}]},
        {"kind": "asserts", "tests": ["def check(candidate):\n    assert candidate(2) == 4"]},
    ):
        task = parse_task({**kind, "entry_point": "Solution().double"})
        assert grade(task, code, sandbox=sandbox).reward == 1.0
