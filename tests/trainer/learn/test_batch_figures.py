"""What a batch's verdicts come to: the parts of rewards, the commonest reasons, and the warning of a run that learns nothing."""

from dataclasses import replace

import pytest

from rollout.ledger.records import Batch
from tests.trainer.megatron.test_policy import batch
from trainer.learn.batch_figures import batch_figures, commonest_reasons
from trainer.learn.health import STEPS_WITHOUT_SIGNAL, no_signal_warning


def with_verdicts(parts: list[dict[str, float]], reasons: list[str]) -> Batch:
    [group] = batch(groups=1, size=len(reasons)).groups
    judged = zip(group.trajectories, parts, reasons, strict=True)
    trajectories = [replace(t, reward_parts=part, reason=reason) for t, part, reason in judged]
    return Batch(step=0, groups=[replace(group, trajectories=trajectories)])


def test_each_part_of_the_verdicts_is_told_over_the_completions_that_have_it() -> None:
    figures = batch_figures(with_verdicts([{"style": 0.5}, {"style": 1.0, "speed": 3.0}, {}, {}], [""] * 4))
    assert {name: value for name, value in figures.items() if name.startswith("reward/part/")} == {
        "reward/part/style/mean": 0.75,
        "reward/part/style/min": 0.5,
        "reward/part/style/max": 1.0,
        "reward/part/speed/mean": 3.0,
        "reward/part/speed/min": 3.0,
        "reward/part/speed/max": 3.0,
    }


def test_figures_of_episodes_stand_beside_the_others_as_soon_as_one_had_a_second_turn() -> None:
    [group] = batch(groups=1, size=3).groups
    given = [(1, 1, 0.0), (3, 5, 1.0), (3, 3, 0.5)]
    trajectories = [
        replace(t, turns=turns, segments=segments, reward=reward, environment_s=turns / 2)
        for t, (turns, segments, reward) in zip(group.trajectories, given, strict=True)
    ]
    figures = batch_figures(Batch(step=0, groups=[replace(group, trajectories=trajectories)]))
    assert {name: value for name, value in figures.items() if name.startswith("episode/")} == {
        "episode/mean_turns": pytest.approx(7 / 3),
        "episode/max_turns": 3.0,
        "episode/environment_mean_s": pytest.approx(7 / 6),
        "episode/turns/1/reward_mean": 0.0,
        "episode/turns/1/fraction": pytest.approx(1 / 3),
        "episode/turns/3/reward_mean": 0.75,
        "episode/turns/3/fraction": pytest.approx(2 / 3),
    }
    assert figures["trajectories/resumed"] == 1.0
    assert not any(name.startswith("episode/") for name in batch_figures(batch(groups=1, size=3)))


def test_the_same_failure_on_other_tests_and_values_is_one_reason_and_a_pass_is_none() -> None:
    reasons = [
        'test 0: printed "12", expected "13"',
        "no code block",
        'test 7: printed "x y", expected "0.5"',
        "",
        "test 2: NameError: name 'foo' is not defined",
        "test 2: NameError: name 'bar' is not defined",
        'test 1: printed "1", expected "2"',
    ]
    assert commonest_reasons(with_verdicts([{}] * len(reasons), reasons)) == {
        "test …: printed …, expected …": 3,
        "test …: NameError: name … is not defined": 2,
        "no code block": 1,
    }


def test_however_many_reasons_there_are_few_are_told() -> None:
    reasons = [chr(ord("a") + n) * 500 for n in range(20)]
    found = commonest_reasons(with_verdicts([{}] * 20, reasons))
    assert len(found) == 5 and max(map(len, found)) == 100


@pytest.mark.parametrize("steps", range(6))
def test_a_run_that_learns_nothing_is_warned_of_once_with_the_reasons(steps: int) -> None:
    figures = {"reward/steps_without_signal": float(steps), "reward/mean": 0.0}
    warning = no_signal_warning(figures, {"no code block": 61, "the completion reached its cap": 3})
    if steps == STEPS_WITHOUT_SIGNAL:
        assert "learns nothing" in warning and "61 x no code block; 3 x the completion reached its cap" in warning
    else:
        assert warning == ""
