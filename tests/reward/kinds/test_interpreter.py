"""The kind `interpreter`: code runs in the sandbox and its output is sent back; another kind grades the answer."""

import json
from typing import Any

import pytest

from reward.grade import step
from reward.kinds.kind import Answer, Episode, Reply
from reward.sandbox.sandbox import Sandbox
from reward.task import TaskError, read_reward
from rollout.ledger.records import Verdict
from tests.reward.graded import OneSandbox

TASK: dict[str, Any] = {"kind": "interpreter", "answer": {"kind": "math", "answer": "57"}, "cpu_limit_s": 2}


def call(code: str, name: str = "python") -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': {'code': code}})}</tool_call>"


def say(text: str, sandbox: Sandbox, *earlier: str, last: bool = False) -> Verdict | Reply:
    episode = Episode(key="0/0/0", turns=earlier, last=last)
    return step(read_reward(TASK), Answer(completion=text, episode=episode), OneSandbox(sandbox))


def told(text: str, sandbox: Sandbox, *earlier: str) -> list[str]:
    found = say(text, sandbox, *earlier)
    assert isinstance(found, Reply)
    assert {message["role"] for message in found.messages} == {"tool"}
    return [message["content"] for message in found.messages]


def test_model_reads_what_is_printed_and_the_value_of_a_last_expression(sandbox: Sandbox) -> None:
    assert told(call("print('ab')\n(12+7)*3"), sandbox) == ["ab\n57"]
    assert told(call("x = 1"), sandbox) == ["(nothing was printed)"]
    assert told(call("'\\U0001f600'"), sandbox) == ["'\U0001f600'"]


def test_names_live_on_from_call_to_call_and_what_was_printed_is_not_printed_again(sandbox: Sandbox) -> None:
    earlier = call("print('first')\nx = 40\ndef f(y):\n    return x + y"), call("x += 1\n1 / 0")
    assert told(call("f(1)") + call("x = 0") + call("f(1)"), sandbox, *earlier) == ["42", "(nothing was printed)", "1"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (call("1 / 0"), "ZeroDivisionError"),
        (call("print(1"), "was never closed"),
        (call("'\ud800'.encode()"), "UnicodeEncodeError"),
        (call("while True: pass"), "CPU-seconds"),
        (call("1", name="search"), "there is one tool, python"),
        ("<tool_call>{</tool_call>", "no JSON"),
    ],
)
def test_call_that_fails_is_told_and_counted_as_an_error(sandbox: Sandbox, text: str, said: str) -> None:
    found = say(text, sandbox)
    assert isinstance(found, Reply)
    assert said in found.messages[0]["content"]
    assert found.parts == {"tool_calls": 1.0, "tool_errors": 1.0}


def test_long_output_is_shortened_in_the_middle(sandbox: Sandbox) -> None:
    (said,) = told(call("print('a' * 5000 + 'b')"), sandbox)
    assert len(said) < 4100 and said.endswith("b")


@pytest.mark.parametrize(
    ("text", "last", "reward"), [("\\boxed{57}", False, 1.0), ("\\boxed{5}", False, 0.0), (call("57"), True, 0.0)]
)
def test_turn_without_a_call_is_graded_by_the_other_kind_and_a_last_turn_that_calls_gets_nothing(
    sandbox: Sandbox, text: str, last: bool, reward: float
) -> None:
    found = say(text, sandbox, call("57"), last=last)
    assert isinstance(found, Verdict)
    assert (found.reward, found.parts["tool_calls"]) == (reward, 0.0)


def test_call_within_the_reasoning_is_not_run(sandbox: Sandbox) -> None:
    assert isinstance(say(f"<think>{call('1')}</think>\\boxed{{57}}", sandbox), Verdict)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"answer": {"kind": "interpreter"}}, "task.answer: must be a task of one of the kinds math, calls, stdio, asserts"),
        ({"answer": {"kind": "math"}}, "task.answer.answer: "),
        ({"tools": []}, "task.tools: no such field"),
    ],
)
def test_task_that_cannot_be_read_says_where(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        read_reward(TASK | changed)
