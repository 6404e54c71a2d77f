"""Jobs that the tests of model, weights and checkpoints run on gloo ranks (see `ranks`), and the tiny models they use."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import transformers
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from conf.schema import TrainerConfig
from conf.shapes import read_shape
from trainer import process_groups
from trainer.learn import packing
from trainer.learn.logprobs import token_logprobs
from trainer.megatron import attention, checkpoint, hf_weights, model, optimizer
from trainer.process_groups import Layout, Mesh

VOCAB = 250  # not a multiple of 4, so TP 4 pads it
PACKINGS = ([5, 17, 3, 40, 1, 8, 22], [30, 30, 20, 16], [96], [48, 1, 47])
TOKENS = sum(PACKINGS[0])

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "llama": ("Llama", {"rope_theta": 500000.0}),
    "llama-3.1": ("Llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0,
                                               "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                               "original_max_position_embeddings": 8192}}),
    "mistral": ("Mistral", {"sliding_window": 16}),
}  # fmt: skip


def make_model(folder: Path, family: str, **changes: Any) -> transformers.PreTrainedModel:
    """Saves a random model with norms and biases that are not their defaults."""
    prefix, options = FAMILIES[family]
    settings = {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 96,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        **options,
        **changes,
    }
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**settings)
    made = getattr(transformers, f"{prefix}ForCausalLM")(config).float()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    made.save_pretrained(folder)
    return made


def tokens_of(number: int) -> Tensor:
    """The tokens of microbatch `number`, and one more: i64[1, TOKENS + 1]."""
    return torch.randint(0, VOCAB, (1, TOKENS + 1), generator=torch.Generator().manual_seed(number))


def expected_logits(made: transformers.PreTrainedModel) -> Tensor:
    """What transformers computes for the sequences of microbatch 0, one at a time: [TOKENS, VOCAB]."""
    with torch.no_grad():
        parts = tokens_of(0)[:, :-1].split(PACKINGS[0], dim=1)
        return torch.cat([made(part).logits[0] for part in parts])


class Held(NamedTuple):
    """Microbatch 0 as a context-parallel rank holds it, each sequence padded for the cut."""

    lengths: list[int]  # of the whole sequences
    tokens: Tensor  # i64[1, T / cp]
    places: Tensor  # i64[T / cp], in the microbatch without padding; TOKENS for padding


def held(number: int, cp: int, rank: int) -> Held:
    multiple = 2 * cp if cp > 1 else 1
    lengths = [-(-length // multiple) * multiple for length in PACKINGS[number]]
    places = torch.full((sum(lengths),), TOKENS)
    starts = np.cumsum([0, *lengths])
    for start, part in zip(starts, torch.arange(TOKENS).split(PACKINGS[number]), strict=False):
        places[start : start + len(part)] = part
    if cp > 1:
        places = places[torch.from_numpy(packing.held_positions(starts, cp, rank))]
    return Held(lengths, tokens_of(number)[:, :-1][:, places.clamp(max=TOKENS - 1)], places)


def forward_step(examples: Iterator[int], chunk: torch.nn.Module) -> tuple[Tensor, Any]:
    """For Megatron's schedule: one packed microbatch, summed cross-entropy on all tokens."""
    number = next(examples)
    tokens = tokens_of(number)
    cp, cp_rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    lengths, mine, _ = held(number, cp, cp_rank)
    packed = attention.pack(lengths, tokens.device, cp=cp, cp_rank=cp_rank)
    output = model.forward(chunk, mine, torch.zeros_like(mine), packed)  # rotary embeddings go by the lengths, not by positions

    def loss(hidden: Tensor, non_loss_data: bool = False) -> Any:
        weight = model.output_weight(chunk)
        if non_loss_data:
            return model.chosen_rows(chunk, hidden, torch.arange(mine.size(1))) @ weight.t()
        rows = model.chosen_rows(chunk, hidden, torch.arange(TOKENS))
        group = parallel_state.get_tensor_model_parallel_group()
        logprobs, _ = token_logprobs(
            rows, weight, tokens[0, 1:], temperature=1.0, vocab_size=VOCAB, vocab_start=group.rank() * len(weight), group=group
        )
        summed = -logprobs.sum()
        return summed, torch.tensor(TOKENS, dtype=torch.int), {"loss": summed.detach().clone()}

    return output, loss


def run_schedule(chunks: list[torch.nn.Module], numbers: list[int], **options: Any) -> list[Any]:
    """Runs the microbatches through the pipeline."""
    iterators = [iter(numbers) for _ in chunks]
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks,
        num_microbatches=len(numbers),
        seq_length=TOKENS,
        micro_batch_size=1,
        **options,
    )


def exported(chunks: list[torch.nn.Module], shape: Any, mesh: Mesh) -> dict[str, Tensor]:
    """The Hugging Face tensors that this rank yields."""
    if not mesh.is_weight_replica_zero:
        return {}
    tensors = hf_weights.hf_tensors(chunks, shape, mesh)
    return {name: values.detach().clone() for name, values in tensors if values is not None}


class Forward(NamedTuple):
    logits: Tensor | None  # [TOKENS, VOCAB] on the last stage; with context parallelism zeros where another rank has the token
    weights: dict[str, Tensor]
    manifest: list[tuple[str, torch.dtype, tuple[int, ...]]]


