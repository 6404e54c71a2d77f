"""Attention over packed sequences where Transformer Engine is absent.

`Packed` describes the sequences that lie one after another in a microbatch. `PackedAttention` is a core attention for
Megatron's self-attention: sequences of similar length are padded into one batch and go through scaled-dot-product
attention together, so that many short sequences do not cost one kernel call each. Padding follows each sequence and
the mask is causal, so no real token attends to padding.

With context parallelism a rank has the queries of two chunks of each sequence (`packing.held_positions`) and gathers the keys
and values of all ranks. Transformer Engine passes them around a ring instead; the result is the same.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from trainer.learn.packing import held_positions

_MOST_PADDING = 0.25  # the largest share of padding in a batch of sequences; beyond it another batch is opened


class SimilarSequences(NamedTuple):
    """Sequences to attend together: where each one starts in the microbatch, and its length."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]


class PaddedSequences(NamedTuple):
    """Sequences padded to `longest` tokens: where their queries and keys come from, and where the outputs go."""

    sequences: int
    longest: int
    queries: Tensor  # i64[sequences * longest / cp], indices on this rank; padding repeats the sequence's first token
    real: Tensor  # i64[tokens / cp], the rows of these that are not padding
    positions: Tensor  # i64[sequences, longest / cp], the position of each query in its sequence
    keys: Tensor  # i64[sequences * longest], indices in the whole microbatch; padding repeats the sequence's first token


@dataclass
class Packed(PackedSeqParams):
    """The sequences of one microbatch, as Megatron passes them to attention and rotary embedding (THD)."""

    lengths: tuple[int, ...] = ()
    cp: int = 1
    cp_rank: int = 0

    @cached_property
    def batches(self) -> tuple[PaddedSequences, ...]:
        """Built when the first layer attends; Transformer Engine does not need them."""
        assert self.cu_seqlens_q is not None
        device, held = self.cu_seqlens_q.device, self._held[self.cp_rank]
        return tuple(_batch(group, held, self.cp, device) for group in group_by_length(self.lengths))

    @cached_property
    def restore(self) -> Tensor:
        """i64[tokens / cp], from the order of `batches` back to the order of this rank's tokens."""
        return torch.cat([batch.queries[batch.real] for batch in self.batches]).argsort()

    @cached_property
    def in_order(self) -> Tensor:
        """i64[tokens], from the tokens of all ranks, rank by rank, to the order of the microbatch."""
        assert self.cu_seqlens_q is not None
        return torch.from_numpy(np.concatenate(self._held).argsort()).to(self.cu_seqlens_q.device)

    @cached_property
    def _held(self) -> list[np.ndarray]:
        boundaries = np.cumsum([0, *self.lengths])
        if self.cp == 1:
            return [np.arange(boundaries[-1])]
        return [held_positions(boundaries, self.cp, rank) for rank in range(self.cp)]


def pack(lengths: Sequence[int], device: torch.device, *, cp: int = 1, cp_rank: int = 0) -> Packed:
    """Describes sequences of these lengths, which lie one after another and fill the microbatch.

    Padding at the end of a microbatch is a sequence of its own: include it in `lengths`. With context parallelism the lengths
    are those of the whole sequences, and each is a multiple of 2 cp.
    """
    multiple = 2 * cp if cp > 1 else 1
    if not lengths or min(lengths) < 1 or any(length % multiple for length in lengths):
        need = f"a positive multiple of 2 cp = {multiple} tokens" if cp > 1 else "at least one token"
        raise ValueError(f"packed sequences need {need} each, got lengths {list(lengths)}")
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(device=device, dtype=torch.int32)
    longest = max(lengths)
    return Packed(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        lengths=tuple(lengths),
        cp=cp,
        cp_rank=cp_rank,
    )


def group_by_length(lengths: Sequence[int]) -> list[SimilarSequences]:
    """Groups sequences of similar length, so that each group needs little padding."""
    starts = [0]
    for length in lengths[:-1]:
        starts.append(starts[-1] + length)
    groups: list[list[tuple[int, int]]] = []
    for length, start in sorted(zip(lengths, starts, strict=True), reverse=True):
        if groups and _padding([*groups[-1], (length, start)]) <= _MOST_PADDING:
            groups[-1].append((length, start))
        else:
            groups.append([(length, start)])
    return [SimilarSequences(tuple(s for _, s in group), tuple(n for n, _ in group)) for group in groups]


def _padding(group: list[tuple[int, int]]) -> float:
    """The share of padding in the padded batch; the first sequence of the group is the longest."""
    return 1 - sum(length for length, _ in group) / (group[0][0] * len(group))


def _batch(group: SimilarSequences, held: np.ndarray, cp: int, device: torch.device) -> PaddedSequences:
    longest = group.lengths[0]
    starts, lengths = np.array(group.starts)[:, None], np.array(group.lengths)[:, None]
    offsets = np.arange(longest)[None, :]
    # The tokens of a rank are in the order of the sequences too, so its part of a sequence starts at 1 / cp of the index.
    own = offsets[:, : longest // cp]
    is_real = own < lengths // cp
    queries = starts // cp + np.where(is_real, own, 0)
    return PaddedSequences(
        sequences=len(group.lengths),
        longest=longest,
        queries=torch.from_numpy(queries.flatten()).to(device),
        real=torch.from_numpy(np.flatnonzero(is_real)).to(device),
        positions=torch.from_numpy(held[queries] - starts).to(device),
        keys=torch.from_numpy((starts + np.where(offsets < lengths, offsets, 0)).flatten()).to(device),
    )


class PackedAttention(torch.nn.Module):
    """Causal core attention over packed sequences, with grouped key-value heads and an optional sliding window."""

    def __init__(self, config: Any, layer_number: int, *, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
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
        """query [tokens / cp, heads, dim], key and value [tokens / cp, kv heads, dim] -> [tokens / cp, heads x dim]."""
        packed = packed_seq_params
        if not isinstance(packed, Packed):
            raise TypeError("PackedAttention takes sequences described by trainer.megatron.attention.pack")
        if packed.cp > 1:
            key, value = (_of_all_ranks(x, packed) for x in (key, value))
        outputs = [self._attend(batch, query, key, value) for batch in packed.batches]
        return torch.cat(outputs).index_select(0, packed.restore).flatten(1)

    def _attend(self, batch: PaddedSequences, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The outputs of the real tokens [tokens of the batch / cp, heads, dim], sequence by sequence."""
        q, k, v = (
            x.index_select(0, places).unflatten(0, (batch.sequences, -1)).transpose(1, 2)
            for x, places in ((query, batch.queries), (key, batch.keys), (value, batch.keys))
        )
        plain = q.size(2) == k.size(2) and batch.longest <= self.window
        output = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if plain else self._mask(batch),
            is_causal=plain,
            scale=self.softmax_scale,
            enable_gqa=query.size(1) != key.size(1),
        )
        return output.transpose(1, 2).flatten(0, 1).index_select(0, batch.real)

    def _mask(self, batch: PaddedSequences) -> Tensor:
        """bool [sequences, 1, queries, keys], True where a query sees a key. A padding query sees what the first one sees."""
        distance = batch.positions[:, None, :, None] - torch.arange(batch.longest, device=batch.keys.device)
        return (distance >= 0) & (distance < self.window)


def _of_all_ranks(x: Tensor, packed: Packed) -> Tensor:
    """[tokens / cp, heads, dim] -> [tokens, heads, dim] in the order of the microbatch. All ranks contribute to the gradient."""
    gathered = gather_from_sequence_parallel_region(x, group=parallel_state.get_context_parallel_group())
    return gathered.index_select(0, packed.in_order)
