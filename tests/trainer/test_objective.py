"""The loss against hand-computed tables and autograd."""

import math

import numpy as np
import pytest
import torch

from trainer.advantages import group_advantages
from trainer.objective import Objective, behaviour_weights, clipped_surrogate, kl, token_losses


def test_advantages_of_a_group_compare_its_completions_with_each_other() -> None:
    rewards = np.array([1, 0, 0, 1], dtype=np.float32)
    assert group_advantages(rewards, "grpo", 1e-4) == pytest.approx(np.array([1, -1, -1, 1]) * 0.5 / 0.5001)
    assert group_advantages(rewards, "dr_grpo", 1e-4) == pytest.approx([0.5, -0.5, -0.5, 0.5])


def test_a_group_without_signal_has_no_advantage() -> None:
    assert not group_advantages(np.ones(8, dtype=np.float32), "grpo", 1e-4).any()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [(1.0, 2.0, -2.0, False), (1.5, 1.0, -1.2, True), (1.5, -1.0, 1.5, False), (0.5, 1.0, -0.5, False), (0.5, -1.0, 0.8, True)],
)
def test_the_surrogate_is_clipped_only_where_the_policy_has_gained_enough(
    ratio: float, advantage: float, loss: float, clipped: bool
) -> None:
    current = torch.tensor([math.log(ratio)], requires_grad=True)
    got, held = clipped_surrogate(current, torch.zeros(1), torch.tensor([advantage]), 0.2, 0.2)
    assert got.item() == pytest.approx(loss)
    assert held.item() is clipped
    got.sum().backward()
    assert current.grad.item() == pytest.approx(0.0 if clipped else -ratio * advantage)


def test_behaviour_weights_are_truncated_or_masked_at_the_cap() -> None:
    old, behaviour = torch.tensor([0.0, 0.0]), torch.tensor([-math.log(3.0), -math.log(1.5)])
    assert behaviour_weights(old, behaviour, "truncate", 2.0).tolist() == pytest.approx([2.0, 1.5])
    assert behaviour_weights(old, behaviour, "mask", 2.0).tolist() == pytest.approx([0.0, 1.5])
    assert behaviour_weights(old, behaviour, "none", 2.0).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators_average_to_the_kl_under_the_current_policy(estimator: str) -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.48, 0.33, 0.19], dtype=torch.float64)
    exact = (p * (p / q).log()).sum().item()
    assert (p * kl(p.log(), q.log(), estimator)).sum().item() == pytest.approx(exact, rel=0.05)


def test_k3_is_never_negative() -> None:
    current, reference = torch.randn(1000), torch.randn(1000)
    assert (kl(current, reference, "k3") >= 0).all()


def test_on_policy_gradient_is_the_policy_gradient() -> None:
    objective = Objective(
        clip_low=0.2, clip_high=0.2, behaviour_correction="truncate", behaviour_cap=2.0, kl_coef=0.0, kl_estimator="k3"
    )
    current = torch.randn(16, requires_grad=True)
    fixed, advantages = current.detach().clone(), torch.randn(16)
    losses, figures = token_losses(objective, current=current, old=fixed, behaviour=fixed, advantages=advantages, reference=None)
    losses.sum().backward()
    assert torch.allclose(current.grad, -advantages)
    assert figures["behaviour/weight_mean"].mean().item() == 1.0
