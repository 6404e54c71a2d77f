"""One node's GPUs are all used, by layouts that hold the model and cut it evenly."""

from dataclasses import replace
from pathlib import Path

import pytest

from conf.schema import ConfigError
from conf.shapes import Layout, ModelShape
from launch.plan.model_costs import weight_bytes
from launch.plan.one_node import ENGINE_WEIGHTS, NodeLayout, fit
from launch.plan.training import USABLE, TrainerSetup, training_memory
from rollout.servers import frozen_gpus
from tests.launch.placement.test_recorded_placement import configuration

H100 = 80e9
DEBUG = ModelShape(
    architecture="Qwen2ForCausalLM", layers=4, hidden=128, heads=8, kv_heads=4, head_dim=16, ffn=512, vocabulary=512
)
QWEN_7B = ModelShape(
    architecture="Qwen2ForCausalLM", layers=28, hidden=3584, heads=28, kv_heads=4, head_dim=128, ffn=18944, vocabulary=152064
)


def layout(tp: int, pp: int, dp: int, engines: int, engine_tp: int) -> NodeLayout:
    return NodeLayout(tp=tp, pp=pp, dp=dp, engines=engines, engine_tp=engine_tp)


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (2, layout(1, 1, 1, 1, 1)),
        (3, layout(1, 1, 1, 2, 1)),
        (4, layout(1, 1, 2, 2, 1)),
        (5, layout(1, 1, 2, 3, 1)),
        (6, layout(1, 1, 3, 3, 1)),
        (7, layout(1, 1, 3, 4, 1)),
        (8, layout(1, 1, 4, 4, 1)),
    ],
)
def test_small_model_is_copied_not_cut(gpus: int, expected: NodeLayout) -> None:
    assert fit(gpus, H100, DEBUG, 768) == expected


@pytest.mark.parametrize("gpus", range(2, 9))
@pytest.mark.parametrize("model", [DEBUG, QWEN_7B])
def test_whatever_fits_uses_all_gpus_and_holds_the_model(gpus: int, model: ModelShape) -> None:
    try:
        found = fit(gpus, H100, model, 4096)
    except ConfigError as error:
        assert model is QWEN_7B and gpus < 3, error
        return
    assert found.gpus == gpus
    for tp in (found.tp, found.engine_tp):
        assert tp in model.tensor_parallel_sizes
    assert not model.layers % found.pp
    layout = Layout(tp=found.tp, pp=found.pp)
    trainer = TrainerSetup(layout=layout, dp=found.dp, tokens_per_microbatch=4096, recompute=found.recompute)
    assert training_memory(model, trainer).bytes <= USABLE * H100
    assert weight_bytes(model) / found.engine_tp <= ENGINE_WEIGHTS * H100


def test_larger_model_is_cut() -> None:
    assert fit(8, H100, QWEN_7B, 4096) == layout(2, 1, 2, 4, 1)


def test_activations_are_computed_again_only_where_nothing_else_fits() -> None:
    assert not fit(8, H100, QWEN_7B, 4096).recompute
    small = fit(8, 40e9, QWEN_7B, 4096)
    assert small.recompute and "trainer.recompute=full" in small.overrides


def test_what_does_not_fit_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"32B parameters do not fit on 8 GPUs of 80.0 GB .*take more GPUs"):
        fit(8, H100, replace(QWEN_7B, stated_parameters=32_000_000_000, layers=64, hidden=5120), 4096)


@pytest.mark.parametrize("gpus", [0, 1])
def test_one_gpu_cannot_be_shared(gpus: int) -> None:
    with pytest.raises(ConfigError, match="one rank per GPU"):
        fit(gpus, H100, DEBUG, 768)


def test_gpus_of_a_teacher_and_a_judge_model_are_left_to_them() -> None:
    overrides = ["algo.teacher=t", "algo.teacher_on=engine", "algo.teacher_tp=2", "reward.judge_model=j"]
    taken = frozen_gpus(configuration("debug", *overrides))
    assert fit(8, H100, DEBUG, 768, taken) == replace(layout(1, 1, 2, 3, 1), frozen_gpus=3)
    assert "cluster.gpus_per_node=8" in fit(8, H100, DEBUG, 768, taken).overrides
    with pytest.raises(ConfigError, match="1 GPU beside 3 for a teacher or judge model"):
        fit(4, H100, DEBUG, 768, taken)


@pytest.mark.parametrize("gpus", range(2, 9))
def test_overrides_make_a_run_that_is_placed_on_these_gpus(gpus: int) -> None:
    from launch.placement.placement import place
    from launch.slurm.allocation import local_nodes

    overrides = fit(gpus, H100, DEBUG, 768).overrides
    config = configuration("debug", *overrides)
    placed = place(config, Path("outputs/x"), local_nodes(config), 20_000)
    used = [gpu for process in placed for gpu in process.gpus]
    assert sorted(used) == list(range(gpus))
