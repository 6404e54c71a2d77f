"""A reward of several parts: the law of the weighted sum, names and weights that are refused, and truncated completions."""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward.grade import Part, Reward, grade
from reward.kinds.functions.pool import FunctionPool
from reward.kinds.kind import Answer, Resources, Task
from reward.sandbox.sandbox import Sandbox
from reward.task import Defaults, TaskError, read_reward
from rollout.ledger.records import Finish, Verdict

CALLS = {"kind": "calls", "entry_point": "f", "tests": [{"args": [1], "expected": 1}]}
NUMBERS = st.floats(-100, 100)


class NoResources:
    """What a task gets that needs nothing."""

    def sandbox(self) -> AbstractContextManager[Sandbox]:
        raise AssertionError("no sandbox is needed")

    @property
    def functions(self) -> FunctionPool:
        raise AssertionError("no function is run")

    def waiting(self) -> AbstractContextManager[None]:
        raise AssertionError("nothing waits")

    def cancelled(self) -> bool:
        return False


@dataclass(frozen=True)
class Says(Task):
    """Gives every completion the same verdict."""

    figures: ClassVar[Mapping[str, float]] = {"seen": 0.0}

    reward: float
    reason: str = ""
    parts: Mapping[str, float] = field(default_factory=lambda: {"seen": 1.0})

    def grade(self, answer: Answer, resources: Resources) -> Verdict:
        return Verdict(reward=self.reward, parts=self.parts, reason=self.reason, cpu_s=1.0)


class SaysAnyway(Says):
    grades_truncated: ClassVar[bool] = True


def reward_of(*parts: tuple[float, Task], truncated_reward: float = 0.0) -> Reward:
    named = [Part(name=f"part{index}", weight=weight, task=task) for index, (weight, task) in enumerate(parts)]
    return Reward(parts=named, truncated_reward=truncated_reward)


def verdict(reward: Reward, finish: Finish = Finish.STOP) -> Verdict:
    return grade(reward, Answer(completion="x", finish=finish), NoResources())


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=6))
def test_the_reward_is_the_weighted_sum_of_the_parts(parts: list[tuple[float, float]]) -> None:
    found = verdict(reward_of(*((weight, Says(value)) for weight, value in parts)))
    assert found.reward == pytest.approx(math.fsum(weight * value for weight, value in parts))
    assert [found.parts[f"part{index}"] for index in range(len(parts))] == [value for _, value in parts]
    assert found.cpu_s == len(parts)


@given(st.lists(st.tuples(NUMBERS, NUMBERS, st.booleans()), min_size=1, max_size=6), NUMBERS)
def test_a_truncated_completion_gets_the_truncated_reward_from_each_part_that_does_not_grade_it(
    parts: list[tuple[float, float, bool]], truncated_reward: float
) -> None:
    tasks = [(weight, SaysAnyway(value) if grades else Says(value)) for weight, value, grades in parts]
    found = verdict(reward_of(*tasks, truncated_reward=truncated_reward), Finish.LENGTH)
    expected = math.fsum(weight * (value if grades else truncated_reward) for weight, value, grades in parts)
    assert found.reward == pytest.approx(expected)
    assert found.parts["truncated"] == 1.0


@given(st.lists(st.sampled_from([Says(1.0), SaysAnyway(0.5)]), min_size=1, max_size=5))
def test_every_verdict_on_a_problem_has_the_same_figures(tasks: list[Task]) -> None:
    reward = reward_of(*((1.0, task) for task in tasks))
    found = [verdict(reward), verdict(reward, Finish.LENGTH), reward.ungraded("the grader failed", wall_s=0.1)]
    assert len({frozenset(one.parts) for one in found}) == 1


def test_a_figure_that_two_parts_have_carries_the_name_of_the_second_part() -> None:
    found = verdict(reward_of((1.0, Says(1.0)), (1.0, Says(2.0, parts={"seen": 3.0, "part0": 4.0}))))
    assert found.parts == {"part0": 1.0, "part1": 2.0, "truncated": 0.0, "seen": 1.0, "part1/seen": 3.0, "part1/part0": 4.0}


def test_a_reason_names_its_part() -> None:
    assert verdict(reward_of((1.0, Says(0.0, "wrong")))).reason == "wrong"
    assert verdict(reward_of((1.0, Says(1.0)), (1.0, Says(0.0, "wrong")))).reason == "part1: wrong"


def test_parts_of_the_run_join_those_of_the_problem() -> None:
    reward = read_reward([CALLS], defaults=Defaults(parts={"twice": {**CALLS, "weight": 0.5}}))
    assert [(part.name, part.weight) for part in reward.parts] == [("calls", 1.0), ("twice", 0.5)]


def test_one_kind_is_a_list_of_one_part_and_so_is_the_form_of_messages() -> None:
    forms: list[Any] = [CALLS, [CALLS], {"parts": [CALLS]}]
    assert len({str(read_reward(form)) for form in forms}) == 1


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ([], "task: the list is empty"),
        ([CALLS, CALLS], "task: the part name 'calls' is taken"),
        ([{**CALLS, "name": "truncated"}], "task: the part name 'truncated' is taken"),
        ([CALLS, {**CALLS, "name": "a b"}], r"task\[1\].name: 'a b' must be a word"),
        ([CALLS, {**CALLS, "name": 3}], r"task\[1\].name: 3 must be a word"),
        ([{**CALLS, "weight": 0}], "task: every part has the weight 0"),
        ([{**CALLS, "reasoning": "<plan>"}], r"task\[0\].reasoning: '<plan>' must be auto, none"),
        ([CALLS, {"kind": "calls"}], r"task\[1\].tests: must be a list of at least one test"),
        ([CALLS, "calls"], r"task\[1\]: must be an object, got str"),
        ({**CALLS, "kind": "cals"}, "task.kind: 'cals' is not known"),
    ],
)
def test_parts_that_cannot_be_used_are_refused_with_their_place(data: Any, told: str) -> None:
    with pytest.raises(TaskError, match=f"^{told}"):
        read_reward(data)


@pytest.mark.parametrize("weight", [math.nan, math.inf, -math.inf, 1e7, True, "1", None])
def test_a_weight_that_is_no_usable_number_is_refused_with_its_place(weight: Any) -> None:
    with pytest.raises(TaskError, match=r"^task\[1\].weight: must be a number from"):
        read_reward([CALLS, {**CALLS, "name": "b", "weight": weight}])
    with pytest.raises(TaskError, match=r"^reward.parts.short.weight: must be a number from"):
        read_reward(CALLS, defaults=Defaults(parts={"short": {**CALLS, "weight": weight}}))
