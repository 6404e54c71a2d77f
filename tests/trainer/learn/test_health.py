"""A number that is not finite stops the run before the optimizer sees it and says whose it is; so do figures that diverge."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.trainer import ranks
from tests.trainer.megatron.test_policy import batch, config, model_folder
from trainer.learn.health import Divergence, TrainingError

GOOD = {"loss/total": 0.1, "behaviour/ess_fraction": 0.9}


def poisoned_step(folder: str, tp: int, pp: int, poison: str) -> tuple[str, bool]:
    """One step in which one rank meets a number that is not finite: what it says, and whether all weights stayed as they were."""
    from conf.shapes import Layout
    from trainer import process_groups
    from trainer.learn import batch_loss, logprobs
    from trainer.learn.algorithm import load_algorithm
    from trainer.megatron import policy
    from trainer.megatron.policy import load_policy
    from trainer.step import Stopwatch, train_step

    settings = config()
    settings.model.path, settings.model.dtype = folder, "float32"
    mesh = process_groups.initialize(Layout(tp=tp, pp=pp), seed=0, timeout_s=60)
    trained = load_policy(settings, mesh)
    poisoned = batch()
    if poison == "weight":
        with torch.no_grad():
            next(trained.chunks[-1].parameters()).data.flatten()[0] = torch.nan
    before = [p.detach().clone() for chunk in trained.chunks for p in chunk.parameters()]
    made = batch_loss.token_losses
    algorithm = load_algorithm(settings.algo)

    def loss_of_one_trajectory(*arguments, **named):
        losses, figures = made(*arguments, **named)
        return losses + torch.where(named["inputs"].advantages == 77.0, torch.nan, 0.0), figures

    def gradient_of_one_trajectory(hidden, weight, targets, **named):
        found, entropies = logprobs.token_logprobs(hidden, weight, targets, **named)
        if found.requires_grad and len(targets) > 20:
            found.register_hook(lambda gradient: gradient * torch.inf)
        return found, entropies

    if poison == "loss":
        batch_loss.token_losses = loss_of_one_trajectory

        def advantage(rewards, group, algo):
            return np.where(np.arange(len(rewards)) == 1, 77.0, 0.5)

        algorithm = replace(algorithm, advantage=advantage)
    if poison == "gradient":
        policy.token_logprobs = gradient_of_one_trajectory
    try:
        train_step(trained, algorithm, poisoned, settings, Stopwatch())
        said = "nothing"
    except TrainingError as error:
        said = str(error)
    after = [p.detach() for chunk in trained.chunks for p in chunk.parameters()]
    process_groups.shutdown()
    return said, all(torch.equal(a, b) or a.isnan().any() for a, b in zip(before, after, strict=True))


FAST = [("loss", 1, 1, 2), ("gradient", 2, 2, 1), ("weight", 1, 1, 1)]
SLOW = [case for p in ("loss", "gradient", "weight") for case in ((p, 1, 1, 1), (p, 1, 1, 2), (p, 2, 2, 1)) if case not in FAST]


@pytest.mark.parametrize(("poison", "tp", "pp", "dp"), FAST + [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW])
def test_what_is_not_finite_stops_every_rank_before_any_weight_changes(tmp_path, poison: str, tp: int, pp: int, dp: int) -> None:
    results = ranks.run(poisoned_step, tp * pp * dp, model_folder(tmp_path / "model"), tp, pp, poison)
    quantity = {"loss": "loss", "gradient": "gradient", "weight": "old log-prob"}[poison]
    part = "minibatch 0 of 2" if poison != "weight" else "the old log-probs"
    for said, is_unchanged in results:
        assert said.startswith(f"the {quantity} is not finite at step 0, {part}, microbatch "), said
        assert is_unchanged
    assert sum("of the prompts '" in said and " tokens, " in said for said, _ in results) == 1
    assert sum("says which prompts these are" in said for said, _ in results) == len(results) - 1


def test_a_figure_that_is_not_finite_ends_the_run_by_name() -> None:
    with pytest.raises(TrainingError, match="diverged: entropy/mean, loss/total not finite"):
        Divergence(ess_floor=0.1, patience_steps=3).check({**GOOD, "loss/total": float("nan"), "entropy/mean": float("inf")})


def test_few_effective_tokens_end_the_run_only_when_it_stays_so() -> None:
    divergence = Divergence(ess_floor=0.1, patience_steps=3)
    low = {**GOOD, "behaviour/ess_fraction": 0.05}
    for figures in (low, low, GOOD, low, low):
        divergence.check(figures)
    with pytest.raises(TrainingError, match=r"below algo.ess_floor=0.1 of the tokens for 3 steps \(now 0.05\)"):
        divergence.check(low)


def token_figures() -> dict[str, float]:
    """Two data-parallel ranks with different tokens."""
    from conf.shapes import Layout
    from trainer import process_groups
    from trainer.learn.token_figures import TokenFigures

    mesh = process_groups.initialize(Layout(), seed=0, timeout_s=30)
    figures = TokenFigures(mesh)
    weights = torch.arange(1, 1001, dtype=torch.float64) / 500
    figures.add_weights(weights[mesh.dp_rank :: 2])
    figures.add("mismatch/lag_2_abs_logprob", torch.full((3 + mesh.dp_rank,), float(mesh.dp_rank)))
    figures.add("entropy/mean", torch.zeros(0))
    found = figures.reduce()
    process_groups.shutdown()
    return found


def test_weight_figures_are_those_of_all_ranks_tokens() -> None:
    weights = np.arange(1, 1001) / 500
    for found in ranks.run(token_figures, 2):
        assert found["behaviour/ess_fraction"] == pytest.approx(weights.sum() ** 2 / (1000 * (weights**2).sum()))
        assert found["behaviour/weight_max"] == 2.0
        assert found["behaviour/weight_p99"] == pytest.approx(1.98, rel=0.011)
        assert found["mismatch/lag_2_abs_logprob"] == pytest.approx(4 / 7)
        assert "entropy/mean" not in found
