"""All of HumanEval, in every mode: each reference solution passes, no empty body does."""

from collections.abc import Callable
from typing import Any

import pytest

from reward.readers.draft import Draft, Options, RowRefused
from reward.readers.files import rows_of_file
from reward.readers.humaneval import installed_humaneval, read_humaneval
from reward.sandbox.sandbox import Sandbox
from reward.task import parse_task
from tests.reward.graded import grade

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def drafts(*, as_asserts: bool) -> list[Draft]:
    found = []
    for _, row in rows_of_file(installed_humaneval()):
        try:
            found.append(read_humaneval(row, Options(prefill=True, as_asserts=as_asserts)))
        except RowRefused:
            assert not as_asserts
    return found


def passed(found: list[Draft], completion: Callable[[Draft], str], sandbox: Sandbox, **fields: Any) -> list[str]:
    tasks = [(draft, parse_task({**draft.tasks[0], **fields})) for draft in found]
    return [draft.id for draft, task in tasks if grade(task, completion(draft), sandbox=sandbox).reward == 1.0]


def solution(draft: Draft) -> str:
    return f"```python\n{draft.solutions[0]}\n```"


def nothing(draft: Draft) -> str:
    return f"{draft.prefill}\n    return None\n```"


def test_every_solution_passes_its_own_test_code(sandbox: Sandbox) -> None:
    found = drafts(as_asserts=True)
    assert len(found) == 164
    assert len(passed(found, solution, sandbox)) == 164
    assert passed(found, nothing, sandbox) == []


def test_every_solution_passes_in_two_jails(sandbox: Sandbox) -> None:
    """A test that is no plain comparison sends the whole problem there."""
    found = drafts(as_asserts=True)
    assert len(passed([_with_loop(draft) for draft in found], solution, sandbox)) == 164
    assert passed([_with_loop(draft) for draft in found], nothing, sandbox) == []


def test_every_solution_passes_its_calls(sandbox: Sandbox) -> None:
    found = drafts(as_asserts=False)
    assert len(found) > 150
    assert len(passed(found, solution, sandbox)) == len(found)
    assert passed(found, nothing, sandbox) == []


def _with_loop(draft: Draft) -> Draft:
    [test] = draft.tasks[0]["tests"]
    task = {**draft.tasks[0], "tests": [test + "\n\nfor _ in range(1):\n    pass\n"]}
    return Draft(id=draft.id, messages=draft.messages, tasks=[task], solutions=draft.solutions, prefill=draft.prefill)
