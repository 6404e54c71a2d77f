"""The kind `python`: what a function is given, how a failure counts, and the same functions inside the sandbox."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reward.grade import grade
from reward.grading.resources import Lent, Sandboxes, Slots
from reward.grading.services import Services
from reward.kinds.functions.pool import FunctionPool
from reward.kinds.kind import Answer
from reward.task import Defaults, TaskError, read_reward
from rollout.ledger.records import Finish, Verdict

REWARDS = Path(__file__).with_name("functions") / "rewards.py"


@pytest.fixture(scope="module")
def lent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lent]:
    run_dir = tmp_path_factory.mktemp("run")
    (run_dir / "user_code").mkdir()
    text = REWARDS.read_text().replace("import numpy as np\n", "").replace("np.float32(", "float(")  # the sandbox has no numpy
    (run_dir / "user_code" / "my_rewards.py").write_text(text)
    sandboxes, functions = Sandboxes(1), FunctionPool(run_dir, 1, memory_mb=300)
    yield Lent(
        sandboxes=sandboxes,
        functions=functions,
        services=Services(),
        slots=Slots(1, most_waiting=4),
        cancelled=lambda: False,
    )
    sandboxes.close()
    functions.close()


def verdict(lent: Lent, function: str, *, jail: bool, finish: Finish = Finish.STOP, **more: Any) -> Verdict:
    task = {"kind": "python", "function": f"my_rewards:{function}", "deadline_s": 1, "cpu_limit_s": 1, "jail": jail, **more}
    answer = Answer(completion="one two", prompt="two", metadata={"level": 3}, finish=finish, tokens=2)
    return grade(read_reward(task, defaults=Defaults(truncated_reward=-1.0, memory_limit_mb=256)), answer, lent)


@pytest.mark.parametrize("jail", [False, True])
@pytest.mark.parametrize(
    ("function", "reward", "parts"),
    [("brevity", -0.02, {}), ("slowly", 1.0, {}), ("with_parts", 7.0, {"given": 6.0, "metadata": 3.0}), ("as_numpy", 2.0, {})],
)
def test_a_function_gives_the_same_reward_in_the_pool_and_in_the_sandbox(
    lent: Lent, jail: bool, function: str, reward: float, parts: dict[str, float]
) -> None:
    found = verdict(lent, function, jail=jail)
    assert found.reason == ""
    assert found.reward == pytest.approx(reward)
    assert found.parts == {"python": pytest.approx(reward), "truncated": 0.0, "function_failed": 0.0, **parts}


@pytest.mark.parametrize("jail", [False, True])
@pytest.mark.parametrize(
    "function", ["hangs", "spins", "raises", "exits", "ends_its_process", "uses_memory", "returns_text", "returns_nan", "missing"]
)
def test_a_function_that_fails_gives_0_and_is_named_and_counted(lent: Lent, jail: bool, function: str) -> None:
    found = verdict(lent, function, jail=jail)
    assert (found.reward, found.parts["function_failed"]) == (0.0, 1.0)
    assert found.reason.startswith(f"my_rewards:{function}: ")


def test_a_function_sees_a_truncated_completion(lent: Lent) -> None:
    found = verdict(lent, "brevity", jail=False, finish=Finish.LENGTH)
    assert (found.reward, found.parts["truncated"]) == (pytest.approx(-0.02), 1.0)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"function": "my_rewards"}, "task.function: 'my_rewards' must be module:function"),
        ({"function": None}, "task.function: None must be module:function"),
        ({"jail": 1}, "task.jail: must be true or false, got 1"),
        ({"deadline_s": 0}, "task.deadline_s: must be a number above 0"),
        ({"functions": "a:b"}, "task.functions: no such field in a 'python' task"),
        ({"function": "os:system"}, "task.function: os:system is not named in reward.functions"),
    ],
)
def test_a_task_that_cannot_be_run_is_refused_with_its_place(more: dict[str, Any], told: str) -> None:
    with pytest.raises(TaskError, match=told):
        read_reward({"kind": "python", "function": "a:b", **more}, defaults=Defaults(functions=frozenset(["a:b"])))
