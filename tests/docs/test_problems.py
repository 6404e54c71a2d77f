"""Each problem that `docs/problems.md` shows is one that a run reads and that its own solution solves."""

import json
import re
from pathlib import Path

import pytest

from reward.check.__main__ import main
from reward.task import KINDS

PAGE = Path(__file__).parents[2] / "docs" / "problems.md"
PROBLEMS = [json.loads(found) for found in re.findall(r"^```json\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)]


def test_every_kind_of_task_is_shown() -> None:
    pages = PAGE.read_text() + PAGE.with_name("reward.md").read_text()
    assert set(re.findall(r'"kind": "(\w+)"', pages)) == set(KINDS)


def test_every_problem_that_is_shown_is_passed_by_its_solution(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in PROBLEMS))
    assert main([str(tmp_path / "problems.jsonl"), "--slots", "1"]) == 0, capsys.readouterr().err


def test_a_failure_is_told_as_the_page_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = {**PROBLEMS[0], "solution": "def mean(xs):\n    return 2.0"}
    Path("problems.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in (*PROBLEMS[1:3], wrong)))
    assert main(["problems.jsonl"]) == 1
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("failed")]
    assert line in PAGE.read_text()
