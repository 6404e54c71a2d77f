"""Every format that people have becomes lines that the grader takes, and what cannot is refused and counted."""

import base64
import gzip
import json
import pickle
import sys
import zlib
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from reward.check.convert import main
from reward.readers.contest_limits import contest_limits
from reward.readers.draft import Options
from reward.readers.files import rows_of_file
from reward.readers.mbpp import read_mbpp
from rollout.prompts.problems import ProblemError

DOUBLE = "print(2 * int(input()))"
TWICE = "def twice(x):\n    return 2 * x\n"
OWN_TASK = {"kind": "stdio", "tests": [{"input": "1", "output": "2"}]}
PAIRS = {"inputs": ["3\n", ["4"]], "outputs": ["6\n", ["8"]]}
CALLS = {"inputs": [[3], [4]], "outputs": [6, 8], "fn_name": "twice"}

MBPP = {
    "task_id": 11,
    "text": "Write a function to double a number.",
    "code": TWICE,
    "test_list": ["assert twice(3) == 6", "assert twice(0.5) == 1"],
    "test_setup_code": "",
    "challenge_test_list": ["assert twice(1) == 3"],
}
SANITIZED = {
    "task_id": 12,
    "prompt": "Double a number.",
    "code": TWICE,
    "source_file": "x",
    "test_imports": ["import math"],
    "test_list": ["assert math.isclose(twice(3), 6)", "assert twice(2) == 4"],
}
PACKED = base64.b64encode(zlib.compress(pickle.dumps(json.dumps([{"input": "5", "output": "10", "testtype": "stdin"}])))).decode()
FUNCTIONAL = {
    "question_id": "f",
    "question_content": "Add.",
    "starter_code": "class Solution:\n    def add(self, a, b):\n        ",
    "public_test_cases": json.dumps([{"input": "1\n[2, 3]", "output": "[3, 4]", "testtype": "functional"}]),
    "metadata": json.dumps({"func_name": "add"}),
}

ROWS: dict[str, list[dict[str, Any]]] = {
    "mbpp": [MBPP, SANITIZED],
    "apps": [
        {
            "problem_id": 1,
            "question": "Double.",
            "input_output": json.dumps(PAIRS),
            "solutions": json.dumps(["print(0)", DOUBLE]),
        },
        {"problem_id": 2, "question": "Double.", "input_output": json.dumps(CALLS), "solutions": json.dumps([TWICE])},
        {
            "problem_id": 3,
            "question": "Wrapped outputs.",
            "input_output": json.dumps({**CALLS, "outputs": [[6], [8]]}),
            "solutions": json.dumps([TWICE]),
        },
        {
            "problem_id": 4,
            "question": "Lists that only look wrapped.",
            "input_output": json.dumps({**CALLS, "outputs": [[6], [8]]}),
            "solutions": json.dumps(["def twice(x):\n    return (2.0 * x,)"]),
        },
    ],
    "taco": [
        {
            "name": "t",
            "question": "Double, as a method.",
            "starter_code": "class Solution:\n    def twice(self, x):",
            "input_output": json.dumps(CALLS),
            "solutions": ["class Solution:\n    def twice(self, x):\n        return 2 * x"],
        }
    ],
    "codecontests": [
        {
            "name": "1_A. Double",
            "description": "Double.",
            "public_tests": {"input": ["1\n"], "output": ["2\n"]},
            "private_tests": {"input": ["2\n"], "output": ["4\n"]},
            "generated_tests": {"input": [], "output": []},
            "solutions": {"language": [2, 3], "solution": ["int main() {}", DOUBLE]},
        }
    ],
    "livecodebench": [
        {
            "question_id": "s",
            "question_content": "Double.",
            "public_test_cases": json.dumps([{"input": "1", "output": "2", "testtype": "stdin"}]),
            "private_test_cases": PACKED,
        },
        FUNCTIONAL,
    ],
    "verifiable": [
        {
            "problem_id": "prime",
            "prompt": "Double.",
            "verification_info": json.dumps(
                {"language": "python", "test_cases": [{"type": "stdin_stdout", "input": "3\n", "output": "6\n"}]}
            ),
            "gold_standard_solution": f"```python\n{DOUBLE}\n```",
        },
        {
            "problem_id": "called",
            "prompt": "Double.",
            "verification_info": repr(
                {
                    "test_cases": [{"type": "function_call", "fn_name": "twice", "input": "[3]", "output": "6"}],
                    "language": "python",
                }
            ),
            "gold_standard_solution": TWICE,
        },
    ],
    "verl": [
        {
            "data_source": "taco",
            "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Double."}],
            "reward_model": {"ground_truth": json.dumps(PAIRS), "style": "rule"},
            "extra_info": {"index": 7, "split": "train"},
        },
    ],
    "eurus": [
        {"id": "asserts", "prompt": "Double.", "ground_truth": ["assert twice(1) == 2"], "solution": TWICE},
    ],
    "lines": [
        {
            "id": "own",
            "prompt": "Double.",
            "task": {"kind": "stdio", "tests": [{"input": "1", "output": "2"}]},
            "solution": DOUBLE,
        }
    ],
}
VERIFIED = {
    "mbpp": 2, "apps": 4, "taco": 1, "codecontests": 1, "livecodebench": 0, "verifiable": 2, "verl": 0, "eurus": 1, "lines": 1,
}  # fmt: skip


