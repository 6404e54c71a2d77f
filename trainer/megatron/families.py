"""One table per model family: the names and shapes of its Hugging Face tensors, and where they go in Megatron's parameters.

The same table serves reading, writing and pushing weights. An `Entry` says which Hugging Face tensors (`pieces`) make
up one Megatron parameter and how that parameter is cut over tensor-parallel ranks; `piece_ranges` turns it into rows to
copy. Pure data: no torch, no megatron.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from conf.shapes import Layout, ModelShape


class Cut(Enum):
    """How a Megatron parameter is laid out and cut over tensor-parallel ranks."""

    WHOLE = auto()  # each rank holds all of it
    ROWS = auto()  # dimension 0 in equal parts; the vocabulary is padded for it
    COLUMNS = auto()  # dimension 1 in equal parts
    QKV = auto()  # per key-value head [its query heads | its key | its value]; dimension 0 of that in equal parts
    GATE_UP = auto()  # rank r holds [part r of gate | part r of up]


class Piece(NamedTuple):
    """A Hugging Face tensor: its name, and its shape as attributes of `ModelShape`."""

    name: str
    shape: tuple[str, ...]

    def sizes(self, shape: ModelShape) -> tuple[int, ...]:
        """The shape in numbers."""
        return tuple(getattr(shape, axis) for axis in self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One Megatron parameter. `fused_name`: its name where Transformer Engine fuses the norm into the linear."""

    name: str
    cut: Cut
    pieces: tuple[Piece, ...]
    fused_name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What differs between architectures that share the Llama shape."""

    qkv_bias: bool
    qk_norm: bool
    embedding: Entry
    layer: tuple[Entry, ...]  # names carry {layer}
    final_norm: Entry
    output: Entry


class PieceRange(NamedTuple):
    """Rows (or columns) [start, stop) of piece number `piece`."""

    piece: int
    start: int
    stop: int


class Placement(NamedTuple):
    """An entry in one layer: the chunk of the stage, the Megatron name in that chunk, and the full names of the pieces."""

    chunk: int
    name: str
    fused_name: str | None
    cut: Cut
    pieces: tuple[Piece, ...]
    exported: bool  # False for a second copy (the output layer of a tied model)


_ATTENTION = "model.layers.{layer}.self_attn."
_MLP = "model.layers.{layer}.mlp."
_DECODER = "decoder.layers.{layer}."


def _norm(megatron: str, fused: str | None, hf: str, axis: str) -> Entry:
    return Entry(name=megatron, fused_name=fused, cut=Cut.WHOLE, pieces=(Piece(hf, (axis,)),))


_INPUT_NORM = _norm(
    _DECODER + "input_layernorm.weight",
    _DECODER + "self_attention.linear_qkv.layer_norm_weight",
    "model.layers.{layer}.input_layernorm.weight",
    "hidden",
)
_QKV_WEIGHT = Entry(
    name=_DECODER + "self_attention.linear_qkv.weight",
    cut=Cut.QKV,
    pieces=(
        Piece(_ATTENTION + "q_proj.weight", ("q_width", "hidden")),
        Piece(_ATTENTION + "k_proj.weight", ("kv_width", "hidden")),
        Piece(_ATTENTION + "v_proj.weight", ("kv_width", "hidden")),
    ),
)
_QKV_BIAS = Entry(
    name=_DECODER + "self_attention.linear_qkv.bias",
    cut=Cut.QKV,
    pieces=(
        Piece(_ATTENTION + "q_proj.bias", ("q_width",)),
        Piece(_ATTENTION + "k_proj.bias", ("kv_width",)),
        Piece(_ATTENTION + "v_proj.bias", ("kv_width",)),
    ),
)
_QK_NORM = (
    _norm(_DECODER + "self_attention.q_layernorm.weight", None, _ATTENTION + "q_norm.weight", "head_dim"),
    _norm(_DECODER + "self_attention.k_layernorm.weight", None, _ATTENTION + "k_norm.weight", "head_dim"),
)
_REST = (
    Entry(
        name=_DECODER + "self_attention.linear_proj.weight",
        cut=Cut.COLUMNS,
        pieces=(Piece(_ATTENTION + "o_proj.weight", ("hidden", "q_width")),),
    ),
    _norm(
        _DECODER + "pre_mlp_layernorm.weight",
        _DECODER + "mlp.linear_fc1.layer_norm_weight",
        "model.layers.{layer}.post_attention_layernorm.weight",
        "hidden",
    ),
    Entry(
        name=_DECODER + "mlp.linear_fc1.weight",
        cut=Cut.GATE_UP,
        pieces=(
            Piece(_MLP + "gate_proj.weight", ("ffn", "hidden")),
            Piece(_MLP + "up_proj.weight", ("ffn", "hidden")),
        ),
    ),
    Entry(
        name=_DECODER + "mlp.linear_fc2.weight",
        cut=Cut.COLUMNS,
        pieces=(Piece(_MLP + "down_proj.weight", ("hidden", "ffn")),),
    ),
)
_EMBEDDING = Entry(
    name="embedding.word_embeddings.weight",
    cut=Cut.ROWS,
    pieces=(Piece("model.embed_tokens.weight", ("vocabulary", "hidden")),),
)
_FINAL_NORM = _norm("decoder.final_layernorm.weight", None, "model.norm.weight", "hidden")
_OUTPUT = Entry(
    name="output_layer.weight",
    cut=Cut.ROWS,
    pieces=(Piece("lm_head.weight", ("vocabulary", "hidden")),),
)


def _family(*, qkv_bias: bool = False, qk_norm: bool = False) -> Family:
    bias = (_QKV_BIAS,) if qkv_bias else ()
    norms = _QK_NORM if qk_norm else ()
    return Family(
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        embedding=_EMBEDDING,
        layer=(_INPUT_NORM, _QKV_WEIGHT, *bias, *norms, *_REST),
        final_norm=_FINAL_NORM,
        output=_OUTPUT,
    )


FAMILIES = {
    "LlamaForCausalLM": _family(),
    "MistralForCausalLM": _family(),
    "Qwen2ForCausalLM": _family(qkv_bias=True),
    "Qwen3ForCausalLM": _family(qk_norm=True),
}


def placements(shape: ModelShape, layout: Layout, stage: int) -> Iterator[Placement]:
    """Every parameter of a pipeline stage, chunk by chunk, in one fixed order that all ranks know."""
    family = FAMILIES[shape.architecture]
    if stage == 0:
        yield _placed(family.embedding, chunk=0)
    for chunk, local, layer in _stage_layers(shape, layout, stage):
        for entry in family.layer:
            yield _placed(entry, chunk=chunk, local=local, layer=layer)
    if stage == layout.pp - 1:
        yield _placed(family.final_norm, chunk=layout.vpp - 1)
        if not shape.tied:
            yield _placed(family.output, chunk=layout.vpp - 1)
        elif layout.pp > 1:
            # Megatron keeps a second copy of a tied embedding on the last stage.
            copy = Entry(name=family.output.name, cut=Cut.ROWS, pieces=family.embedding.pieces)
            yield _placed(copy, chunk=layout.vpp - 1, exported=False)


def _stage_layers(shape: ModelShape, layout: Layout, stage: int) -> Iterator[tuple[int, int, int]]:
    """Yields (chunk, layer within the chunk, layer of the model) for pipeline stage `stage`, in running order."""
    per_chunk = shape.layers // (layout.pp * layout.vpp)
    for chunk in range(layout.vpp):
        first = (chunk * layout.pp + stage) * per_chunk
        for local in range(per_chunk):
            yield chunk, local, first + local


def parameter_count(shape: ModelShape) -> int:
    """The parameters of the whole model; a tied embedding counts once."""
    placed = (placement for placement in placements(shape, Layout(), 0) if placement.exported)
    return sum(math.prod(piece.sizes(shape)) for placement in placed for piece in placement.pieces)


def _placed(entry: Entry, *, chunk: int, local: int = 0, layer: int = 0, exported: bool = True) -> Placement:
    return Placement(
        chunk=chunk,
        name=entry.name.format(layer=local),
        fused_name=entry.fused_name.format(layer=local) if entry.fused_name else None,
        cut=entry.cut,
        pieces=tuple(Piece(piece.name.format(layer=layer), piece.shape) for piece in entry.pieces),
        exported=exported,
    )


def piece_ranges(placement: Placement, shape: ModelShape, tp: int, rank: int) -> list[PieceRange]:
    """What tensor-parallel rank `rank` holds of the pieces, in the order of its shard.

    Over all ranks the ranges of a cut parameter cover each row of each piece exactly once. The padding of the
    vocabulary follows the last range.
    """
    dim = 1 if placement.cut is Cut.COLUMNS else 0
    sizes = [piece.sizes(shape)[dim] for piece in placement.pieces]
    match placement.cut:
        case Cut.WHOLE:
            return [PieceRange(0, 0, sizes[0])]
        case Cut.ROWS | Cut.COLUMNS:
            return _window([PieceRange(0, 0, sizes[0])], -(-sizes[0] // tp), rank)
        case Cut.GATE_UP:
            part = sizes[0] // tp
            return [PieceRange(piece, rank * part, (rank + 1) * part) for piece in (0, 1)]
        case Cut.QKV:
            per_head = [size // shape.kv_heads for size in sizes]
            whole = [
                PieceRange(piece, head * rows, (head + 1) * rows)
                for head in range(shape.kv_heads)
                for piece, rows in enumerate(per_head)
            ]
            return _window(whole, sum(sizes) // tp, rank)


def _window(whole: list[PieceRange], length: int, rank: int) -> list[PieceRange]:
    """The part [rank x length, (rank + 1) x length) of the ranges laid end to end."""
    first, last = rank * length, (rank + 1) * length
    inside = []
    position = 0
    for piece, start, stop in whole:
        low, high = max(first - position, 0), min(last - position, stop - start)
        if low < high:
            inside.append(PieceRange(piece, start + low, start + high))
        position += stop - start
    return inside
