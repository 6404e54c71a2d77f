"""Attention over packed sequences equals attention over each sequence alone."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from trainer.megatron.attention import PackedAttention, group_by_length, pack

CPU = torch.device("cpu")
LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=12)


def core_attention(window: int | None = None) -> PackedAttention:
    config = SimpleNamespace(window_size=(window - 1, 0) if window else None)
    return PackedAttention(config, layer_number=1)


def one_by_one(lengths, query, key, value, window):
    outputs = []
    for q, k, v in zip(*(x.split(lengths) for x in (query, key, value)), strict=True):
        distance = torch.arange(len(q))[:, None] - torch.arange(len(q))[None, :]
        mask = (distance >= 0) & (distance < (window or len(q)))
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        outputs.append(scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(0, 1))
    return torch.cat(outputs).flatten(1)


@settings(deadline=None, max_examples=40)
@given(lengths=LENGTHS, window=st.one_of(st.none(), st.integers(1, 20)))
def test_values_and_gradients_equal_those_of_each_sequence_alone(lengths, window):
    torch.manual_seed(len(lengths))
    inputs = [torch.randn(sum(lengths), heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    expected = one_by_one(lengths, *inputs, window)
    out_gradient = torch.randn_like(expected)
    expected_gradients = torch.autograd.grad(expected, inputs, out_gradient)
    output = core_attention(window)(*inputs, None, packed_seq_params=pack(lengths, CPU))
    torch.testing.assert_close(output, expected, atol=2e-6, rtol=1e-5)
    for gradient, wanted in zip(torch.autograd.grad(output, inputs, out_gradient), expected_gradients, strict=True):
        torch.testing.assert_close(gradient, wanted, atol=1e-5, rtol=1e-4)


@given(lengths=LENGTHS)
def test_each_sequence_is_in_one_group_and_no_group_is_mostly_padding(lengths):
    groups = group_by_length(lengths)
    spans = sorted((start, length) for group in groups for start, length in zip(group.starts, group.lengths, strict=True))
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    assert spans == list(zip(starts, lengths, strict=True))
    for group in groups:
        assert sum(group.lengths) >= 0.75 * max(group.lengths) * len(group.lengths)


def test_many_like_sequences_go_through_one_kernel_call():
    assert len(pack([64] * 32, CPU).batches) == 1


def test_empty_sequences_are_refused():
    with pytest.raises(ValueError, match=r"\[3, 0\]"):
        pack([3, 0], CPU)
    with pytest.raises(ValueError, match="at least one token"):
        pack([], CPU)


def test_lengths_that_context_parallelism_cannot_cut_are_refused():
    with pytest.raises(ValueError, match=r"multiple of 2 cp = 4 tokens each, got lengths \[8, 6\]"):
        pack([8, 6], CPU, cp=2)


def test_sequences_that_pack_did_not_describe_are_refused():
    query = torch.zeros(4, 2, 8)
    with pytest.raises(TypeError, match="pack"):
        core_attention()(query, query, query, None, packed_seq_params=None)
