"""The kind `repair`: a failure of a public test is sent back, and hidden tests decide."""

from dataclasses import replace
from typing import Any

import pytest

from reward.grade import step
from reward.kinds.kind import Answer, Episode, Reply
from reward.sandbox.sandbox import Sandbox
from reward.task import TaskError, read_reward
from rollout.ledger.records import Finish, Verdict
from tests.reward.graded import OneSandbox

TASK: dict[str, Any] = {
    "kind": "repair",
    "public": {"kind": "calls", "entry_point": "f", "tests": [{"args": [2], "expected": 4}]},
    "hidden": {"kind": "calls", "entry_point": "f", "tests": [{"args": [-3], "expected": 9}]},
}
FIRST = Episode(key="0/0/0", last=False)


def said(code: str, sandbox: Sandbox, episode: Episode = FIRST, **answer: Any) -> Verdict | Reply:
    completion = f"```python\ndef f(x):\n    return {code}\n```"
    return step(read_reward(TASK), Answer(completion=completion, episode=episode, **answer), OneSandbox(sandbox))


def test_failure_of_a_public_test_is_sent_back(sandbox: Sandbox) -> None:
    found = said("x", sandbox)
    assert isinstance(found, Reply)
    assert found.messages[0]["role"] == "user"
    assert "returned 2, expected 4" in found.messages[0]["content"]
    assert found.parts == {"repairs": 1.0}


@pytest.mark.parametrize(("code", "reward"), [("x * x", 1.0), ("x + x", 0.0), ("4", 0.0)])
def test_hidden_tests_decide_once_the_public_ones_pass(sandbox: Sandbox, code: str, reward: float) -> None:
    found = said(code, sandbox)
    assert isinstance(found, Verdict)
    assert found.reward == reward


def test_hidden_tests_decide_the_last_turn(sandbox: Sandbox) -> None:
    found = said("x", sandbox, replace(FIRST, last=True))
    assert isinstance(found, Verdict)
    assert "test 0" in found.reason


def test_turn_that_reached_the_cap_is_not_graded(sandbox: Sandbox) -> None:
    found = said("x * x", sandbox, replace(FIRST, last=True), finish=Finish.LENGTH)
    assert isinstance(found, Verdict)
    assert found.reason == "the completion reached its cap"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"public": {"kind": "math", "answer": "1"}}, "task.public: must be a task of one of the kinds calls, stdio, asserts"),
        ({"hidden": {"kind": "calls", "entry_point": "f", "tests": []}}, "task.hidden.tests: must be a list"),
        ({"hints": 3}, "task.hints: no such field"),
    ],
)
def test_task_that_cannot_be_read_says_where(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        read_reward(TASK | changed)
