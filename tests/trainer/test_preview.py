"""The 32B models as ranks of the job of 256 GPUs: counted to the last parameter, as large as the planner says, pushed whole."""

import pytest
import torch
import transformers
from hydra import compose, initialize_config_module

from conf.compose.load import register, to_run_config
from conf.shapes import Layout, ModelError, ModelShape, shape_of
from launch.plan.training import TrainerSetup, training_memory
from trainer.megatron.families import parameter_count
from trainer.preview.__main__ import run
from trainer.preview.share import first_ranks, share_of
from trainer.push.push import plan_buckets

MODELS = {"qwen2_5_coder_32b": transformers.Qwen2Config, "qwen3_32b": transformers.Qwen3Config}
BF16 = torch.bfloat16
LAYOUTS = [  # (layout, dp) on 128 or 136 GPUs
    (Layout(tp=8, sequence_parallel=True), 17),
    (Layout(tp=8, pp=2, sequence_parallel=True), 8),
    (Layout(tp=8, pp=4, vpp=2, sequence_parallel=True), 4),
    (Layout(tp=4, pp=8, cp=2, sequence_parallel=True), 2),
]
SLOW = pytest.mark.slow
CASES = [
    pytest.param(model, layout, dp, marks=() if (model, layout) == ("qwen3_32b", LAYOUTS[1][0]) else SLOW)
    for model in MODELS
    for layout, dp in LAYOUTS
]


def configured(model: str):
    register()
    with initialize_config_module("conf", version_base="1.3"):
        return to_run_config(compose("config", overrides=["name=x", "experiment=kestrel_256", f"model={model}"]))


def transformers_shapes(model: str, shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Of every tensor, as transformers builds the model from the same sizes, without memory."""
    config = MODELS[model](
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.ffn, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied,
    )  # fmt: skip
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(config)
    return {name: tuple(values.shape) for name, values in made.state_dict().items()}


@pytest.mark.parametrize(("model", "count"), [("qwen2_5_coder_32b", 32_763_876_352), ("qwen3_32b", 32_762_123_264)])
def test_every_tensor_is_counted_and_pushed_exactly_once_in_every_layout(model, count):
    shape = shape_of(configured(model).model)
    expected = transformers_shapes(model, shape)
    assert parameter_count(shape) == count == sum(torch.Size(shape).numel() for shape in expected.values())
    for layout, _ in LAYOUTS:
        buckets = [bucket for stage in plan_buckets(shape, layout, BF16, 2**29) for bucket in stage]
        sent = [tensor for bucket in buckets for tensor in bucket]
        assert len(sent) == len(expected)
        assert {tensor.name: tensor.shape for tensor in sent} == expected
        assert all(len(bucket) == 1 or sum(torch.Size(t.shape).numel() for t in bucket) * 2 <= 2**29 for bucket in buckets)


@pytest.mark.parametrize(("model", "layout", "dp"), CASES)
def test_a_rank_holds_what_the_planner_says_and_all_of_them_the_model(model, layout, dp):
    shape = shape_of(configured(model).model)
    shares = [share_of(shape, layout, rank=rank, dp=dp, dtype=BF16) for rank in first_ranks(layout, dp)]
    assert sum(share.own_parameters for share in shares) * layout.tp == parameter_count(shape)
    planned = training_memory(shape, TrainerSetup(layout=layout, dp=dp, tokens_per_microbatch=20480))
    largest = max(shares, key=lambda share: share.parameters)
    # The planner leaves out norms and biases, and Megatron rounds its buffers up for equal parts.
    assert largest.parameter_bytes == pytest.approx(planned.weights, rel=2e-3)
    assert largest.gradient_bytes == pytest.approx(planned.gradients, rel=2e-3)
    assert largest.optimizer_bytes == pytest.approx(planned.optimizer, rel=2e-3)


@SLOW
def test_all_ranks_of_a_stage_hold_as_much():
    shape = shape_of(configured("qwen3_32b").model)
    layout, dp = LAYOUTS[1]
    shares = [share_of(shape, layout, rank=rank, dp=dp, dtype=BF16) for rank in (64, 71, 100, 127)]
    assert [share.stage for share in shares] == [1] * 4
    assert [(share.tp_rank, share.dp_rank) for share in shares] == [(0, 0), (7, 0), (4, 4), (7, 7)]
    sizes = {(s.parameters, s.parameter_bytes, s.gradient_bytes, s.optimizer_bytes) for s in shares}
    assert len(sizes) == 1


def test_the_command_prints_a_line_for_a_rank_and_refuses_one_that_is_not_there(capsys):
    printed = run(["experiment=kestrel_256", "model=qwen3_32b", "trainer.tp=8", "trainer.pp=4", "trainer.dp=4", "rank=127"])
    assert "32,762,123,264 parameters" in printed and "over 128 ranks" in printed
    rank, stage, parameters, weights, *_ = printed.splitlines()[3].split()
    assert (rank, stage) == ("127", "3")
    assert float(weights) * 1e9 == pytest.approx(2 * int(parameters.replace(",", "")), abs=1e7)
    with pytest.raises(ValueError, match="ranks 0 to 127"):
        run(["experiment=kestrel_256", "trainer.tp=8", "trainer.pp=4", "trainer.dp=4", "rank=128"])


def test_a_shape_without_a_family_is_refused():
    config = configured("qwen3_32b").model
    config.shape.architecture = ""
    with pytest.raises(ModelError, match=r"model\.shape\.architecture=''"):
        shape_of(config)