def rows(path: Path) -> list[Any]:
    return [row for _, row in rows_of_file(path)]


def write(path: Path, found: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return str(path)


def read(tmp_path: Path, found: list[dict[str, Any]], *options: str) -> list[dict[str, Any]]:
    out = tmp_path / "out.jsonl"
    main([write(tmp_path / "in.jsonl", found), "--out", str(out), "--slots", "1", *options])
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.parametrize("name", ROWS)
def test_each_format_is_read_and_its_solutions_pass(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = read(tmp_path, ROWS[name])
    said = capsys.readouterr().out
    assert f"{len(ROWS[name])} problems ({VERIFIED[name]} with a solution that passes), 0 refused" in said
    for line in lines:
        messages = line.get("messages") or [{"role": "user", "content": line["prompt"]}]
        assert messages[-1]["role"] == "user" and messages[-1]["content"]


def test_a_solution_that_fails_is_tried_before_its_problem_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, *_, looks_wrapped = read(tmp_path, ROWS["apps"])
    assert first["solution"] == DOUBLE  # the second of two
    assert looks_wrapped["task"]["tests"][0]["expected"] == [6]
    wrong = {**ROWS["apps"][1], "solutions": json.dumps(["def twice(x): return x"])}
    assert [line["id"] for line in read(tmp_path, [wrong, ROWS["apps"][0]])] == ["apps-1"]
    assert "no solution of its own passes: apps-2 (test 0: returned 3, expected 6)" in capsys.readouterr().out
    assert len(read(tmp_path, [wrong], "--unverified")) == 1


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({**MBPP, "test_list": []}, "`test_list` is not a list of assertions"),
        ({**MBPP, "test_list": ["assert ("]}, "not Python"),
        ({**MBPP, "test_list": ["assert other(1) == 2"]}, "no test calls a function of the solution"),
        ({"task_id": None, "test_list": ["assert f(1)"]}, "no `task_id`"),
        ({"problem_id": 1, "question": "?", "input_output": None}, "no `input_output`"),
        ({"problem_id": 1, "question": "?", "input_output": "{"}, "not JSON"),
        ({"problem_id": 1, "question": "?", "input_output": '{"inputs": [], "outputs": []}'}, "no tests"),
        ({"problem_id": 1, "question": "?", "input_output": '{"inputs": ["1"], "outputs": []}'}, "not as many"),
        ({"problem_id": 1, "question": "?", "input_output": '{"inputs": [{}], "outputs": ["1"]}'}, "not text"),
        ({"name": "x", "description": "?", "public_tests": {}}, "no tests"),
        ({"question_id": "x", "question_content": "?", "public_test_cases": "!!!"}, "cannot be unpacked"),
        ({**FUNCTIONAL, "metadata": "{}"}, "no name of the function"),
        ({"prompt": "?", "ground_truth": None}, "no answer"),
        ({"prompt": "?", "verification_info": "{oops"}, "neither JSON nor a literal"),
        ({"prompt": "?", "ground_truth": {**PAIRS, "language": "rust"}}, "another language"),
        ({"prompt": None, "ground_truth": PAIRS}, "no `question` or `problem`"),
        ({"id": "x", "prompt": "?", "task": {"kind": "magic"}}, "a task that cannot be graded"),
        ({"id": "x", "prompt": "\ud83d", "task": OWN_TASK}, r"problem 'x': `prompt` holds '\ud83d'"),
        ({"id": "x", "prefill": "\ud83d", "prompt": "?", "task": OWN_TASK}, "one half of a surrogate pair"),
        ({"problem_id": 1, "question": "\udc00", "input_output": PAIRS}, "problem 'apps-1': `messages[0].content` holds"),
        (
            {"problem_id": 1, "question": "?", "input_output": {**PAIRS, "inputs": ["\ud83d", "1"]}},
            "`task.tests[0].input` holds",
        ),
        ({"question": None, "input_output": PAIRS}, "in.jsonl:1"),
    ],
)
def test_a_bad_problem_is_refused_with_its_reason(
    row: dict[str, Any], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert read(tmp_path, [row]) == []
    assert reason in capsys.readouterr().out


@pytest.mark.parametrize(
    ("value", "reason"), [("9" * 5000, "more than 4300 digits"), ("[" * 100_000, "too deep"), ("{", "broken")]
)
def test_a_line_that_python_cannot_read_is_named(value: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps(MBPP) + f'\n{{"x": {value}}}\n')
    with pytest.raises(SystemExit, match=rf"in\.jsonl:2: .*{reason}"):
        main([str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out.jsonl")])


def test_what_is_refused_is_told_without_control_characters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    read(tmp_path, [{"id": "\x1b[2J\x07", "prompt": "?", "task": {"kind": "magic"}}])
    assert all(char.isprintable() or char == "\n" for char in capsys.readouterr().out)


def test_our_own_lines_keep_their_prompt_as_it_is(tmp_path: Path) -> None:
    asked = {"prompt": "\nAdd.\n", "raw": True, "metadata": {"level": 3}, "prefill": "def f("}
    [line] = read(tmp_path, [{"id": "a", **asked, "task": OWN_TASK}])
    assert line == {"id": "a", **asked, "task": OWN_TASK}


def test_a_starter_may_leave_out_the_imports_that_its_site_makes(tmp_path: Path) -> None:
    starter = "class Solution:\n    def largest(self, xs: List[int]) -> Optional[int]:\n        "
    row = {
        "problem_id": 1,
        "question": "?",
        "starter_code": starter,
        "input_output": {"inputs": [[[3, 9]]], "outputs": [9], "fn_name": "largest"},
        "solutions": [f"{starter}return max(chain(Counter(xs), [-inf, int(pow(2, 1, 7))]), default=None)"],
    }
    [line] = read(tmp_path, [row])
    assert "solution" in line
    case = {"input": "[3, 9]", "output": "9", "testtype": "functional"}
    tests = {"public_test_cases": json.dumps([case]), "metadata": json.dumps({"func_name": "largest"})}
    [again] = read(tmp_path, [{"question_id": "x", "question_content": "?", "starter_code": starter, **tests}])
    assert again["task"]["setup"] == line["task"]["setup"]


def test_setup_code_of_tests_may_use_a_class_of_the_solution(tmp_path: Path) -> None:
    code = "class Node:\n    def __init__(self, v):\n        self.v, self.left = v, None\n"
    code += "def depth(t):\n    return 1 + depth(t.left) if t else 0\n"
    setup = "root = Node(1)\nroot.left = Node(2)"
    row = {**MBPP, "code": code, "test_list": ["assert depth(root) == 2"], "test_setup_code": setup}
    [line] = read(tmp_path, [row])
    assert "setup" not in line["task"]
    assert "root.left = Node(2)\nassert depth(root) == 2" in line["messages"][0]["content"]
    [line] = read(tmp_path, [{**MBPP, "test_list": ["assert twice(n) == 6"], "test_setup_code": "n = 3"}])
    assert line["task"]["setup"] == "n = 3\n"


@pytest.mark.parametrize("margin", ["", "  ", "    "])
def test_a_solution_may_hold_fences_wherever_it_likes(margin: str, tmp_path: Path) -> None:
    text = f"{margin}```\n{margin}twice(1)\n{margin}```\n"
    code = f'"""Doubles.\n{text}"""\ndef twice(x):\n{margin or " "}"""Doubles.\n{text}"""\n{margin or " "}return 2 * x\n'
    assert len(read(tmp_path, [{**MBPP, "code": code}])) == 1


def test_an_id_is_used_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(read(tmp_path, ROWS["lines"] * 2)) == 1
    assert "id 'own' was used before, at" in capsys.readouterr().out


def test_tests_beyond_the_number_asked_for_are_left_out(tmp_path: Path) -> None:
    [line] = read(tmp_path, ROWS["codecontests"], "--at-most", "1")
    assert line["task"]["tests"] == [{"input": "1\n", "output": "2\n"}]


def test_outputs_with_decimals_get_a_tolerance(tmp_path: Path) -> None:
    row = {"problem_id": 1, "question": "?", "input_output": {"inputs": ["1"], "outputs": ["0.50 1"]}}
    [line] = read(tmp_path, [row])
    assert line["task"]["tolerance"] == 1e-6


def test_packed_tests_are_never_unpickled(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "ran",))

    packed = base64.b64encode(zlib.compress(pickle.dumps(Hostile()))).decode()
    assert read(tmp_path, [{"question_id": "x", "question_content": "?", "public_test_cases": packed}]) == []
    assert not (tmp_path / "ran").exists()


def test_rows_are_read_whatever_the_file_is(tmp_path: Path) -> None:
    expected = [{"a": 1}, {"a": 2}]
    contents = {
        "lines.jsonl": '{"a": 1}\n\n{"a": 2}\n',
        "one list.json": json.dumps(expected, indent=1),
        "rows by id.json": json.dumps({"x": expected[0], "y": expected[1]}),
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
        assert rows(tmp_path / name) == expected, name
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content.encode()))
        assert rows(tmp_path / f"{name}.gz") == expected, name


def test_parquet_is_read(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(ROWS["codecontests"]), tmp_path / "p.parquet")
    assert rows(tmp_path / "p.parquet") == ROWS["codecontests"]


def test_parquet_without_pyarrow_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "p.parquet").write_bytes(b"PAR1....PAR1")
    with pytest.raises(ProblemError, match=r"pip install 'kestrel\[parquet\]'"):
        list(rows_of_file(tmp_path / "p.parquet"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{}\n\xff\xfe", ":2: is not UTF-8"),
        (b"[1,\n2", "broken JSON at line 2, column 2"),
        (b'{"a":\n1', ":1: broken JSON"),
        (b'{"a": 1}\n{', ":2: broken JSON"),
        (b"\x1f\x8bxx", "cannot read"),
    ],
)
def test_a_broken_file_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ProblemError, match=message):
        list(rows_of_file(tmp_path / "x"))


