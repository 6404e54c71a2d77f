"""The shape of a model and the layout that cuts it over ranks, as pure data: no torch, no megatron.

`read_shape` reads the `config.json` of a Hugging Face folder. `check_layout` refuses a layout that cannot cut the model evenly,
before anything expensive starts. The trainer, the planner and the doctor all ask it, so they always agree.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.schema import ConfigError, ModelConfig, TrainerConfig


class ModelError(ConfigError):
    """A model folder or a layout that cannot be used; the message says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Parallel sizes of one training job. The data-parallel size follows from the number of ranks."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    vpp: int = 1  # model chunks per pipeline stage; more than 1 selects the interleaved schedule
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "cp", "vpp"):
            if getattr(self, name) < 1:
                raise ModelError(f"trainer.{name}={getattr(self, name)}: must be at least 1")
        if self.sequence_parallel and self.tp == 1:
            raise ModelError("trainer.sequence_parallel=true needs trainer.tp above 1: it shards along the tensor-parallel group")
        if self.vpp > 1 and self.pp == 1:
            raise ModelError(f"trainer.vpp={self.vpp} needs trainer.pp above 1: it interleaves the chunks of pipeline stages")

    @property
    def token_multiple(self) -> int:
        """The number of tokens in a microbatch is a multiple of this: context parallelism cuts them into 2 x cp parts, and
        sequence parallelism cuts the part of each rank by tp."""
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
class ModelShape:
    """A dense decoder-only model, as its config.json describes it. The defaults stand for what no tensor's size depends on."""

    name: str = "model"  # the folder's name, for messages
    architecture: str  # key of `trainer.megatron.families.FAMILIES`, e.g. "Qwen2ForCausalLM"
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int  # rows of the embedding in the folder; the tokenizer may know fewer
    tied: bool = False  # the output layer is the embedding
    stated_parameters: int = 0  # a round figure to plan with; 0: count the parameters
    max_positions: int = 32_768
    rope_theta: float = 1e6
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-6
    sliding_window: int | None = None  # tokens that a query sees, itself included; None: it sees all

    @property
    def q_width(self) -> int:
        """Rows of the query projection."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.kv_heads * self.head_dim

    @property
    def layer_parameters(self) -> int:
        """Weights of all decoder layers: attention and gated MLP, without norms and biases."""
        return self.layers * self.hidden * (2 * (self.q_width + self.kv_width) + 3 * self.ffn)

    @property
    def embedding_parameters(self) -> int:
        """Weights of the embedding; an output layer that is not tied has as many again."""
        return self.vocabulary * self.hidden

    @property
    def matmul_parameters(self) -> int:
        """Weights that every token is multiplied by: attention, gated MLP, output layer."""
        return self.layer_parameters + self.embedding_parameters

    @property
    def parameters(self) -> int:
        """The stated number of parameters, or else the sum of all matrices (norms and biases are left out)."""
        return self.stated_parameters or self.layer_parameters + self.embedding_parameters * (1 if self.tied else 2)

    @property
    def tensor_parallel_sizes(self) -> tuple[int, ...]:
        """Tensor-parallel sizes that cut the model evenly, for the trainer and for an engine: both replicate key-value heads
        where there are more ranks than heads."""
        return tuple(tp for tp in range(1, self.heads + 1) if not _uneven(self, tp))

    def padded_vocabulary(self, tp: int) -> int:
        """Embedding rows after padding to a multiple of `tp`."""
        return -(-self.vocabulary // tp) * tp


@dataclass(frozen=True, slots=True)
class LayoutFault:
    """Why a layout cannot cut a model."""

    said: str  # names the setting, its value and what it does not divide
    remedy: str

    def __str__(self) -> str:
        return f"{self.said}; {self.remedy}"


def check_layout(shape: ModelShape, layout: Layout) -> None:
    """Raises ModelError for a layout that cannot cut this model evenly."""
    for fault in layout_faults(shape, layout):
        raise ModelError(str(fault))


def check_same_shape(model: ModelShape, teacher: ModelShape) -> None:
    """Raises ModelError if the teacher's tensors do not fit into the modules of the model."""
    sizes = ("architecture", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocabulary", "tied", "rope_theta")
    rest = ("rope_scaling", "norm_eps", "sliding_window")
    different = [name for name in (*sizes, *rest) if getattr(model, name) != getattr(teacher, name)]
    if different:
        listed = ", ".join(f"{name} {getattr(teacher, name)} for {getattr(model, name)}" for name in different)
        raise ModelError(
            f"algo.teacher={teacher.name} has another shape than model.path ({listed}), so it cannot take the place of the "
            "reference policy: set algo.teacher_on=engine, or name a teacher of the same shape"
        )


def layout_faults(shape: ModelShape, layout: Layout) -> Iterator[LayoutFault]:
    """Every reason why the trainer cannot cut this model by this layout."""
    yield from tensor_parallel_faults(shape, "trainer.tp", layout.tp)
    if shape.layers % (layout.pp * layout.vpp):
        setting = "trainer.pp" if layout.vpp == 1 else "trainer.pp x trainer.vpp"
        sizes = [pp for pp in range(1, shape.layers + 1) if not shape.layers % pp]
        yield LayoutFault(
            f"{setting}={layout.pp * layout.vpp} does not divide the {shape.layers} layers of {shape.name}", _choose(sizes)
        )
    if shape.sliding_window and layout.cp > 1:
        yield LayoutFault(
            f"trainer.cp={layout.cp}: Transformer Engine cannot cut packed sequences that have a sliding window "
            f"({shape.sliding_window} tokens in {shape.name})",
            "set trainer.cp=1",
        )


def tensor_parallel_faults(shape: ModelShape, setting: str, tp: int) -> Iterator[LayoutFault]:
    """Why tensor parallelism of `tp`, the value of `setting`, cannot cut this model. The rule is the same in an engine."""
    for what in _uneven(shape, tp):
        yield LayoutFault(f"{setting}={tp} does not divide the {what} of {shape.name}", _choose(shape.tensor_parallel_sizes))


def _uneven(shape: ModelShape, tp: int) -> list[str]:
    """What `tp` ranks cannot share evenly. Key-value heads are replicated where `tp` is a multiple of their number."""
    kv_heads_fit = not shape.kv_heads % tp or not tp % shape.kv_heads
    return [
        what
        for what, fits in (
            (f"{shape.heads} attention heads", not shape.heads % tp),
            (f"{shape.kv_heads} key-value heads", kv_heads_fit),
            (f"{shape.ffn} feed-forward columns", not shape.ffn % tp),
        )
        if not fits
    ]


def _choose(sizes: Sequence[int]) -> str:
    return f"choose one of {', '.join(map(str, sizes))}"


QUANTISED = (
    "these weights are quantised, and training needs them in full precision; "
    "give model.path the same model in bfloat16, or save it dequantised first"
)
_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # names of their number in config.json


def read_shape(folder: str | Path) -> ModelShape:
    """Reads the shape of a Hugging Face model folder, and refuses what the trainer would compute wrongly."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ModelError(f"no model at {str(folder)!r}: {path} is not there; give the folder of a Hugging Face model")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} does not describe a model; give the folder of a Hugging Face model")
    _refuse_unsupported(config, path)
    try:
        return _shape_from(config, path)
    except KeyError as error:
        raise ModelError(f"{path}: the key {error} is missing; a dense Llama, Mistral or Qwen model has it") from error


def shape_of(model: ModelConfig) -> ModelShape:
    """The shape from the model's folder if it is there, else from `model.shape`, for what needs no weights."""
    folder = Path(model.path)
    if (folder / "config.json").is_file():
        return read_shape(folder)
    shape = model.shape
    if shape.architecture not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise ModelError(f"model.shape.architecture={shape.architecture!r}: without a model folder it must be one of {known}")
    sizes = {key: getattr(shape, key) for key in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocabulary")}
    for key, size in sizes.items():
        if size < 1:
            raise ModelError(
                f"model.shape.{key}={size}: give model.path a Hugging Face folder that exists, or every field of model.shape "
                "(see conf/model/kestrel_32b.yaml)"
            )
    return ModelShape(
        name=folder.name, architecture=shape.architecture, tied=shape.tied, stated_parameters=shape.parameters, **sizes
    )


def _refuse_unsupported(config: dict[str, Any], path: Path) -> None:
    """Architectures and options that the trainer does not implement."""
    if experts := next((config[key] for key in _EXPERTS if config.get(key)), 0):
        raise ModelError(f"{path} describes a mixture of {experts} experts; only dense decoders are supported")
    architecture = (config.get("architectures") or ["(none)"])[0]
    if architecture not in _ARCHITECTURES:
        raise ModelError(f"{path}: architecture {architecture!r} is unknown; known are {', '.join(_ARCHITECTURES)}")
    for key in ("quantization_config", "compression_config"):
        if quantised := config.get(key):
            method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else quantised
            raise ModelError(f"{path} has a {key} (method {method!r}): {QUANTISED}")
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{path}: hidden_act {config['hidden_act']!r} is not supported; only 'silu' is")
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise ModelError(f"{path}: {key} = true is not supported")
    for kind in config.get("layer_types") or ():
        if kind not in ("full_attention", "sliding_attention"):
            raise ModelError(f"{path}: layer type {kind!r} is not supported")


def _shape_from(config: dict[str, Any], path: Path) -> ModelShape:
    def count(key: str, otherwise: int = 0) -> int:
        value = config.get(key) or otherwise or config[key]
        if not isinstance(value, int) or value < 1:
            raise ModelError(f"{path}: {key} is {value!r}, and must be a whole number of at least 1")
        return value

    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    architecture, heads, hidden = config["architectures"][0], count("num_attention_heads"), count("hidden_size")
    return ModelShape(
        name=path.parent.name,
        architecture=architecture,
        layers=count("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=count("num_key_value_heads", heads),
        head_dim=count("head_dim", max(1, hidden // heads)),
        ffn=count("intermediate_size"),
        vocabulary=count("vocab_size"),
        max_positions=count("max_position_embeddings"),
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
