"""The model on this rank: Megatron's GPTModel, its data-parallel wrapper, its optimizer.

    chunks = build(shape, mesh, dtype=torch.float32)      # one chunk, or several with the interleaved schedule
    hf_weights.load(chunks, shape, mesh, folder)          # before `wrap` and before the optimizer copies the weights
    chunks = wrap(chunks, mesh)
    optimizer, scheduler = build_optimizer(chunks, settings)

On GPUs the layers are Transformer Engine's; without it they are Megatron's own, with our norm and our packed attention.
The functions are the same either way.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from conf.shapes import ModelError, ModelShape, check_layout
from trainer.megatron.attention import Packed, PackedAttention
from trainer.megatron.families import FAMILIES, Cut, Placement, placements
from trainer.process_groups import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """AdamW and its schedule, in optimizer steps (minibatches); the first one already has a learning rate."""

    lr: float
    min_lr: float = 0.0  # where cosine ends; constant ignores it
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0  # not applied to norms and biases
    clip_grad: float = 1.0  # largest global gradient norm; 0 turns clipping off
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_steps: int = 0
    total_steps: int

    def __post_init__(self) -> None:
        if not 0 <= self.min_lr <= self.lr:
            raise ModelError(f"optimizer.min_lr = {self.min_lr} must lie between 0 and optimizer.lr = {self.lr}")
        if not 0 <= self.warmup_steps < self.total_steps:
            raise ModelError(f"optimizer.warmup_steps = {self.warmup_steps} must be less than the run's {self.total_steps} steps")


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm whose weight tells Megatron to sum its gradient when the sequence is split."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension."""
        return rms_norm(x, (x.size(-1),), self.weight, self.eps)


def has_transformer_engine() -> bool:
    """Whether the fused layers can be used: a GPU and Transformer Engine."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def build(
    shape: ModelShape, mesh: Mesh, *, dtype: torch.dtype, use_te: bool | None = None, recompute: str = "none"
) -> list[GPTModel]:
    """Builds this rank's chunks with uninitialised weights; `hf_weights.load` fills every one of them."""
    check_layout(shape, mesh.layout)
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
        chunks.append(model.to(mesh.device))
    _mark_cut_parameters(chunks, shape, mesh)
    return chunks


def _mark_cut_parameters(chunks: list[GPTModel], shape: ModelShape, mesh: Mesh) -> None:
    """Megatron marks cut parameters while it initialises them. Unmarked ones count only on the first tensor-parallel
    rank, and the gradient norm comes out too small.
    """
    for placement in placements(shape, mesh.layout, mesh.stage):
        parameter = parameter_of(chunks, placement)
        if placement.cut is not Cut.WHOLE and not hasattr(parameter, "tensor_model_parallel"):
            dim = 1 if placement.cut is Cut.COLUMNS else 0
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=dim, stride=1)


def transformer_config(
    shape: ModelShape, mesh: Mesh, *, dtype: torch.dtype, use_te: bool, recompute: str = "none"
) -> TransformerConfig:
    """Megatron's configuration. Fusions and overlaps are on where Transformer Engine is."""
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
        # The interleaved schedule computes wrong gradients, silently, with any other pair.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        # Microbatches differ in length, so the stages tell one another the shape before each tensor. The dispatcher matters to
        # mixtures of experts alone, but Megatron 0.16.1 refuses the default one with variable lengths for every model.
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
    # Megatron's own norm refuses sequence parallelism, and its own attention refuses packed sequences.
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


def parameter_of(chunks: Sequence[torch.nn.Module], placement: Placement) -> torch.nn.Parameter:
    """The Megatron parameter of an entry, under the name that the layers of this model use."""
    chunk = bare(chunks[placement.chunk])
    named = chunk.get_parameter
    if placement.fused_name is not None:
        try:
            return named(placement.fused_name)
        except AttributeError:
            pass
    return named(placement.name)


def forward(chunk: torch.nn.Module, tokens: Tensor, positions: Tensor, packed: Packed) -> Tensor:
    """Runs one chunk over one packed microbatch; inside a schedule's forward step, which supplies the chunk's input.

    tokens and positions are i64[1, T]; the lengths of `packed` add up to T. Returns hidden states, on the last chunk after its
    norm, [1, T, h]; with sequence parallelism this rank's part of T. `chosen_rows` and `output_weight` lead on to log-probs.
    """
    # Nothing here upcasts: the log-prob code does, in chunks.
    options = {"fp32_output": False} if bare(chunk).config.bf16 else {}
    output: Tensor = chunk(input_ids=tokens, position_ids=positions, attention_mask=None, packed_seq_params=packed, **options)
    return output


