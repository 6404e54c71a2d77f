"""What a run reads: sources of every kind, strictly where the rows are its own."""

import importlib.util
import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from conf.schema import DataConfig, RunConfig
from reward.readers.run_problems import run_problems
from rollout.prompts.problems import ProblemError

TASK = {"kind": "calls", "entry_point": "f", "tests": [{"args": [1], "expected": 1}]}


def write(path: Path, *rows: object) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def read_problems(sources, reader=None, **data):
    """What the run trains on."""
    config = RunConfig(data=DataConfig(train=sources, **data))
    return [problem for _, problem in run_problems(config, reader)]


def problem(**changed: object) -> dict:
    return {"id": "p", "prompt": "add two numbers", "task": TASK} | changed


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"id": "p", "prompt"', "broken JSON at column"),
        ([1, 2], "a problem is a JSON object, got list"),
        (problem(id=5), "`id` must be a string"),
        (problem(messages=[]), "problem 'p': a problem has either `prompt` or `messages`"),
        (problem(prompt=""), "problem 'p': `prompt` must be a string that is not empty"),
        (problem(task=None), "problem 'p': `task` must be an object with a `kind`"),
        (problem(task=[]), "problem 'p': `task` must be an object with a `kind`, or a list of such objects"),
        (problem(task=[{"kind": "calls"}, {}]), "problem 'p': `task` must be an object with a `kind`, or a list of such objects"),
        (problem(prefill=1), "problem 'p': `prefill` must be a string"),
        (problem(raw="yes"), "problem 'p': `raw` must be true or false"),
        (problem(metadata=[]), "problem 'p': `metadata` must be an object"),
    ],
)
def test_broken_problem_is_refused_with_file_and_line(tmp_path, row, message):
    file = write(tmp_path / "a.jsonl", problem(id="fine"), "", row)
    with pytest.raises(ProblemError, match=rf"a.jsonl:3: {message}"):
        read_problems([file])


def line(**changed: str) -> str:
    """A problem as JSON, some of its fields given as JSON."""
    fields = {name: json.dumps(value) for name, value in problem().items()} | changed
    return "{" + ", ".join(f'"{name}": {value}' for name, value in fields.items()) + "}"


def task_of(test: str) -> str:
    return '{"kind": "calls", "entry_point": "f", "tests": [' + test + "]}"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (line(prompt=r'"half \ud83d"'), r"`prompt` holds '\\ud83d'"),
        (line(task=task_of(r'{"input": "\ud83d"}')), r"`task.tests\[0\].input` holds '\\ud83d'"),
        (line(task=task_of(r'{"\ud83d": 1}')), r"`task.tests\[0\]` holds '\\ud83d'"),
        (line(task=task_of("1" * 4301)), "an integer has more than 4300 digits"),
        (line(task=task_of('{"a": ' * 150 + "1" + "}" * 150)), r"`task.tests\[0\].a.a.* is nested too deep"),
        (line(metadata="[" * 100_000), "lists and objects are nested too deep"),
    ],
    ids=["prompt", "input", "key", "integer", "deep", "deeper"],
)
def test_problem_that_no_run_can_carry_is_refused_with_file_line_and_problem(tmp_path, row, message):
    file = write(tmp_path / "a.jsonl", problem(id="fine"), row)
    with pytest.raises(ProblemError, match=f"a.jsonl:2: problem .p.: {message}"):
        read_problems([file])


def test_users_own_reader_gives_the_rows():
    def rows(source):
        yield problem(
            id=f"{source}-1",
            task={"kind": "calls", "entry_point": "f", "tests": ({"args": (np.int64(3),), "expected": np.float32(0.5)},)},
        )

    (found,) = read_problems(["any thing"], rows)
    assert (found.where, found.id) == ("any thing row 1", "any thing-1")
    assert found.task["tests"] == [{"args": [3], "expected": 0.5}]


def test_error_of_the_users_reader_is_told_with_its_place_and_not_raised():
    def rows(source):
        yield problem()
        raise KeyError("question")

    with pytest.raises(ProblemError, match=r"data.reader failed at x after 1 rows: .*.py:\d+: KeyError: 'question'"):
        read_problems(["x"], rows)


@pytest.mark.parametrize("value", [{1, 2}, object(), b"x", {3: 4}, 10**5000, [[float]]], ids="abcdef")
def test_row_of_a_reader_with_what_json_does_not_have_is_refused_by_its_name(value):
    with pytest.raises(ProblemError, match=r"x row 1: problem 'p': `metadata.a"):
        read_problems(["x"], lambda _: [problem(metadata={"a": value})])


def test_data_set_of_the_hub_is_read_as_its_address_says(monkeypatch):
    asked = []

    def load_dataset(path, **options):
        asked.append((path, options))
        return [problem(id=path, task=json.dumps(TASK), prefill=None)]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    found = read_problems(["hf://name?split=train", "hf://org/Name?name=main&split=test[:9%]", "hf://plain"])
    assert asked == [
        ("name", {"split": "train"}),
        ("org/Name", {"name": "main", "split": "test[:9%]"}),
        ("plain", {"split": "train"}),
    ]
    assert [p.task for p in found] == [TASK, TASK, TASK]


def test_id_that_is_used_twice_is_refused_with_both_places(tmp_path):
    first, second = write(tmp_path / "a.jsonl", problem()), write(tmp_path / "b.jsonl", problem())
    with pytest.raises(ProblemError, match=r"b.jsonl:1: id 'p' was used before, at .*a.jsonl:1"):
        read_problems([first, second])


def test_file_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(ProblemError, match="No such file"):
        read_problems([str(tmp_path / "none.jsonl")])


@pytest.mark.skipif(importlib.util.find_spec("datasets") is not None, reason="`datasets` is installed")
def test_dataset_without_the_package_says_what_to_install():
    with pytest.raises(ProblemError, match="pip install datasets"):
        read_problems(["hf://some/name?split=train"])
