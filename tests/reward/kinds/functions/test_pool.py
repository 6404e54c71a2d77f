"""The pool of users' functions: whatever a function does costs its own call, with a reason, and the pool goes on."""

import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from reward.jail.limits import Cancelled
from reward.kinds.functions.pool import FunctionPool
from reward.kinds.functions.returned import Returned

REWARDS = Path(__file__).with_name("rewards.py")
GIVEN = {
    "prompt": "two", "completion": "one two", "answer": "one two", "prefill": "", "metadata": {"level": 3}, "finish": "stop",
    "tokens": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FunctionPool]:
    run_dir = tmp_path_factory.mktemp("run")
    (run_dir / "user_code").mkdir()
    shutil.copyfile(REWARDS, run_dir / "user_code" / "my_rewards.py")
    found = FunctionPool(run_dir, 1, memory_mb=300)
    yield found
    found.close()


def call(pool: FunctionPool, function: str, deadline_s: float = 20.0, **given: Any) -> Returned:
    return pool.call(f"my_rewards:{function}", {**GIVEN, **given}, deadline_s=deadline_s)


@pytest.mark.parametrize(
    ("function", "reward", "parts"),
    [
        ("brevity", -0.02, {}),
        ("slowly", 1.0, {}),
        ("with_parts", 7.0, {"given": 6.0, "metadata": 3.0}),
        ("as_numpy", 2.0, {}),
        ("forks", 1.0, {}),
        ("forks_and_both_return", 1.0, {}),
        ("runs_a_program", 1.0, {}),
        ("prints_megabytes", 1.0, {}),
        ("leaks", 1.0, {}),
    ],
)
def test_a_function_gets_what_it_names_and_gives_a_reward(pool: FunctionPool, function: str, reward: float, parts: Any) -> None:
    for _ in range(3):
        found = call(pool, function)
        assert (found.error, found.reward, found.parts) == ("", pytest.approx(reward), parts)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("raises", "my_rewards.py:42: ZeroDivisionError: division by zero"),
        ("recurses", "RecursionError"),
        ("exits", "SystemExit: 3"),
        ("returns_text", "returned '0.5' as the reward, which must be a finite number and no bool"),
        ("returns_a_huge_integer", "which must be a finite number"),
        ("returns_nan", "returned nan as the reward"),
        ("returns_a_bool", "returned True as the reward"),
        ("returns_nothing", "returned None as the reward"),
        ("returns_bad_parts", "returned 'good' as the part style"),
        ("returns_three", "returned (1.0, {}, {}) as the reward"),
        ("wants_more", "wants an argument 'solution', but a reward function is given prompt, completion,"),
        ("missing", "has no missing"),
        ("hangs", "did not return within 0.5 s"),
        ("spins", "did not return within 0.5 s"),
        ("ends_its_process", "its process ended with 3"),
        ("uses_memory", "used more than 300 MiB of memory"),
    ],
)
def test_a_function_that_fails_costs_its_own_call_with_a_reason(pool: FunctionPool, function: str, reason: str) -> None:
    deadline_s = 0.5 if "within" in reason else 20.0
    assert reason in call(pool, function, deadline_s).error
    assert call(pool, "brevity").error == ""


def test_calls_that_travel_with_a_failing_one_keep_their_own_results(pool: FunctionPool) -> None:
    texts = ["fine", "exit", "fine", "raise", "fine", "exit", "exit", "fine"] * 3
    with ThreadPoolExecutor(len(texts)) as threads:
        found = list(threads.map(lambda text: call(pool, "fails_at_times", completion=text), texts))
    for text, returned in zip(texts, found, strict=True):
        reason = {"fine": "", "exit": "its process ended with 1", "raise": "at times"}[text]
        assert returned.reward == (text == "fine") and returned.error.endswith(reason), returned
        assert bool(returned.error) == bool(reason)


def test_memory_that_a_function_leaves_behind_costs_its_process_and_no_call(pool: FunctionPool) -> None:
    before = pool.replaced
    assert [call(pool, "leaks").error for _ in range(12)] == [""] * 12
    assert pool.replaced > before


def test_a_call_that_is_no_longer_wanted_is_left(pool: FunctionPool) -> None:
    cancelled = threading.Event()
    threading.Timer(0.2, cancelled.set).start()
    began_s = time.monotonic()
    with pytest.raises(Cancelled):
        pool.call("my_rewards:hangs", GIVEN, deadline_s=5.0, cancelled=cancelled.is_set)
    assert time.monotonic() - began_s < 5.0


def test_a_pool_that_is_closed_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "user_code").mkdir()
    shutil.copyfile(REWARDS, tmp_path / "user_code" / "my_rewards.py")
    before = set(psutil.Process().children(recursive=True))
    pool = FunctionPool(tmp_path, 2, memory_mb=300)
    assert call(pool, "brevity").error == ""
    assert set(psutil.Process().children(recursive=True)) - before
    pool.close()
    assert set(psutil.Process().children(recursive=True)) - before == set()