def forward_and_export(folder: str, layout: Layout, dtype: str = "float32") -> Forward:
    """Loads the folder, computes the logits of microbatch 0, and exports the weights."""
    mesh = process_groups.initialize(layout, seed=1, timeout_s=60)
    shape = read_shape(folder)
    chunks = model.build(shape, mesh, dtype=getattr(torch, dtype))
    hf_weights.load(chunks, shape, mesh, folder)
    if dtype == "bfloat16":
        chunks = optimizer.wrap(chunks)
    numbers = [0] * (layout.pp if layout.vpp > 1 else 1)
    with torch.no_grad():
        outputs = run_schedule(chunks, numbers, forward_only=True, collect_non_loss_data=True)
    logits = None
    if mesh.is_last_stage:
        parts = [torch.empty_like(outputs[0]) for _ in range(layout.tp)]
        dist.all_gather(parts, outputs[0], group=mesh.tp_group)
        logits = torch.zeros(TOKENS + 1, VOCAB)
        logits[held(0, layout.cp, mesh.cp_rank).places] = torch.cat(parts, dim=-1)[:, :VOCAB].float()
        logits = logits[:TOKENS]
    manifest = [tuple(tensor) for tensor in hf_weights.hf_manifest(shape, layout, mesh.stage, getattr(torch, dtype))]
    weights = exported(chunks, shape, mesh)
    process_groups.shutdown()
    return Forward(logits, weights, manifest)


def save_folder(folder: str, target: str, layout: Layout, file_bytes: int) -> None:
    """Loads one Hugging Face folder and writes another."""
    mesh = process_groups.initialize(layout, seed=1, timeout_s=60)
    shape = read_shape(folder)
    chunks = model.build(shape, mesh, dtype=torch.float32)
    hf_weights.load(chunks, shape, mesh, folder)
    hf_weights.save(chunks, shape, mesh, target, description=folder, file_bytes=file_bytes)
    process_groups.shutdown()


class Trained(NamedTuple):
    losses: list[float]  # of each step, summed over the tokens of all ranks
    norms: list[float]
    rates: list[float]
    weights: dict[str, Tensor]
    saves: list[checkpoint.Saved]
    loaded: checkpoint.Loaded | None


def build_job(folder: str, mesh: Mesh, *, load: bool, dtype: str, **wrap_options: Any) -> checkpoint.TrainingState:
    """Model, optimizer and schedule, ready to train."""
    shape = read_shape(folder)
    chunks = model.build(shape, mesh, dtype=getattr(torch, dtype))
    if load:
        hf_weights.load(chunks, shape, mesh, folder)
    wrapped = optimizer.wrap(chunks, **wrap_options)
    trainer = TrainerConfig(lr=1e-2, min_lr_fraction=0.1, warmup_steps=2, lr_schedule="cosine", weight_decay=0.1)
    adam, scheduler = optimizer.build_optimizer(wrapped, trainer, total_steps=10)
    return checkpoint.TrainingState(chunks=wrapped, optimizer=adam, scheduler=scheduler, mesh=mesh)


def train(
    folder: str,
    layout: Layout,
    *,
    steps: range,
    checkpoints: str | None = None,
    save_at: tuple[int, ...] = (),
    dtype: str = "float32",
    overlap: bool = False,
) -> Trained:
    """Trains on the four microbatches each step; resumes from the newest checkpoint where steps do not start at 0."""
    mesh = process_groups.initialize(layout, seed=1, timeout_s=60)
    state = build_job(folder, mesh, load=steps.start == 0, dtype=dtype, overlap_grad_reduce=overlap, overlap_param_gather=overlap)
    store = checkpoint.Checkpoints(checkpoints, state, keep=2) if checkpoints else None
    loaded = checkpoint.load(checkpoint.latest(checkpoints), state) if steps.start else None
    share = len(PACKINGS) // mesh.dp
    mine = list(range(mesh.dp_rank * share, (mesh.dp_rank + 1) * share))
    trained = Trained([], [], [], {}, [], loaded)
    for step in steps:
        _train_step(state, mine, trained)
        if store and step + 1 in save_at:
            trained.saves.extend(store.begin_save(step + 1, {"next_step": step + 1}))
    if store:
        trained.saves.extend(store.wait(timeout_s=60))
    optimizer.gather_parameters(state.chunks)
    trained.weights.update(exported(list(state.chunks), read_shape(folder), mesh))
    process_groups.shutdown()
    return trained


def _train_step(state: checkpoint.TrainingState, numbers: list[int], trained: Trained) -> None:
    for chunk in state.chunks:
        chunk.zero_grad_buffer()
    state.optimizer.zero_grad()
    outcomes = run_schedule(list(state.chunks), numbers, forward_only=False)
    loss = sum((outcome["loss"].double() for outcome in outcomes), torch.zeros((), dtype=torch.float64))
    dist.all_reduce(loss)
    _, norm, _ = state.optimizer.step()
    trained.losses.append(loss.item() / state.mesh.layout.tp)
    trained.norms.append(float(norm))
    trained.rates.append(state.optimizer.param_groups[0]["lr"])
    state.scheduler.step(1)


def merged(results: list[Any]) -> dict[str, Tensor]:
    """The exported tensors of all ranks."""
    return {name: values for result in results for name, values in result.weights.items()}
