"""What a model folder and a layout say is read rightly, or refused with the value and what to do."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.shapes import Layout, ModelError, ModelShape, check_layout, read_shape, tensor_parallel_faults
from trainer.megatron.families import FAMILIES, piece_ranges, placements

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 250,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}


def read(tmp_path, **changes) -> ModelShape:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return read_shape(tmp_path)


def test_rope_theta_is_read_where_old_and_new_transformers_write_it(tmp_path):
    assert read(tmp_path).rope_theta == 1e6
    assert read(tmp_path, rope_theta=None, rope_parameters={"rope_theta": 5e5, "rope_type": "default"}).rope_theta == 5e5


def test_head_dim_may_differ_from_hidden_over_heads(tmp_path):
    assert read(tmp_path).head_dim == 8
    assert read(tmp_path, architectures=["Qwen3ForCausalLM"], head_dim=32).q_width == 256


def test_an_unused_sliding_window_is_no_window(tmp_path):
    assert read(tmp_path, sliding_window=16, use_sliding_window=False).sliding_window is None
    assert read(tmp_path, architectures=["MistralForCausalLM"], sliding_window=16).sliding_window == 16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"]},
         "some of the layers"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0, and must be a whole number of at least 1"),
        ({"num_hidden_layers": -32}, "num_hidden_layers is -32"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "method 'fp8'.*in bfloat16"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "method 'gptq'.*in bfloat16"),
        ({"quantization_config": {"load_in_4bit": True}}, "method 'unknown'.*in bfloat16"),
        ({"compression_config": {"format": "int-quantized"}}, "compression_config.*in bfloat16"),
        ({"num_experts": 128}, "a mixture of 128 experts"),
        ({"num_local_experts": 8}, "a mixture of 8 experts"),
    ],
)  # fmt: skip
def test_what_would_be_computed_wrongly_is_refused(tmp_path, changes, message):
    with pytest.raises(ModelError, match=message):
        read(tmp_path, **changes)


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(ModelError, match="no model at"):
        read_shape(tmp_path / "absent")


def test_a_broken_config_and_a_missing_key_are_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not JSON"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text("[1, 2]")
    with pytest.raises(ModelError, match="does not describe a model"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["Qwen2ForCausalLM"], "num_attention_heads": 2, "hidden_size": 8})
    )
    with pytest.raises(ModelError, match="num_hidden_layers"):
        read_shape(tmp_path)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(tp=3), "trainer.tp=3 does not divide the 8 attention heads .*; choose one of 1, 2, 4, 8$"),
        (Layout(pp=3), "trainer.pp=3 does not divide the 4 layers .*; choose one of 1, 2, 4$"),
        (Layout(pp=2, vpp=4), "trainer.pp x trainer.vpp=8 does not divide the 4 layers"),
    ],
)
def test_a_layout_that_does_not_cut_evenly_is_refused(tmp_path, layout, message):
    with pytest.raises(ModelError, match=message):
        check_layout(read(tmp_path), layout)


def test_heads_of_keys_must_fit_the_tensor_parallel_size(tmp_path):
    with pytest.raises(ModelError, match="6 key-value heads"):
        check_layout(read(tmp_path, num_attention_heads=12, num_key_value_heads=6, head_dim=8), Layout(tp=4))


def test_more_ranks_than_key_value_heads_replicate_them(tmp_path):
    shape = read(tmp_path, num_attention_heads=8, num_key_value_heads=2)
    check_layout(shape, Layout(tp=4))
    assert shape.tensor_parallel_sizes == (1, 2, 4, 8)
    assert not list(tensor_parallel_faults(shape, "rollout.engine_tp", 8))


def test_impossible_layouts_are_refused():
    for arguments in ({"tp": 0}, {"sequence_parallel": True}, {"vpp": 2}):
        with pytest.raises(ModelError, match="trainer"):
            Layout(**arguments)
    with pytest.raises(ModelError, match="6 trainer ranks"):
        Layout(tp=2, pp=2).dp(6)


LAYOUTS = st.builds(lambda pp, vpp: Layout(pp=pp, vpp=vpp if pp > 1 else 1), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]))


@st.composite
def shapes(draw):
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    return ModelShape(
        architecture=draw(st.sampled_from(sorted(FAMILIES))),
        layers=8,
        hidden=16,
        heads=kv_heads * draw(st.sampled_from([4, 8])),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([4, 8])),
        ffn=32,
        vocabulary=draw(st.integers(5, 40)),
        max_positions=64,
        rope_theta=1e4,
        rope_scaling=None,
        norm_eps=1e-6,
        tied=draw(st.booleans()),
        sliding_window=None,
    )


@given(shape=shapes(), layout=LAYOUTS)
def test_every_layer_lies_in_exactly_one_stage(shape, layout):
    names = [piece.name for stage in range(layout.pp) for p in placements(shape, layout, stage) for piece in p.pieces]
    norms = [f"model.layers.{layer}.input_layernorm.weight" for layer in range(shape.layers)]
    assert sorted(name for name in names if name.endswith("input_layernorm.weight")) == norms


@given(shape=shapes(), layout=LAYOUTS)
def test_every_tensor_is_exported_by_exactly_one_stage(shape, layout):
    def names(cut: Layout) -> list[str]:
        found = [p for stage in range(cut.pp) for p in placements(shape, cut, stage) if p.exported]
        return sorted(piece.name for placement in found for piece in placement.pieces)

    assert names(layout) == names(Layout())
    assert len(set(names(layout))) == len(names(layout))
    assert ("lm_head.weight" in names(layout)) != shape.tied


@given(shape=shapes(), tp=st.sampled_from([1, 2, 4]))
def test_tensor_parallel_ranks_cover_each_row_exactly_once(shape, tp):
    for placement in placements(shape, Layout(), 0):
        if placement.cut.name == "WHOLE":
            continue
        dim = 1 if placement.cut.name == "COLUMNS" else 0
        rows = [
            (piece, row)
            for rank in range(tp)
            for piece, start, stop in piece_ranges(placement, shape, tp, rank)
            for row in range(start, stop)
        ]
        expected = [(n, row) for n, piece in enumerate(placement.pieces) for row in range(piece.sizes(shape)[dim])]
        assert sorted(rows) == expected
