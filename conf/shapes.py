"""What a model is and how it is cut over ranks, as pure data: no torch, no megatron.

`ModelSpec` reads the `config.json` of a Hugging Face folder; `Layout` names the parallel sizes; `check` refuses, with
the offending value, a layout that the model cannot take, before anything expensive starts.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.schema import ModelConfig, ShapeConfig, TrainerConfig


class ModelError(ValueError):
    """A model folder or a layout that cannot be used; the message says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Parallel sizes of one training job. The data-parallel size is what the world leaves over."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    vpp: int = 1  # model chunks a pipeline stage; more than 1 is the interleaved schedule
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "cp", "vpp"):
            if getattr(self, name) < 1:
                raise ModelError(f"layout.{name} is {getattr(self, name)}; it must be at least 1")
        if self.sequence_parallel and self.tp == 1:
            raise ModelError("layout.sequence_parallel needs layout.tp > 1")
        if self.vpp > 1 and self.pp == 1:
            raise ModelError(f"layout.vpp is {self.vpp} but layout.pp is 1; the interleaved schedule needs pp > 1")

    @property
    def token_multiple(self) -> int:
        """Tokens of a microbatch are a multiple of it: context parallelism cuts them into 2 x cp parts, sequence parallelism
        cuts a rank's part by tp."""
        context = 2 * self.cp if self.cp > 1 else 1
        return math.lcm(context, self.cp * self.tp if self.sequence_parallel else 1)

    @property
    def ranks_per_replica(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tp * self.pp * self.cp

    def dp(self, world_size: int) -> int:
        """The data-parallel size in a world of `world_size` ranks."""
        if world_size % self.ranks_per_replica:
            raise ModelError(
                f"{world_size} trainer ranks are not a multiple of tp x pp x cp = {self.tp} x {self.pp} x {self.cp}"
                f" = {self.ranks_per_replica}; change the number of ranks or the layout"
            )
        return world_size // self.ranks_per_replica


def layout_of(trainer: TrainerConfig) -> Layout:
    """The layout that a run's configuration asks for."""
    return Layout(tp=trainer.tp, pp=trainer.pp, cp=trainer.cp, vpp=trainer.vpp, sequence_parallel=trainer.sequence_parallel)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Llama 3's frequency scaling; the other constants of the method are fixed (low 1, high 4, 8192 positions)."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A dense decoder-only model, as its config.json describes it."""

    architecture: str  # key of `families.FAMILIES`, e.g. "Qwen2ForCausalLM"
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int  # rows of the embedding in the folder; the tokenizer may know fewer
    max_positions: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    norm_eps: float
    tied: bool  # the output layer is the embedding
    sliding_window: int | None  # tokens a query sees, itself included; None sees all

    @property
    def q_width(self) -> int:
        """Rows of the query projection."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.kv_heads * self.head_dim

    @property
    def matmul_parameters(self) -> int:
        """Weights that every token is multiplied by: attention, gated MLP, output layer."""
        attention = 2 * self.hidden * (self.q_width + self.kv_width)
        return self.layers * (attention + 3 * self.hidden * self.ffn) + self.vocab * self.hidden

    def padded_vocab(self, tp: int) -> int:
        """Embedding rows after padding to a multiple of `tp`."""
        return -(-self.vocab // tp) * tp

    def check(self, layout: Layout) -> None:
        """Refuses a layout that cannot cut this model evenly."""
        for what, size in (("attention heads", self.heads), ("ffn rows", self.ffn)):
            if size % layout.tp:
                raise ModelError(f"layout.tp = {layout.tp} does not divide the model's {size} {what}")
        if self.sliding_window and layout.cp > 1:
            raise ModelError(
                f"layout.cp = {layout.cp}: Transformer Engine cannot cut packed sequences that have a sliding window "
                f"({self.sliding_window} tokens in this model); set trainer.cp to 1"
            )
        if self.kv_heads % layout.tp and layout.tp % self.kv_heads:
            raise ModelError(f"layout.tp = {layout.tp} does not divide the model's {self.kv_heads} key-value heads")
        if self.layers % (layout.pp * layout.vpp):
            raise ModelError(
                f"layout.pp x layout.vpp = {layout.pp} x {layout.vpp} does not divide the model's {self.layers} layers"
            )


def stage_layers(spec: ModelSpec, layout: Layout, stage: int) -> Iterator[tuple[int, int, int]]:
    """Yields (chunk, layer within the chunk, layer of the model) for pipeline stage `stage`, in running order."""
    per_chunk = spec.layers // (layout.pp * layout.vpp)
    for chunk in range(layout.vpp):
        first = (chunk * layout.pp + stage) * per_chunk
        for local in range(per_chunk):
            yield chunk, local, first + local


_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def read_spec(folder: str | Path) -> ModelSpec:
    """Reads the spec of a Hugging Face model folder, refusing what the trainer would compute wrongly."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ModelError(f"no model at {str(folder)!r}: {path} is not there; give the folder of a Hugging Face model")
    try:
        config = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    architecture = (config.get("architectures") or ["(none)"])[0]
    if architecture not in _ARCHITECTURES:
        raise ModelError(f"{path}: architecture {architecture!r} is unknown; known are {', '.join(_ARCHITECTURES)}")
    _refuse_unsupported(config, path)
    try:
        return _spec_of(config, architecture, path)
    except KeyError as error:
        raise ModelError(f"{path}: the key {error} is missing") from error


def spec_of(model: ModelConfig) -> ModelSpec:
    """From the model's folder if it is there, else from its shape, for what can be told without weights."""
    return read_spec(model.path) if (Path(model.path) / "config.json").is_file() else spec_of_shape(model.shape)


def spec_of_shape(shape: ShapeConfig) -> ModelSpec:
    """What a shape leaves open (positions, rope, epsilon) is not part of any tensor's size."""
    if shape.architecture not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise ModelError(f"model.shape.architecture={shape.architecture!r}: without a model folder it must be one of {known}")
    sizes = {key: getattr(shape, key) for key in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn")}
    if missing := [key for key, size in {**sizes, "vocabulary": shape.vocabulary}.items() if size < 1]:
        raise ModelError(f"model.shape.{missing[0]} is not set, and there is no model folder")
    return ModelSpec(
        architecture=shape.architecture,
        vocab=shape.vocabulary,
        max_positions=32_768,
        rope_theta=1e6,
        rope_scaling=None,
        norm_eps=1e-6,
        tied=shape.tied,
        sliding_window=None,
        **sizes,
    )


def _refuse_unsupported(config: dict[str, Any], path: Path) -> None:
    """Options that change the model's arithmetic and are not implemented."""
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{path}: hidden_act {config['hidden_act']!r} is not supported; only 'silu' is")
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise ModelError(f"{path}: {key} = true is not supported")
    for kind in config.get("layer_types") or ():
        if kind not in ("full_attention", "sliding_attention"):
            raise ModelError(f"{path}: layer type {kind!r} is not supported")


def _spec_of(config: dict[str, Any], architecture: str, path: Path) -> ModelSpec:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    heads = config["num_attention_heads"]
    return ModelSpec(
        architecture=architecture,
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        ffn=config["intermediate_size"],
        vocab=config["vocab_size"],
        max_positions=config["max_position_embeddings"],
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        rope_scaling=_rope_scaling(rope, path),
        norm_eps=config["rms_norm_eps"],
        tied=bool(config.get("tie_word_embeddings", False)),
        sliding_window=_sliding_window(config, architecture, path),
    )


def _rope_scaling(rope: dict[str, Any], path: Path) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    if kind == "llama3" and all(rope.get(key) == value for key, value in fixed.items()):
        return RopeScaling(factor=float(rope["factor"]))
    raise ModelError(f"{path}: rope scaling {rope} is not supported; only none, or llama3 with {fixed}")


def _sliding_window(config: dict[str, Any], architecture: str, path: Path) -> int | None:
    window: int | None = config.get("sliding_window")
    if architecture.startswith("Qwen") and not config.get("use_sliding_window", False):
        return None
    if architecture == "LlamaForCausalLM" or window is None:
        return None
    kinds = set(config.get("layer_types") or ["sliding_attention"])
    if kinds == {"full_attention"}:
        return None
    if len(kinds) > 1 or config.get("max_window_layers", 0) not in (0, None):
        raise ModelError(f"{path}: a sliding window on some of the layers is not supported")
    return window
