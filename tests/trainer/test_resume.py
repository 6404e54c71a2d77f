"""Ten steps, or five and five through a checkpoint: the policy that comes out is the same, and so is its reference."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from conf.shapes import Layout, read_shape
from tests.trainer import jobs, ranks
from tests.trainer.megatron.test_policy import batch, config, model_folder
from trainer import process_groups
from trainer.learn.algorithm import load_algorithm
from trainer.megatron import checkpoint
from trainer.megatron.policy import load_policy
from trainer.megatron.reference import Reference, fingerprint
from trainer.step import Stopwatch, train_step

STEPS, SAVED = 10, 5
REFRESH = 3  # the reference at the checkpoint is that of version 3, and changes twice more
TP2, PP2, DP2 = Layout(tp=2), Layout(pp=2), Layout()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    weights: dict[str, torch.Tensor]
    figures: list[dict[str, float]]  # of each step


def train(folder: str, checkpoints: str, layout: Layout, steps: range, changes: dict[str, Any]) -> Outcome:
    """Trains on the batches of these steps; goes on from the newest checkpoint, saves at SAVED."""
    settings = config()
    settings.model.path, settings.model.dtype = folder, "float32"
    settings.algo.reference_refresh_steps = REFRESH
    # Where a gradient is nearly zero, AdamW divides rounding by rounding; a larger eps keeps that out of the comparison.
    settings.trainer.lr, settings.trainer.adam_eps = 5e-4, 1e-5
    settings.trainer.steps, settings.trainer.warmup_steps, settings.trainer.lr_schedule = STEPS, 4, "cosine"
    for name, value in changes.items():
        setattr(settings.algo, name, value)
    mesh = process_groups.initialize(layout, seed=0, timeout_s=60)
    policy = load_policy(settings, mesh)
    store = checkpoint.Checkpoints(checkpoints, policy.training_state, keep=2)
    if steps.start:
        assert checkpoint.load(checkpoint.latest(checkpoints), policy.training_state).version == steps.start
    figures = []
    for step in steps:
        figures.append(train_step(policy, load_algorithm(settings.algo), batch(step), settings, Stopwatch()))
        if step + 1 == SAVED:
            store.begin_save(SAVED, {})
    assert [saved.failure for saved in store.wait(timeout_s=60)] in ([], [None])
    weights = jobs.exported(list(policy.chunks), policy.shape, mesh)
    process_groups.shutdown()
    return Outcome(weights=weights, figures=figures)


def run(folder: str, checkpoints: str, layout: Layout, world_size: int, steps: range, **changes: Any) -> Outcome:
    outcomes = ranks.run(train, world_size, folder, checkpoints, layout, steps, changes)
    return Outcome(weights=jobs.merged(outcomes), figures=outcomes[0].figures)


def difference(a: Outcome, b: Outcome) -> float:
    return max((values - b.weights[name]).abs().max().item() for name, values in a.weights.items())


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> tuple[str, str, Outcome]:
    tmp = tmp_path_factory.mktemp("straight")
    folder, checkpoints = model_folder(tmp / "model"), str(tmp / "checkpoints")
    return folder, checkpoints, run(folder, checkpoints, PP2, 2, range(STEPS))


def test_five_and_five_steps_are_ten_to_the_bit(straight):
    folder, checkpoints, expected = straight
    resumed = run(folder, checkpoints, PP2, 2, range(SAVED, STEPS))
    assert difference(resumed, expected) == 0
    timeless = [{k: v for k, v in figures.items() if not k.startswith("time/")} for figures in resumed.figures]
    assert timeless == [{k: expected.figures[SAVED + n][k] for k in figures} for n, figures in enumerate(timeless)]
    assert [figures["reference/version"] for figures in expected.figures] == [0, 0, 3, 3, 3, 6, 6, 6, 9, 9]


def test_a_steps_learning_rate_is_that_of_its_own_last_update(straight):
    """Four updates of warm-up, two a step."""
    _, _, outcome = straight
    assert [figures["learning_rate"] for figures in outcome.figures[:2]] == pytest.approx([5e-4 * 2 / 4, 5e-4])


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "world_size"), [(TP2, 2), (DP2, 2), (Layout(tp=2, pp=2), 4), (Layout(), 1)])
def test_the_second_five_steps_may_be_done_in_another_layout(straight, layout, world_size):
    folder, checkpoints, expected = straight
    assert difference(run(folder, checkpoints, layout, world_size, range(SAVED, STEPS)), expected) <= 1e-6


@pytest.mark.slow
def test_the_reference_of_the_checkpoint_matters(straight):
    """So that the tests above can fail: another reference than that of version 3 shows in the weights."""
    folder, checkpoints, expected = straight
    without = run(folder, checkpoints, PP2, 2, range(SAVED), reference_refresh_steps=0)  # replaces the checkpoint
    assert without.figures[0]["reference/version"] == without.figures[-1]["reference/version"] == 0
    resumed = run(folder, checkpoints, PP2, 2, range(SAVED, STEPS))
    assert difference(resumed, expected) > 1e-5
    changed = model_folder(folder, layers=4, seed=1)
    with pytest.raises(ranks.RankFailed, match="trained against another reference"):
        run(changed, checkpoints, PP2, 2, range(SAVED, STEPS))


def identity(folder: str, layout: Layout) -> tuple[str, bool]:
    """The fingerprint, and whether changing places and back leaves every bit where it was."""
    settings = config()
    settings.model.path, settings.model.dtype = folder, "bfloat16"
    mesh = process_groups.initialize(layout, seed=0, timeout_s=60)
    policy = load_policy(settings, mesh)
    reference = Reference(policy.chunks, read_shape(folder), mesh)
    before = [p.data.clone() for p in policy.chunks[0].parameters()]
    for parameter in policy.chunks[0].parameters():
        parameter.data.add_(1.0)
    with reference.in_place():
        exact = all(torch.equal(p.data, b) for p, b in zip(policy.chunks[0].parameters(), before, strict=True))
    exact &= all(torch.equal(p.data, b + 1.0) for p, b in zip(policy.chunks[0].parameters(), before, strict=True))
    with reference.in_place():
        again = fingerprint(policy.chunks, policy.shape, mesh)
    figures = reference.figures()
    exact &= figures["reference/host_bytes"] == sum(2 * b.numel() for b in before) and figures["time/reference_swap_s"] > 0
    process_groups.shutdown()
    return again, exact and again == reference.fingerprint


def test_a_reference_is_known_by_its_weights_in_every_layout_and_comes_and_goes_to_the_bit(tmp_path):
    folder = model_folder(tmp_path / "model")
    seen = {
        answer for layout, size in ((Layout(), 1), (TP2, 2), (PP2, 2)) for answer in ranks.run(identity, size, folder, layout)
    }
    assert len(seen) == 1 and all(exact for _, exact in seen)
    assert ranks.run(identity, 1, model_folder(tmp_path / "other", seed=1), Layout())[0] not in seen
