"""What is shown before the first step: the count of a running evaluation."""

import time
from collections.abc import Mapping
from typing import Any

from launch.report.startup import EvaluationCount
from rollout.queue.client import QueueTimeout


def settled(count: EvaluationCount, wanted: str) -> bool:
    deadline = time.monotonic() + 5
    while (text := count.text()) != wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    return text == wanted


def test_count_follows_the_queue_and_ends_with_the_evaluation() -> None:
    evals: dict[str, dict[str, int]] = {}

    def ask() -> Mapping[str, Any]:
        return {"ledger": {"evals": dict(evals)}}

    count = EvaluationCount(ask)
    assert settled(count, "")
    evals["version-0"] = {"completions": 512, "graded": 120}
    assert settled(count, "evaluation: 120 of 512 completions")
    evals.clear()
    assert settled(count, "")


def test_queue_server_that_does_not_answer_is_no_reason_to_wait_or_to_fail() -> None:
    def ask() -> Mapping[str, Any]:
        time.sleep(0.3)
        raise QueueTimeout("gone")

    count, began_s = EvaluationCount(ask), time.monotonic()
    assert [count.text() for _ in range(100)] == [""] * 100
    assert time.monotonic() - began_s < 0.3
