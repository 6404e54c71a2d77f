"""The command that grades a file."""

import json
from pathlib import Path
from typing import Any

import pytest

from reward.check.__main__ import CANNOT_READ, main
from reward.jail.limits import SandboxUnavailable
from reward.sandbox.sandbox import Sandbox

SQUARE = {"kind": "calls", "entry_point": "f", "tests": [{"args": [x], "expected": x * x} for x in (1, 5)]}
PROBLEM: dict[str, Any] = {
    "id": "p",
    "prompt": "Square.",
    "prefill": "def f(x):\n",
    "task": SQUARE,
    "solution": "def f(x):\n    return x * x\n",
}


def write(path: Path, *lines: Any) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


MATH = {"id": "m", "prompt": "1 + 1?", "task": {"kind": "math", "answer": "2"}, "solution": "It is \\boxed{2}."}


def test_solution_of_a_math_row_is_an_answer_and_needs_no_sandbox(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Sandbox) -> Sandbox:
        raise SandboxUnavailable("this host has no sandbox")

    monkeypatch.setattr(Sandbox, "__enter__", refuse)
    of_a_set = {"problem": "2 + 2?", "solution": "Adding gives $\\boxed{4}$.", "level": "Level 1", "type": "Algebra"}
    assert main([write(tmp_path / "own.jsonl", MATH)]) == main([write(tmp_path / "math.jsonl", of_a_set)]) == 0
    assert main([write(tmp_path / "wrong.jsonl", {**MATH, "solution": "It is 3."})]) == 1
    assert "wrong.jsonl:1 (m):" in capsys.readouterr().err
    assert main([write(tmp_path / "code.jsonl", PROBLEM)]) == CANNOT_READ
    assert "this host has no sandbox" in capsys.readouterr().err


def test_problems_whose_solutions_pass_are_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = {**PROBLEM, "id": "q", "prefill": "```python\ndef f(x):\n"}
    assert main([write(tmp_path / "p.jsonl", PROBLEM, whole), "--slots", "2"]) == 0
    assert "2 (100.0%)" in capsys.readouterr().out


def test_a_solution_that_fails_is_named_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([write(tmp_path / "p.jsonl", PROBLEM, {**PROBLEM, "id": "bad", "solution": "def f(x):\n    return x\n"})]) == 1
    assert "p.jsonl:2 (bad): test 1: returned 5, expected 25" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (PROBLEM, "p.jsonl:2: id 'p' was used before, at"),
        ({**PROBLEM, "id": 3}, "p.jsonl:2: `id` must be a string"),
        ({k: v for k, v in PROBLEM.items() if k != "prompt"} | {"id": "a"}, "p.jsonl:2: problem 'a': a problem has either"),
        ({**PROBLEM, "id": "a", "prompt": "\ud83d"}, "p.jsonl:2: problem 'a': `prompt` holds '\\\\ud83d', one half"),
        (
            {**PROBLEM, "id": "a", "task": {**SQUARE, "kind": "magic"}},
            "p.jsonl:2: problem 'a' cannot be graded: task.kind: 'magic'",
        ),
    ],
)
def test_a_line_that_no_run_can_use_is_refused_and_the_others_are_graded(
    line: dict[str, Any], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([write(tmp_path / "p.jsonl", PROBLEM, line)]) == 1
    captured = capsys.readouterr()
    assert reason.replace("\\\\", "\\") in captured.err
    assert "1 (100.0%)" in captured.out


def test_completions_are_graded_by_their_problems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problems = write(tmp_path / "p.jsonl", PROBLEM)
    answers = [{"id": "p", "completion": text} for text in ("    return x * x", "    return 3", "")]
    assert main([problems, "--solutions", write(tmp_path / "c.jsonl", *answers)]) == 1
    assert "1 (33.3%)" in capsys.readouterr().out


def test_a_problem_without_tests_is_refused_and_the_others_are_graded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "p.jsonl", PROBLEM, {**PROBLEM, "id": "none", "task": {**SQUARE, "tests": []}})
    assert main([path]) == 1
    captured = capsys.readouterr()
    assert "at least one test" in captured.err
    assert "1 (100.0%)" in captured.out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "p.jsonl:1: broken JSON"),
        ("[]", "holds no problems"),
        ("\n" + '{"id": "a", "task": ' + "9" * 5000 + "}", 'p.jsonl:2: problem "a": an integer has more than 4300 digits'),
        ('{"a": ' + "[" * 100_000, "p.jsonl:1: lists and objects are nested too deep"),
        ("", "holds no problems"),
        ('{"q": "?", "level": 1}', "p.jsonl:1: the columns q, level are those of no known format. Known are: rows with a task"),
        (json.dumps({k: v for k, v in PROBLEM.items() if k != "solution"}), "no problem holds a `solution`"),
    ],
)
def test_a_broken_file_is_told_where(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, message: str) -> None:
    (tmp_path / "p.jsonl").write_text(content)
    assert main([str(tmp_path / "p.jsonl")]) == CANNOT_READ
    assert message in capsys.readouterr().err


def test_a_completion_that_fails_is_named_by_its_line_and_its_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problems = write(tmp_path / "p.jsonl", PROBLEM, {**PROBLEM, "id": "other"})
    answers = write(
        tmp_path / "c.jsonl", {"id": "p", "completion": "    return x * x"}, {"id": "other", "completion": "    return 3"}
    )
    assert main([problems, "--solutions", answers]) == 1
    assert "c.jsonl:2 (other): test 0: returned 3, expected 1" in capsys.readouterr().err


def test_nothing_that_controls_a_terminal_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "\x1b[2J"
    shouts = {**PROBLEM, "id": name, "solution": "def f(x): raise ValueError('\\x1b[2J\\x07')"}
    assert main([write(tmp_path / "p.jsonl", shouts, {**PROBLEM, "task": {"kind": name}})]) == 1
    captured = capsys.readouterr()
    assert "x1b[2J" in captured.err and "\x1b[2J" not in captured.out + captured.err and "\x07" not in captured.err
