"""The small kinds: `format`, `length` and `overlong`."""

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward.grade import grade
from reward.kinds.kind import Answer
from reward.task import Defaults, TaskError, read_reward
from rollout.ledger.records import Finish, Verdict
from tests.reward.test_parts import NoResources

TOKENS = st.integers(0, 40_000)


def verdict(task: dict[str, Any], completion: str = "x", *, tokens: int | None = 5, finish: Finish = Finish.STOP) -> Verdict:
    answer = Answer(completion=completion, tokens=tokens, finish=finish)
    return grade(read_reward(task, defaults=Defaults(max_completion_tokens=100)), answer, NoResources())


@pytest.mark.parametrize(
    ("pattern", "of", "completion", "reward"),
    [
        (r"\d+", "answer", "42", 1.0),
        (r"\d+", "answer", "It is 42", 0.0),
        (r"\d+", "answer", "<think>\nhm\n</think>42", 1.0),
        (r"\d+", "completion", "<think>\nhm\n</think>42", 0.0),
        (r"<think>.*</think>\s*<answer>.*</answer>", "completion", "<think>\na\nb</think>\n<answer>1</answer>", 1.0),
        (r".*", "answer", "<think>never closed", 0.0),
    ],
)
def test_all_of_the_text_must_have_the_form(pattern: str, of: str, completion: str, reward: float) -> None:
    found = verdict({"kind": "format", "pattern": pattern, "of": of}, completion)
    assert (found.reward, bool(found.reason)) == (reward, not reward)


def test_a_pattern_that_takes_exponential_time_costs_one_verdict() -> None:
    began_s = time.monotonic()
    assert verdict({"kind": "format", "pattern": "(a|a|aa)+b"}, "a" * 60).reward == 0.0
    assert time.monotonic() - began_s < 10


@given(TOKENS)
def test_length_falls_linearly_from_the_target_to_both_limits(tokens: int) -> None:
    reward = verdict({"kind": "length", "target": 300, "most": 600, "least": 100}, tokens=tokens).reward
    if tokens <= 100 or tokens >= 600:
        assert reward == 0.0
    else:
        assert reward == pytest.approx((tokens - 100) / 200 if tokens <= 300 else (600 - tokens) / 300)
    assert verdict({"kind": "length", "target": 300, "most": 600}, tokens=min(tokens, 300)).reward == 1.0


def test_overlong_completions_are_not_punished_twice() -> None:
    with pytest.raises(TaskError, match=r"algo.overlong_buffer_fraction lowers the reward of long completions already"):
        read_reward({"kind": "overlong", "cap": 100, "buffer": 10}, defaults=Defaults(penalises_overlong=True))


@given(TOKENS)
def test_overlong_is_the_soft_punishment_of_dapo(tokens: int) -> None:
    reward = verdict({"kind": "overlong", "cap": 20480, "buffer": 4096}, tokens=tokens).reward
    if tokens <= 16384:
        assert reward == 0.0
    elif tokens <= 20480:
        assert reward == pytest.approx((16384 - tokens) / 4096)
    else:
        assert reward == -1.0


def test_overlong_takes_its_cap_from_the_run_and_sees_truncated_completions() -> None:
    found = verdict({"kind": "overlong", "buffer": 50}, tokens=100, finish=Finish.LENGTH)
    assert (found.reward, found.parts["truncated"]) == (-1.0, 1.0)


def test_a_length_that_is_not_known_is_said_to_be_missing() -> None:
    with pytest.raises(TaskError, match="the number of tokens of this completion is not known"):
        verdict({"kind": "length", "target": 3, "most": 6}, tokens=None)


@pytest.mark.parametrize(
    ("task", "told"),
    [
        ({"kind": "format"}, "task.pattern: must be a string"),
        ({"kind": "format", "pattern": "("}, r"task.pattern: '\(' is no regular expression"),
        ({"kind": "format", "pattern": "a", "of": "prompt"}, "task.of: 'prompt' is not known"),
        ({"kind": "length", "most": 6}, "task.target: must be a whole number of at least 1, got None"),
        ({"kind": "length", "target": 6, "most": 6}, "task.most: 6 must be more than target, which is 6"),
        ({"kind": "length", "target": 6, "most": 9, "least": 6}, "task.least: 6 must be less than target, which is 6"),
        ({"kind": "overlong", "buffer": 0}, "task.buffer: must be a whole number of at least 1, got 0"),
        ({"kind": "overlong", "buffer": 101}, "task.buffer: 101 is more than cap, which is 100"),
        ({"kind": "overlong", "buffer": 1, "limit": 3}, "task.limit: no such field in a 'overlong' task"),
    ],
)
def test_a_task_that_makes_no_sense_is_refused_with_its_place(task: dict[str, Any], told: str) -> None:
    with pytest.raises(TaskError, match=told):
        verdict(task)
