"""Attention over packed sequences where Transformer Engine is absent.

`Packed` describes the sequences that lie one after another in a microbatch. `PackedAttention` is a core attention for
Megatron's self-attention: sequences of similar length are padded into one batch and go through scaled-dot-product
attention together, so that many short sequences do not cost a kernel call each. Padding lies behind each sequence and
the mask is causal, so no real token ever sees it.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

_MOST_PADDING = 0.25  # share of a batch of sequences that may be padding before another batch is opened


class Lengths(NamedTuple):
    """Sequences to attend together: where each starts in the microbatch, how long it is."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]


class Batch(NamedTuple):
    """Gather and scatter indices of sequences padded to `longest`."""

    sequences: int
    longest: int
    gather: Tensor  # i64[sequences * longest], positions in the microbatch; padding repeats the sequence's first
    real: Tensor  # i64[tokens], which of the gathered rows are no padding


@dataclass
class Packed(PackedSeqParams):
    """The sequences of one microbatch, as Megatron passes them to attention and rotary embedding (THD)."""

    batches: tuple[Batch, ...] = field(default=())
    restore: Tensor | None = None  # i64[tokens], from the order of `batches` back to the microbatch's


def pack(lengths: Sequence[int], device: torch.device) -> Packed:
    """Describes sequences of these lengths, lying one after another and filling the microbatch.

    Padding at the end of a microbatch is a sequence of its own: count it in `lengths`.
    """
    if not lengths or min(lengths) < 1:
        raise ValueError(f"packed sequences need at least one token each, got lengths {list(lengths)}")
    ends = torch.tensor([0, *lengths]).cumsum(0)
    batches = tuple(_batch(group) for group in group_by_length(lengths))
    order = torch.cat([batch.gather[batch.real] for batch in batches])
    bounds = ends.to(device=device, dtype=torch.int32)
    longest = max(lengths)
    return Packed(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        batches=tuple(batch._replace(gather=batch.gather.to(device), real=batch.real.to(device)) for batch in batches),
        restore=order.argsort().to(device),
    )


def group_by_length(lengths: Sequence[int]) -> list[Lengths]:
    """Cuts sequences into groups of similar length, each with little padding."""
    starts = [0]
    for length in lengths[:-1]:
        starts.append(starts[-1] + length)
    groups: list[list[tuple[int, int]]] = []
    for length, start in sorted(zip(lengths, starts, strict=True), reverse=True):
        if groups and _padding([*groups[-1], (length, start)]) <= _MOST_PADDING:
            groups[-1].append((length, start))
        else:
            groups.append([(length, start)])
    return [Lengths(tuple(s for _, s in group), tuple(n for n, _ in group)) for group in groups]


def _padding(group: list[tuple[int, int]]) -> float:
    """Share of the padded batch that would be padding; the first of the group is the longest."""
    return 1 - sum(length for length, _ in group) / (group[0][0] * len(group))


def _batch(group: Lengths) -> Batch:
    longest = group.lengths[0]
    starts = torch.tensor(group.starts)[:, None]
    offsets = torch.arange(longest)[None, :]
    is_real = offsets < torch.tensor(group.lengths)[:, None]
    gather = starts + torch.where(is_real, offsets, 0)
    return Batch(len(group.lengths), longest, gather.flatten(), is_real.flatten().nonzero()[:, 0])


class PackedAttention(torch.nn.Module):
    """Causal core attention over packed sequences, with grouped key-value heads and an optional sliding window."""

    def __init__(self, config: Any, layer_number: int, *, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        if config.context_parallel_size > 1:
            raise NotImplementedError(f"layout.cp = {config.context_parallel_size} needs Transformer Engine; set it to 1")
        self.softmax_scale = softmax_scale
        self.window = config.window_size[0] + 1 if config.window_size else sys.maxsize

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> Tensor:
        """query [tokens, heads, dim], key and value [tokens, kv heads, dim] -> [tokens, heads x dim]."""
        if not isinstance(packed_seq_params, Packed) or packed_seq_params.restore is None:
            raise TypeError("PackedAttention takes sequences described by trainer.attention.pack")
        outputs = [self._attend(batch, query, key, value) for batch in packed_seq_params.batches]
        return torch.cat(outputs).index_select(0, packed_seq_params.restore).flatten(1)

    def _attend(self, batch: Batch, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The real tokens' outputs [tokens of the batch, heads, dim], sequence after sequence."""
        shape = (batch.sequences, batch.longest)
        q, k, v = (x.index_select(0, batch.gather).unflatten(0, shape).transpose(1, 2) for x in (query, key, value))
        windowed = batch.longest > self.window
        output = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=self._window_mask(batch.longest, q.device) if windowed else None,
            is_causal=not windowed,
            scale=self.softmax_scale,
            enable_gqa=query.size(1) != key.size(1),
        )
        return output.transpose(1, 2).flatten(0, 1).index_select(0, batch.real)

    def _window_mask(self, longest: int, device: torch.device) -> Tensor:
        position = torch.arange(longest, device=device)
        distance = position[:, None] - position[None, :]
        return (distance >= 0) & (distance < self.window)
