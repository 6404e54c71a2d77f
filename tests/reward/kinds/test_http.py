"""Rewards by a service of one's own: what it is asked, and what its answer becomes."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward.grade import grade
from reward.grading.services import Services
from reward.kinds.endpoint import ContractError
from reward.kinds.http import read_score
from reward.kinds.kind import Answer
from reward.task import TaskError, read_reward
from rollout.ledger.records import Finish, Verdict
from tests.ports import free_port
from tests.reward.graded import OnlyServices
from tests.reward.http_server import scores, serving

EXAMPLE = Path(__file__).resolve().parents[3] / "docs" / "examples" / "score_server.py"


@pytest.fixture
def lent() -> Iterator[OnlyServices]:
    services = Services()
    yield OnlyServices(services)
    services.close()


def graded(lent: OnlyServices, url: str, **answer: Any) -> Verdict:
    return grade(read_reward({"kind": "http", "url": url, "data": {"expected": 42}}), Answer(**answer), lent)


def test_service_gets_the_whole_answer_and_its_parts_stand_in_the_verdict(lent: OnlyServices) -> None:
    with serving(scores(lambda item: {"reward": 0.5, "parts": {"style": 0.25}, "reason": "dull"})) as server:
        verdict = graded(
            lent, server.url, completion="<think>hm</think>forty-two", prompt="6 x 7?", metadata={"level": 3}, tokens=9
        )
        assert server.requests[0]["items"] == [
            {
                "prompt": "6 x 7?", "completion": "<think>hm</think>forty-two", "answer": "forty-two", "metadata": {"level": 3},
                "finish": "stop", "tokens": 9, "data": {"expected": 42},
            }
        ]  # fmt: skip
    assert (verdict.reward, verdict.reason) == (0.5, "dull")
    assert verdict.parts == {"http": 0.5, "truncated": 0.0, "failed": 0.0, "style": 0.25}


def test_truncated_completion_is_the_service_s_to_grade(lent: OnlyServices) -> None:
    with serving(scores(lambda item: -1.0 if item["finish"] == "length" else 1.0)) as server:
        assert graded(lent, server.url, completion="and so", finish=Finish.LENGTH).reward == -1.0


def test_answers_that_are_no_score_cost_one_verdict_and_name_the_service(lent: OnlyServices) -> None:
    with serving(scores(lambda item: {"reward": "high"})) as server:
        verdict = graded(lent, server.url, completion="x")
    assert verdict.reward == 0.0
    assert verdict.parts["failed"] == 1.0
    assert server.url in verdict.reason and "it returned 'high' as the reward, which must be a finite number" in verdict.reason


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["reward", "parts", "reason", "x"]), inner),
    max_leaves=8,
)


@given(answer=JSON)
def test_any_answer_is_a_verdict_or_a_bad_answer(answer: Any) -> None:
    try:
        verdict = read_score(json.loads(json.dumps(answer)))
    except ContractError:
        return
    assert abs(verdict.reward) < float("inf")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "task.url: None must be a URL"),
        ({"url": "ftp://x"}, "task.url: 'ftp://x' must be a URL"),
        ({"url": "http://me:pw@x/"}, "task.url: it holds a password"),
        ({"url": "http://x", "batch": 0}, "task.batch: must be a whole number of at least 1"),
        ({"url": "http://x", "batch": 5000}, "task.batch: must be at most 1024, got 5000"),
        ({"url": "http://x", "timeout_s": 0}, "task.timeout_s: must be a number of seconds"),
        ({"url": "http://x", "token_env": "NOT_SET_ANYWHERE"}, "NOT_SET_ANYWHERE is not set here: export it"),
        ({"url": "http://x", "retries": 3}, "task.retries: no such field"),
    ],
)
def test_wrong_field_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(TaskError, match=said):
        read_reward({"kind": "http", **fields})


def test_example_server_of_the_page_grades(lent: OnlyServices) -> None:
    port = free_port()
    with subprocess.Popen([sys.executable, str(EXAMPLE), str(port)]) as server:
        try:
            verdict = graded(lent, f"http://127.0.0.1:{port}/", completion="it is 42")
        finally:
            server.terminate()
    assert verdict.parts["found"] == 1.0
    assert 0.9 < verdict.reward < 1.0