def _pass_on(hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> tuple[Tensor, None]:
    """What the output layer does instead of making the logits of all tokens: it only holds the weight (`learn/logprobs.py`).
    It is still called as a module, so that the hooks which wait for overlapped parameter gathers run.
    """
    return hidden, None


def chosen_rows(chunk: torch.nn.Module, hidden: Tensor, rows: Tensor) -> Tensor:
    """hidden as the last chunk returns it, rows i64[m] of all T -> [m, h], the same on every tensor-parallel rank.

    Backward sums over these ranks what each finds for its part of the vocabulary.
    """
    config = bare(chunk).config
    hidden = hidden.transpose(0, 1)
    if config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden)
    else:
        hidden = copy_to_tensor_model_parallel_region(hidden)
    return hidden[:, 0].index_select(0, rows)


def output_weight(chunk: torch.nn.Module) -> torch.nn.Parameter:
    """The output embedding's rows of this rank [V / tp, h], its padding included; on the last chunk."""
    model = bare(chunk)
    return model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else model.output_layer.weight


def wrap(
    chunks: list[GPTModel], *, overlap_grad_reduce: bool = False, overlap_param_gather: bool = False
) -> list[DistributedDataParallel]:
    """Adds gradient buffers and data-parallel reduction for the distributed optimizer. Weights must be loaded before.

    The overlaps hide reductions and gathers behind computation. After an optimizer step with `overlap_param_gather` a rank has
    only its part of the new weights until the next forward pass: `gather_parameters` brings the rest.
    """
    config = chunks[0].config
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlap_grad_reduce,
        overlap_param_gather=overlap_param_gather,
    )
    wrapped = []
    for number, chunk in enumerate(chunks):
        module = Float16Module(config, chunk) if config.bf16 else chunk
        wrapped.append(DistributedDataParallel(config, ddp, module, disable_bucketing=number > 0))
    config.finalize_model_grads_func = finalize_model_grads
    if overlap_grad_reduce:
        config.no_sync_func = _one_or_list([chunk.no_sync for chunk in wrapped])
        config.grad_sync_func = _one_or_list([chunk.start_grad_sync for chunk in wrapped])
    if overlap_param_gather:
        config.param_sync_func = _one_or_list([chunk.start_param_sync for chunk in wrapped])
    return wrapped


def _one_or_list(functions: list[Any]) -> Any:
    return functions[0] if len(functions) == 1 else functions


def gather_parameters(chunks: Sequence[torch.nn.Module]) -> None:
    """Brings every rank's weights up to date after an optimizer step; all ranks call it before weights leave the model.

    With overlapped gathers a rank has only its own shard of the new weights until the next forward pass.
    """
    for chunk in chunks:
        if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


def build_optimizer(
    chunks: list[DistributedDataParallel], settings: OptimizerSettings
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """The distributed AdamW and its schedule. After each optimizer step call `scheduler.step(1)`."""
    config = chunks[0].config
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            min_lr=settings.min_lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.betas[0],
            adam_beta2=settings.betas[1],
            adam_eps=settings.eps,
            clip_grad=settings.clip_grad,
            bf16=config.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=True,
            overlap_param_gather=chunks[0].ddp_config.overlap_param_gather,
        ),
        chunks,
        use_gloo_process_groups=torch.cuda.is_available(),
    )
    _allocate_adam_state(optimizer)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=settings.total_steps,
        lr_decay_style=settings.schedule,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=settings.total_steps,
        wd_incr_style="constant",
    )
    # Megatron counts from 0, which with warm-up spends the first step at learning rate 0.
    scheduler.step(1)
    return optimizer, scheduler


def _allocate_adam_state(optimizer: MegatronOptimizer) -> None:
    """Gives torch's AdamW its zero state at once: Megatron cannot save or load one that has never stepped."""
    for inner in (part.optimizer for part in optimizer.chained_optimizers):
        if not isinstance(inner, torch.optim.AdamW):
            continue
        for parameter in (parameter for group in inner.param_groups for parameter in group["params"]):
            inner.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def optimizer_bytes(optimizer: MegatronOptimizer) -> int:
    """Of this rank's part: main weights and both moments."""
    states = [part.optimizer.state for part in optimizer.chained_optimizers]
    return sum(
        parameter.nbytes + sum(values.nbytes for key, values in state.items() if key != "step")
        for of in states
        for parameter, state in of.items()
    )
