"""The functions that `algo.policy_loss` and `algo.advantage` name: built-in ones, or the user's own (conf/user_code.py).

A user's function has the same signature as a built-in one. What it returns is checked, so a mistake in it is reported where it
is made, not as a strange loss.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from conf.schema import AlgoConfig
from conf.user_code import is_user_code, load
from rollout.ledger.records import Group
from trainer.learn.advantages import ADVANTAGES, F64, Advantage
from trainer.learn.health import TrainingError
from trainer.learn.losses import LOSSES, Loss, LossInputs, PolicyLoss

USER_PREFIX = "loss/user/"
"""The figures of a user's loss are logged under this prefix."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Algorithm:
    policy_loss: PolicyLoss
    advantage: Advantage


def load_algorithm(algo: AlgoConfig, run_dir: Path = Path()) -> Algorithm:
    """run_dir: where the run keeps its copy of the user's code. Raises ConfigError."""
    loss, advantage = algo.policy_loss, algo.advantage
    return Algorithm(
        policy_loss=partial(_users_loss, loss, load(loss, run_dir, setting="algo.policy_loss"))
        if is_user_code(loss)
        else LOSSES[loss],
        advantage=partial(_users_advantage, advantage, load(advantage, run_dir, setting="algo.advantage"))
        if is_user_code(advantage)
        else ADVANTAGES[advantage],
    )


def _users_loss(name: str, function: Callable[..., Any], current: Tensor, inputs: LossInputs, algo: AlgoConfig) -> Loss:
    """Calls a user's loss, which returns losses or (losses, figures). Raises TrainingError for anything else."""
    returned = function(current, inputs, algo)
    losses, figures = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    _check_per_token(name, "the loss", losses, current)
    if current.requires_grad and not losses.requires_grad:
        raise TrainingError(f"algo.policy_loss={name} returned a loss without gradient: compute it from `current`, not detached")
    if not isinstance(figures, Mapping):
        raise TrainingError(f"algo.policy_loss={name} returned figures of type {type(figures).__name__}: return a dict")
    for figure, values in figures.items():
        _check_per_token(name, f"the figure {figure!r}", values, current)
    return losses, {f"{USER_PREFIX}{figure}": values.detach().float() for figure, values in figures.items()}


def _check_per_token(name: str, what: str, values: Any, current: Tensor) -> None:
    if not isinstance(values, Tensor) or values.shape != current.shape:
        got = f"a tensor of shape {list(values.shape)}" if isinstance(values, Tensor) else f"a {type(values).__name__}"
        raise TrainingError(
            f"algo.policy_loss={name} returned {got} for {what}: return one value per token, a tensor of shape "
            f"{list(current.shape)}; the trainer itself applies the weights and takes the mean"
        )


def _users_advantage(name: str, function: Callable[..., Any], rewards: F64, group: Group, algo: AlgoConfig) -> F64:
    """Calls a user's advantage. Raises TrainingError if it does not return one finite number per completion."""
    returned = function(rewards, group, algo)
    try:
        advantages = np.asarray(returned, dtype=np.float64)
    except (TypeError, ValueError):
        advantages = np.array(np.nan)
    if advantages.shape != rewards.shape or not np.isfinite(advantages).all():
        raise TrainingError(
            f"algo.advantage={name} returned {returned!r} for the rewards {rewards.tolist()} of prompt {group.prompt_id!r}: "
            f"return one finite number per completion, {len(rewards)} in all"
        )
    return advantages