def test_mbpp_shows_its_tests_and_keeps_the_imports_of_the_sanitized_form() -> None:
    draft = read_mbpp(SANITIZED, Options())
    assert "assert twice(2) == 4" in draft.messages[0]["content"]
    assert draft.tasks[0]["setup"] == "import math\n"
    assert draft.tasks[0]["entry_point"] == "twice"
    assert read_mbpp({**MBPP, "code": ""}, Options()).tasks[0]["entry_point"] == "twice"


def test_a_prompt_of_messages_stays_as_it_is(tmp_path: Path) -> None:
    [line] = read(tmp_path, ROWS["verl"])
    assert line["id"].endswith("in.jsonl:1") and line["messages"] == ROWS["verl"][0]["prompt"]
    assert line["metadata"] == {"data_source": "taco", "extra_info": {"index": 7, "split": "train"}}


@pytest.mark.parametrize(
    ("row", "limits"),
    [
        ({"time_limit": "2.0 seconds", "memory_limit": "256.0 megabytes"}, {"test_cpu_limit_s": 2.0, "memory_limit_mb": 256}),
        ({"time_limit": {"seconds": 1, "nanos": 500_000_000}, "memory_limit_bytes": 256_000_000},
         {"test_cpu_limit_s": 1.5, "memory_limit_mb": 256}),
        ({"time_limit": 3, "memory_limit": 512.0}, {"test_cpu_limit_s": 3.0, "memory_limit_mb": 512}),
        ({"time_limit": "500 ms", "memory_limit": "1 GB"}, {"test_cpu_limit_s": 0.5, "memory_limit_mb": 1000}),
        ({"time_limit": "0.5 - 2.0 seconds", "memory_limit": "4 megabytes"}, {"test_cpu_limit_s": 2.0, "memory_limit_mb": 64}),
        ({"time_limit": "1 second", "memory_limit": "65536 KB"}, {"test_cpu_limit_s": 1.0, "memory_limit_mb": 66}),
        ({"time_limit": "None", "memory_limit": None}, {}),
        ({"time_limit": 0, "memory_limit_bytes": 0}, {}),
        ({"time_limit": {"seconds": None}, "memory_limit": "a lot"}, {}),
        ({"time_limit": [2], "memory_limit": True}, {}),
    ],
)  # fmt: skip
def test_limits_of_contests_are_read_however_they_are_written(row: dict[str, Any], limits: dict[str, float]) -> None:
    assert contest_limits(row) == limits


SLOW = f"import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\n{DOUBLE}"
SLOWLY_SOLVED: dict[str, dict[str, Any]] = {
    "apps": {**ROWS["apps"][0], "solutions": json.dumps([SLOW])},
    "taco": {"name": "t", "question": "Double.", "input_output": json.dumps(PAIRS), "solutions": [SLOW]},
    "codecontests": {**ROWS["codecontests"][0], "solutions": {"language": [3], "solution": [SLOW]}},
    "verifiable": {**ROWS["verifiable"][0], "gold_standard_solution": f"```python\n{SLOW}\n```"},
}


@pytest.mark.parametrize("name", SLOWLY_SOLVED)
def test_a_solution_that_takes_longer_than_its_contest_allows_is_refused(name: str, tmp_path: Path) -> None:
    row = SLOWLY_SOLVED[name]
    assert read(tmp_path, [{**row, "time_limit": 0.1}]) == []
    assert [line["task"]["test_cpu_limit_s"] for line in read(tmp_path, [{**row, "time_limit": "5 seconds"}])] == [5.0]
