"""Advantages by group, shaped rewards and loss weights, against tables worked out by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.schema import AlgoConfig
from rollout.ledger.records import F32, Group
from tests.trainer.megatron.test_policy import batch
from trainer.learn.advantages import ADVANTAGES, loss_weights, overlong_penalties

rewards = st.lists(st.integers(-8, 8).map(lambda n: n / 8), min_size=2, max_size=16).map(lambda r: np.array(r, dtype=np.float32))


def group_advantages(rewards: F32, kind: str, eps: float) -> F32:
    return ADVANTAGES[kind](rewards.astype(np.float64), a_group(len(rewards)), AlgoConfig(advantage_eps=eps)).astype(np.float32)


def a_group(size: int) -> Group:
    return batch(groups=1, size=size).groups[0]


@pytest.mark.parametrize(
    ("given_rewards", "kind", "expected"),
    [
        ([1, 0, 0, 1], "grpo", [1, -1, -1, 1]),
        ([1, 0, 0, 1], "dr_grpo", [0.5, -0.5, -0.5, 0.5]),
        ([1, 0, 0, 1], "rloo", [2 / 3, -2 / 3, -2 / 3, 2 / 3]),
        ([1, 0, 0, 0], "grpo", [3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)]),  # a single survivor: std = sqrt(3) / 4
        ([1, 0, 0, 0], "rloo", [1, -1 / 3, -1 / 3, -1 / 3]),
        ([0, 0.25, 0.5, 1.25], "dr_grpo", [-0.5, -0.25, 0, 0.75]),  # uneven: mean 0.5, std sqrt(0.875 / 4)
        ([0, 0.25, 0.5, 1.25], "grpo", [-0.5 / 0.21875**0.5, -0.25 / 0.21875**0.5, 0, 0.75 / 0.21875**0.5]),
        ([0, 0.25, 0.5, 1.25], "rloo", [-2 / 3, -1 / 3, 0, 1]),
        ([-1, 1], "rloo", [-2, 2]),
    ],
)
def test_advantages_of_a_group_compare_its_completions_with_each_other(given_rewards, kind: str, expected) -> None:
    got = group_advantages(np.array(given_rewards, dtype=np.float32), kind, 1e-9)
    assert got == pytest.approx(np.array(expected), abs=1e-6)
    assert got.dtype == np.float32


def test_eps_is_added_to_the_deviation() -> None:
    assert group_advantages(np.array([1, 0], np.float32), "grpo", 0.5) == pytest.approx([0.5, -0.5])


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3, 1e-8, -7.3])
@pytest.mark.parametrize("size", [2, 3, 7, 8])
def test_a_group_without_signal_has_no_advantage_at_all(kind: str, reward: float, size: int) -> None:
    """0.1 has no exact mean in float32: its rounding over a standard deviation of the same size would be a signal."""
    assert not group_advantages(np.full(size, reward, dtype=np.float32), kind, 1e-12).any()


@given(rewards, st.sampled_from(["grpo", "dr_grpo", "rloo"]), st.floats(-100, 100))
def test_advantages_sum_to_zero_and_do_not_see_a_shift_of_all_rewards(group, kind: str, shift: float) -> None:
    found = group_advantages(group, kind, 1e-4)
    assert found.sum() == pytest.approx(0, abs=1e-4)
    shifted = (group + np.float32(round(shift))).astype(np.float32)
    assert group_advantages(shifted, kind, 1e-4) == pytest.approx(found, abs=1e-4)


@given(rewards)
def test_rloo_compares_each_with_the_mean_of_the_others(group) -> None:
    others = [np.delete(group, i).mean() for i in range(len(group))]
    assert group_advantages(group, "rloo", 1e-4) == pytest.approx(group - others, abs=1e-5)


def test_overlong_completions_lose_reward_over_the_buffer() -> None:
    lengths = np.array([1, 80, 85, 90, 95, 100, 120])
    assert overlong_penalties(lengths, 100, 0.2, 1.0) == pytest.approx([0, 0, 0.25, 0.5, 0.75, 1, 1])
    assert overlong_penalties(lengths, 100, 0.2, 0.5) == pytest.approx([0, 0, 0.125, 0.25, 0.375, 0.5, 0.5])
    assert not overlong_penalties(lengths, 100, 0.0, 1.0).any()


def test_loss_weights_weigh_tokens_trajectories_or_neither() -> None:
    sampled = np.array([1, 2, 5])
    assert loss_weights(sampled, "token", 10) == pytest.approx([1 / 8] * 3)
    assert loss_weights(sampled, "sequence", 10) == pytest.approx([1 / 3, 1 / 6, 1 / 15])
    assert loss_weights(sampled, "constant", 10) == pytest.approx([1 / 30] * 3)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=50), st.sampled_from(["token", "sequence"]))
def test_a_minibatch_weighs_one_in_all(lengths: list[int], normalisation: str) -> None:
    sampled = np.array(lengths)
    assert (loss_weights(sampled, normalisation, 1000) * sampled).sum() == pytest.approx(1, abs=1e-5)
