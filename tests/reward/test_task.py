"""What a task may say, and what a wrong one is told."""

from typing import Any

import pytest

from reward.kinds.calls import CallsTask
from reward.kinds.stdio import StdioTask
from reward.task import Defaults, TaskError, parse_task

CALLS = {"kind": "calls", "entry_point": "f", "tests": [{"args": [1], "expected": 1}]}
ASSERTS = {"kind": "asserts", "tests": ["assert f(2) == 4"]}
STDIO = {"kind": "stdio", "tests": [{"input": "1", "output": "1"}]}


def test_defaults_apply_where_the_task_is_silent() -> None:
    task = parse_task(CALLS, defaults=Defaults(cpu_limit_s=3, memory_limit_mb=99, credit="fraction"))
    assert isinstance(task, CallsTask)
    assert (task.cpu_limit_s, task.test_cpu_limit_s, task.memory_limit_mb, task.credit) == (3, 3, 99, "fraction")


def test_tagged_values_are_decoded() -> None:
    task = parse_task({**CALLS, "tests": [{"expected": {"__tuple__": [1, {"__set__": [2]}]}}]})
    assert isinstance(task, CallsTask)
    assert task.tests[0].expected == (1, {2})


def test_a_stdio_task_is_read() -> None:
    task = parse_task({**STDIO, "tolerance": 1e-6})
    assert isinstance(task, StdioTask)
    assert (task.tests[0].output, task.tolerance) == ("1", 1e-6)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "must be an object"),
        ({}, "kind: None"),
        ({**CALLS, "kind": "magic"}, "'magic' is not known: use one of"),
        ({**CALLS, "kind": ["calls"]}, "is not known"),
        ({**CALLS, "entrypoint": "f"}, "entrypoint: no such field"),
        ({**STDIO, "entry_point": "f"}, "entry_point: no such field"),
        ({**CALLS, "tests": []}, "at least one test"),
        ({**CALLS, "tests": {}}, "must be a list"),
        ({**CALLS, "tests": [3]}, r"tests\[0\]: must be an object"),
        ({**CALLS, "tests": [{"args": []}]}, r"tests\[0\].expected: is missing"),
        ({**CALLS, "tests": [{"args": 1, "expected": 1}]}, r"tests\[0\].args: must be a list"),
        ({**CALLS, "tests": [{"kwargs": [], "expected": 1}]}, "kwargs: must be an object"),
        ({**CALLS, "tests": [{"expected": 1, "want": 1}]}, "want: no such field"),
        ({**CALLS, "tests": [{"expected": {"__set__": [[1]]}}]}, "expected: bad __set__"),
        ({**CALLS, "tests": [{"args": [{"__bytes__": "x"}], "expected": 1}]}, "args: bad __bytes__"),
        ({**STDIO, "tests": [{"input": "1"}]}, "output: is missing"),
        ({**STDIO, "tests": [{"input": 1, "output": "1"}]}, "input: must be a string"),
        ({**CALLS, "entry_point": "f()"}, "must name a function"),
        ({**CALLS, "entry_point": None}, "must name a function"),
        ({**CALLS, "cpu_limit_s": 0}, "cpu_limit_s: must be a number above 0, got 0"),
        ({**CALLS, "cpu_limit_s": True}, "above 0"),
        ({**CALLS, "memory_limit_mb": 3}, "too little"),
        ({**CALLS, "credit": "half"}, "credit: 'half'"),
        ({**CALLS, "tolerance": "no"}, "tolerance"),
        ({**STDIO, "tests": [{"input": "a\ud83d", "output": "1"}]}, r"tests\[0\].input: holds half of a surrogate pair"),
        ({**STDIO, "tests": [{"input": "1", "output": "\udc00"}]}, r"tests\[0\].output: holds half of a surrogate pair"),
        ({**CALLS, "setup": "x = '\ud83d'"}, "setup: holds half of a surrogate pair"),
        ({**CALLS, "setup": 3}, "setup"),
        ({**CALLS, "setup": "\0"}, "setup"),
        ({**CALLS, "setup": "f = "}, "task.setup: must be Python code"),
        ({**STDIO, "setup": "import"}, "task.setup: must be Python code"),
        ({**CALLS, "entry_point": "f", "setup": "def f(x): return 4"}, "task.setup: it defines f itself"),
        (
            {"kind": "asserts", "tests": ["assert f(2) == 4"], "entry_point": "f", "setup": "def f(x): return 4"},
            "task.setup: it defines f itself",
        ),
        (
            {**CALLS, "entry_point": "f", "setup": "if 1:\n    from g import f\nelse:\n    f = 1"},
            "it defines f itself",
        ),
        (
            {**CALLS, "entry_point": "Solution.f", "setup": "class Solution:\n    def f(self): ..."},
            "it defines Solution.f",
        ),
        ({**CALLS, "match": "loosely"}, "match: 'loosely' is not known"),
        ({**CALLS, "cpu_limit_s": float("nan")}, "above 0"),
        ({**CALLS, "tests": [{"expected": {"__int__": "x"}}]}, "expected: bad __int__"),
        ({"kind": "asserts", "tests": ["\0"]}, "not Python"),
        ({"kind": "asserts", "tests": ["assert " + "(" * 5000 + ")" * 5000]}, "not Python"),
        ({"kind": "asserts", "tests": ["assert f() == " + "[" * 3000 + "]" * 3000]}, "not Python"),
    ],
)
def test_a_wrong_task_is_told_where_and_what(data: Any, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        parse_task(data)
