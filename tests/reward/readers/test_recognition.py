"""Rows are recognised by their columns, in the public shape of each set; what nobody knows is refused with what to do."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from reward.readers.draft import Options
from reward.readers.reading import Gradable, Reading
from rollout.prompts.problems import Problem, ProblemError

GSM8K = {
    "question": "Weng earns $12 an hour. She worked 50 minutes. How much did she earn?",
    "answer": "She earns 12/60 = $<<12/60=0.2>>0.2 per minute.\nShe earned 0.2 x 50 = $<<0.2*50=10>>10.\n#### 10",
}
MATH = {
    "problem": "What is $\\frac{3}{4} - \\frac{1}{4}$?",
    "level": "Level 1",
    "type": "Algebra",
    "solution": "It is $\\frac{3-1}{4} = \\boxed{\\frac{1}{2}}$.",
}
MATH_500 = {
    "problem": "Convert $(0,3)$ to polar coordinates.",
    "solution": "We have $r = 3$ and so \\[\\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}.\\]",
    "answer": "\\left( 3, \\frac{\\pi}{2} \\right)",
    "subject": "Precalculus",
    "level": 2,
    "unique_id": "test/precalculus/807.json",
}
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 6 x 7?"}]
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": 'What is 6 x 7? Output the final answer after "####".'}],
    "ability": "math",
    "reward_model": {"ground_truth": "42", "style": "rule"},
    "extra_info": {"split": "train", "index": 0, "answer": "6 x 7 = 42\n#### 42", "question": "What is 6 x 7?"},
}
PAIRS = json.dumps({"inputs": ["3\n"], "outputs": ["6\n"]})

KNOWN: list[tuple[str, dict[str, Any], Any, dict[str, Any]]] = [
    # its name, a row, the answer or the kind of its task, the metadata
    ("GSM8K", GSM8K, "10", {}),
    ("MATH", MATH, "\\frac{1}{2}", {"level": "Level 1", "type": "Algebra"}),
    ("MATH", MATH_500, MATH_500["answer"], {"subject": "Precalculus", "level": 2, "unique_id": "test/precalculus/807.json"}),
    ("TRL", {"prompt": MESSAGES, "solution": "$\\boxed{42}$"}, "42", {}),
    ("TRL", {"prompt": "What is 6 x 7?", "ground_truth": 42, "source": "x"}, "42", {"source": "x"}),
    ("prime-rl", {"prompt": MESSAGES, "answer": "42", "info": {"level": 3}, "task": "times"}, "42", {"task": "times"}),
    ("prime-rl", {"question": "What is 6 x 7?", "answer": "42"}, "42", {}),
    ("verl", VERL, "42", {name: VERL[name] for name in ("data_source", "ability", "extra_info")}),
    ("verl", VERL | {"data_source": "codeforces", "reward_model": {"ground_truth": PAIRS}}, "stdio", {}),
    ("verl", VERL | {"data_source": "my/own", "ability": "MATH"}, "42", {}),
    ("PRIME", {"problem_id": "p", "prompt": "6 x 7?", "verification_info": '{"ground_truth": "42"}'}, "42", {}),
    ("APPS", {"problem_id": 0, "question": "Double.", "input_output": PAIRS, "level": 1}, "stdio", {"level": 1}),
    ("MBPP", {"task_id": 2, "text": "Add.", "code": "def f(x):\n    return x", "test_list": ["assert f(1) == 1"]}, "asserts", {}),
    ("rows with a task", {"prompt": "6 x 7?", "task": {"kind": "math", "answer": 42}, "level": 1}, 42, {"level": 1}),
]  # fmt: skip


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(source: str, **options: Any) -> tuple[Reading, list[Gradable]]:
    reading = Reading(source=source, options=Options(**options))
    return reading, list(reading.problems({}))


def problem_in(row: dict[str, Any], folder: Path, **options: Any) -> Problem:
    [found] = read(write(folder / "a.jsonl", row), **options)[1]
    return found.problem


@pytest.mark.parametrize(("name", "row", "graded_by", "metadata"), KNOWN)
def test_a_row_is_recognised_by_its_columns(
    name: str, row: dict[str, Any], graded_by: Any, metadata: dict[str, Any], tmp_path: Path
) -> None:
    reading, [found] = read(write(tmp_path / "a.jsonl", row))
    assert name in str(reading) and "1 problem recognised as" in str(reading)
    task = found.problem.task
    assert graded_by in (task.get("answer"), task["kind"])
    assert metadata.items() <= found.problem.metadata.items()


def test_a_prompt_stays_as_it_is_and_a_question_is_told_how_to_answer(tmp_path: Path) -> None:
    assert problem_in({"prompt": MESSAGES, "answer": "42"}, tmp_path).messages == MESSAGES
    assert problem_in({"prompt": "6 x 7?", "answer": "42"}, tmp_path).text == "6 x 7?"
    assert problem_in(GSM8K, tmp_path).text.startswith(GSM8K["question"])
    assert "\\boxed{}" in problem_in(GSM8K, tmp_path).text


def test_the_same_rows_are_read_from_every_kind_of_file(tmp_path: Path) -> None:
    rows = [VERL, VERL | {"reward_model": {"ground_truth": "43", "style": "rule"}}]
    table = pyarrow.Table.from_pylist(rows)
    write(tmp_path / "a.jsonl", *rows)
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=2))
    parquet.write_table(table, tmp_path / "a.parquet")
    save_as_datasets_does(table, tmp_path / "saved")
    found = {name: read(str(tmp_path / name))[1] for name in ("a.jsonl", "a.json", "a.parquet", "saved")}
    for problems in found.values():
        assert [one.problem.task["answer"] for one in problems] == ["42", "43"]
        assert [one.problem.metadata for one in problems] == [one.problem.metadata for one in found["a.jsonl"]]


def save_as_datasets_does(table: pyarrow.Table, folder: Path) -> None:
    folder.mkdir()
    with pyarrow.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as stream:
        stream.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    (folder / "dataset_info.json").write_text("{}")


def test_each_file_of_a_folder_may_have_a_format_of_its_own(tmp_path: Path) -> None:
    for name, row in (("a.jsonl", GSM8K), ("b.jsonl", MATH)):
        write(tmp_path / name, row)
    (tmp_path / "README.md").write_text("About it.")
    reading, problems = read(str(tmp_path))
    assert len(problems) == 2 and "GSM8K" in str(reading) and "MATH" in str(reading)
    assert [one.problem.id for one in problems] == [f"{tmp_path}/a.jsonl:1", f"{tmp_path}/b.jsonl:1"]


def test_a_pattern_names_the_files_of_one_split(tmp_path: Path) -> None:
    for name in ("train-0.jsonl", "train-1.jsonl", "test-0.jsonl"):
        write(tmp_path / name, GSM8K)
    assert len(read(f"{tmp_path}/train-*.jsonl")[1]) == 2
    with pytest.raises(ProblemError, match=r"holds files of several splits \(test, train\); name those of one: .*/train\*"):
        read(str(tmp_path))
    with pytest.raises(ProblemError, match=r"no file matches .*dev-\*"):
        read(f"{tmp_path}/dev-*.jsonl")


def test_a_folder_without_files_names_the_folders_inside(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with pytest.raises(ProblemError, match=r"holds no .jsonl, .json, .parquet file; name one of its folders: .*/data"):
        read(str(tmp_path))
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ProblemError, match=r"holds several splits; name one: .*/data"):
        read(str(tmp_path))


def test_columns_that_nobody_knows_are_named_with_what_is_understood(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match=r"a.jsonl:1: the columns text, label are those of no known format.*GSM8K.*data.task"):
        read(write(tmp_path / "a.jsonl", {"text": "?", "label": 1}))


REFUSED: list[tuple[dict[str, Any], str]] = [
    (VERL | {"data_source": "my/own", "ability": "chat"}, "no grader is known for data_source 'my/own'; set data.task"),
    (VERL | {"reward_model": {"style": "model"}}, "`reward_model` has no `ground_truth`"),
    (VERL | {"images": [{"path": "a.png"}]}, "images and videos are not supported"),
    (GSM8K | {"answer": "It depends.\nWho knows?"}, "nothing marks the answer in `answer`"),
    ({"prompt": [*MESSAGES, {"role": "assistant", "content": "42"}], "answer": "42"}, "ends with an answer of the assistant"),
    ({"prompt": [{"role": "user", "content": [{"type": "image"}]}], "answer": "42"}, "neither text nor a list of messages"),
]


@pytest.mark.parametrize(("row", "reason"), REFUSED)
def test_a_row_that_cannot_be_used_is_refused_and_counted(row: dict[str, Any], reason: str, tmp_path: Path) -> None:
    good = VERL if "reward_model" in row else {name: "42" for name in row}
    reading, problems = read(write(tmp_path / "a.jsonl", good, row, row))
    assert len(problems) == 1
    assert "2 rows refused (2: " in str(reading) and reason in str(reading) and "the first at" in str(reading)


def test_rows_without_a_task_get_that_of_the_settings(tmp_path: Path) -> None:
    task = [{"kind": "math", "answer": "{final}"}, {"kind": "math", "name": "again", "answer": "{final}", "weight": 0.5}]
    row = {"question": "What is 6 x 7?", "answer": "no number", "final": 42}
    found = problem_in(row, tmp_path, task=task)
    assert found.task == {"parts": [task[0] | {"answer": 42}, task[1] | {"answer": 42}]}
    assert found.text == row["question"] and found.metadata == {"answer": "no number", "final": 42}
    own = {"id": "a", "prompt": "?", "task": {"kind": "math", "answer": 1}}
    assert problem_in(own, tmp_path, task=task).task == own["task"]
    reading, _ = read(write(tmp_path / "b.jsonl", {"question": "?"}), task=task)
    assert "1: no `final`, which data.task asks for" in str(reading)


def test_what_no_message_can_carry_stays_out_of_the_metadata(tmp_path: Path) -> None:
    from datetime import date

    row = {"question": "?", "answer": "1", "day": date(2026, 1, 2), "image": {"bytes": b"\x00", "path": ""}, "raw_bytes": b"\x00"}
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
    [found] = read(str(tmp_path / "a.parquet"))[1]
    assert found.problem.metadata == {"day": "2026-01-02"}


def test_a_large_file_is_read_as_a_stream(tmp_path: Path) -> None:
    """The first rows come without the last line, which is broken."""
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(GSM8K) + "\n" + json.dumps(GSM8K) + "\n{")
    reading = Reading(source=str(file), most_rows=1)
    assert len(list(reading.problems({}))) == 1
    with pytest.raises(ProblemError, match=r"a.jsonl:3: broken JSON"):
        read(str(file))
