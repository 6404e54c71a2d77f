"""The model on this rank: Megatron's GPTModel, cut by the layout.

    chunks = build(shape, mesh, dtype=torch.float32)      # one chunk, or several with the interleaved schedule
    hf_weights.load(chunks, shape, mesh, folder)
    hidden = forward(chunks[0], tokens, positions, packed)

On GPUs the layers are Transformer Engine's. Elsewhere they are Megatron's own, with our norm and our packed attention.
The functions are the same either way.
"""

import importlib.util
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from conf.shapes import ModelError, ModelShape
from trainer.megatron.attention import Packed, PackedAttention
from trainer.megatron.families import FAMILIES
from trainer.process_groups import Mesh


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm. With sequence parallelism its weight is marked, so that Megatron sums its gradients."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension."""
        return rms_norm(x, (x.size(-1),), self.weight, self.eps)


def has_transformer_engine() -> bool:
    """Whether this process has a GPU, whose layers are Transformer Engine's. Raises ModelError if that is not installed."""
    if torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is None:
        raise ModelError(
            "this process has a GPU, but Transformer Engine is not installed: run make install-gpu, or set cluster.device=cpu"
        )
    return torch.cuda.is_available()


def build(
    shape: ModelShape, mesh: Mesh, *, dtype: torch.dtype, use_te: bool | None = None, recompute: str = "none"
) -> list[GPTModel]:
    """Builds this rank's chunks with uninitialised weights; `hf_weights.load` fills every one of them."""
    use_te = has_transformer_engine() if use_te is None else use_te
    config = transformer_config(shape, mesh, dtype=dtype, use_te=use_te, recompute=recompute)
    chunks = []
    for chunk in range(mesh.layout.vpp):
        model = GPTModel(
            config=config,
            transformer_layer_spec=_layer_spec(shape, mesh, use_te),
            vocab_size=shape.padded_vocabulary(mesh.layout.tp),
            max_sequence_length=shape.max_positions,
            pre_process=mesh.is_first_stage and chunk == 0,
            post_process=mesh.is_last_stage and chunk == mesh.layout.vpp - 1,
            share_embeddings_and_output_weights=shape.tied,
            position_embedding_type="rope",
            rotary_base=shape.rope_theta,
            rope_scaling=shape.rope_scaling is not None,
            rope_scaling_factor=shape.rope_scaling.factor if shape.rope_scaling else 1.0,
            vp_stage=chunk if mesh.layout.vpp > 1 else None,
        )
        if model.post_process:
            model.output_layer.forward = _pass_on
        _mark_sharded_parameters(model)
        chunks.append(model.to(mesh.device))
    return chunks


def _mark_sharded_parameters(model: GPTModel) -> None:
    """Megatron marks sharded parameters only while it initialises them, which `build` leaves out. An unmarked one counts on
    the first tensor-parallel rank alone, and the gradient norm comes out too small. Transformer Engine marks its own.
    """
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | VocabParallelEmbedding | RowParallelLinear):
            dim = 1 if isinstance(module, RowParallelLinear) else 0
            for parameter in module.parameters(recurse=False):
                if not hasattr(parameter, "tensor_model_parallel"):
                    set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=dim, stride=1)


def transformer_config(
    shape: ModelShape, mesh: Mesh, *, dtype: torch.dtype, use_te: bool, recompute: str = "none"
) -> TransformerConfig:
    """Megatron's configuration. Fusions are on where Transformer Engine is used."""
    layout, family = mesh.layout, FAMILIES[shape.architecture]
    interleaved = layout.vpp > 1
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn,
        window_size=(shape.sliding_window - 1, 0) if shape.sliding_window else None,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        add_qkv_bias=family.qkv_bias,
        qk_layernorm=family.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if interleaved else None,
        context_parallel_size=layout.cp,
        sequence_parallel=layout.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        # With any other pair of values the interleaved schedule computes wrong gradients without an error.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        # Microbatches differ in length, so the stages exchange the shape before each tensor. The dispatcher matters only for
        # mixtures of experts, but Megatron 0.16.1 refuses its default with variable lengths for every model.
        variable_seq_lengths=layout.pp > 1,
        moe_token_dispatcher_type="alltoall",
        calculate_per_token_loss=True,
        use_cpu_initialization=mesh.device.type == "cpu",
        perform_initialization=False,
        masked_softmax_fusion=use_te,
        bias_activation_fusion=use_te,
        bias_dropout_fusion=use_te,
        apply_rope_fusion=use_te,
        gradient_accumulation_fusion=False,
        persist_layer_norm=use_te,
        **_recompute_options(recompute),
    )


def _recompute_options(recompute: str) -> dict[str, Any]:
    """recompute: none | selective | full, as `trainer.recompute`."""
    match recompute:
        case "none":
            return {}
        case "selective":
            return {"recompute_granularity": "selective"}
        case "full":
            return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        case other:
            raise ModelError(f"trainer.recompute={other!r}: choose none, selective or full")


def _layer_spec(shape: ModelShape, mesh: Mesh, use_te: bool) -> ModuleSpec | TransformerBlockSubmodules:
    qk_norm = FAMILIES[shape.architecture].qk_norm
    if use_te:
        return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=qk_norm)
    # Megatron's own norm refuses sequence parallelism, and Megatron's own attention refuses packed sequences.
    layer = gpt_layer_specs.get_gpt_layer_local_spec(qk_layernorm=qk_norm, normalization="RMSNorm")
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    layers = shape.layers // (mesh.layout.pp * mesh.layout.vpp)
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=RMSNorm)


def bare(chunk: torch.nn.Module) -> GPTModel:
    """The GPTModel inside its wrappers."""
    while not isinstance(chunk, GPTModel):
        chunk = chunk.module  # type: ignore[assignment]
    return chunk


def forward(chunk: torch.nn.Module, tokens: Tensor, positions: Tensor, packed: Packed) -> Tensor:
    """Runs one chunk over one packed microbatch. Called in the forward step of a schedule, which supplies the chunk's input.

    tokens and positions are i64[1, T]; the lengths of `packed` add up to T. Returns hidden states [1, T, h], on the last chunk
    after its norm; with sequence parallelism only this rank's part of T. `chosen_rows` and `output_weight` lead on to log-probs.
    """
    # The log-prob code converts to fp32 chunk by chunk, so the output stays as it is.
    options = {"fp32_output": False} if bare(chunk).config.bf16 else {}
    output: Tensor = chunk(input_ids=tokens, position_ids=positions, attention_mask=None, packed_seq_params=packed, **options)
    return output


def _pass_on(hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> tuple[Tensor, None]:
    """Replaces the forward of the output layer, which only holds the weight and computes no logits (see `learn/logprobs.py`).
    The layer is still called as a module, so that the hooks which wait for overlapped parameter gathers run.
    """
    return hidden, None


def chosen_rows(chunk: torch.nn.Module, hidden: Tensor, rows: Tensor) -> Tensor:
    """Takes hidden states as the last chunk returns them, and rows i64[m] of all T; returns [m, h], equal on all tensor-parallel
    ranks. The backward pass adds up what each of these ranks computes for its part of the vocabulary.
    """
    config = bare(chunk).config
    hidden = hidden.transpose(0, 1)
    if config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden)
    else:
        hidden = copy_to_tensor_model_parallel_region(hidden)
    return hidden[:, 0].index_select(0, rows)


def output_weight(chunk: torch.nn.Module) -> torch.nn.Parameter:
    """This rank's rows of the output embedding [V / tp, h] with their padding, on the last chunk."""
    model = bare(chunk)
    return model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else model.output_layer.weight
