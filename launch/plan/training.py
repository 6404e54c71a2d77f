"""What one RL step costs the trainer in time and in GPU memory, for a layout over TP, PP, CP and DP."""

from dataclasses import dataclass, replace
from math import ceil

from conf.schema import ConfigError
from conf.shapes import Layout, ModelShape
from launch.plan.cost_lines import CostLine, count, gb, total
from launch.plan.inputs import Cluster, PlannedWorkload
from launch.plan.model_costs import WEIGHT_BYTES, attention_flops_per_pair, kv_bytes_per_token, weight_bytes
from launch.plan.speed import Speed

GRADIENT_BYTES = 4  # fp32, accumulated over microbatches, not sharded
OPTIMIZER_BYTES = 12  # fp32 master weights and two moments, sharded over DP x CP
STATE_BYTES = WEIGHT_BYTES + OPTIMIZER_BYTES  # per parameter of a checkpoint
PCIE_BYTES_S = 25e9  # per GPU, to and from pinned memory
USABLE = 0.92  # fraction of a GPU's memory; CUDA, NCCL and the allocator take the rest
LOGITS_BYTES = 6  # per logit: bf16, and fp32 for the softmax


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """The fraction of the passes' time that packing wastes."""

    padding: float  # fraction of the tokens
    imbalance: float  # fraction of the time that DP ranks wait for one another


OURS = Packing(padding=0.001, imbalance=0.004)  # the largest values that `python benchmarks/packing.py` shows


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSetup:
    """How the trainer is spread over its GPUs, and how it fills their memory."""

    layout: Layout
    dp: int
    tokens_per_microbatch: int
    recompute: bool = False  # activations are computed again in the backward pass

    @property
    def gpus(self) -> int:
        return self.layout.ranks_per_replica * self.dp

    def __str__(self) -> str:
        layout = self.layout
        cp = f" CP{layout.cp}" if layout.cp > 1 else ""
        return f"TP{layout.tp} PP{layout.pp}{cp} DP{self.dp}{' recompute' if self.recompute else ''}"


def check_node(layout: Layout, model: ModelShape, cluster: Cluster) -> None:
    """Raises ConfigError where tensor parallelism would reach beyond a node."""
    if layout.tp > cluster.gpus_per_node:
        fits = max(tp for tp in model.tensor_parallel_sizes if tp <= cluster.gpus_per_node)
        raise ConfigError(
            f"trainer.tp={layout.tp} reaches beyond a node of {cluster.gpus_per_node} GPUs (cluster.gpus_per_node); "
            f"trainer.tp={fits} is the largest that does not"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingMemory:
    """Bytes on the fullest GPU. Its activations are those of the first pipeline stage and its logits those of the last one."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float

    @property
    def bytes(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits


def stage_parameters(model: ModelShape, setup: TrainerSetup) -> float:
    """Parameters on one GPU: its share of the layers and, on the first and the last stage, of an embedding."""
    layout = setup.layout
    embedding = model.embedding_parameters
    layers = model.parameters - embedding * (1 if model.tied else 2)
    own = embedding * (2 if layout.pp == 1 and not model.tied else 1)
    return (layers / layout.pp + own) / layout.tp


def activation_bytes_per_token(model: ModelShape, setup: TrainerSetup) -> float:
    """Activation bytes of one layer that are kept for the backward pass: the inputs of both norms and of the projections after
    them, queries, keys, values, the attention output, gate, up and their product. Recomputation keeps only the layer's input."""
    layout = setup.layout
    along_the_sequence, along_the_width = model.hidden, 0  # sharded by sequence parallelism, and by tensor parallelism
    if not setup.recompute:
        along_the_sequence = 4 * model.hidden
        along_the_width = 2 * model.q_width + 2 * max(model.kv_heads, layout.tp) * model.head_dim + 3 * model.ffn
    return WEIGHT_BYTES * (along_the_sequence / (layout.tp if layout.sequence_parallel else 1) + along_the_width / layout.tp)


def training_memory(model: ModelShape, setup: TrainerSetup) -> TrainingMemory:
    layout = setup.layout
    parameters = stage_parameters(model, setup)
    tokens = setup.tokens_per_microbatch / layout.cp
    in_flight = layout.pp * (model.layers // layout.pp)  # 1F1B: the first stage holds as many microbatches as there are stages
    activations = tokens * in_flight * activation_bytes_per_token(model, setup)
    if setup.recompute:  # one layer at a time keeps everything
        whole = replace(setup, recompute=False)
        activations += tokens * activation_bytes_per_token(model, whole)
    return TrainingMemory(
        weights=WEIGHT_BYTES * parameters,
        gradients=GRADIENT_BYTES * parameters,
        optimizer=OPTIMIZER_BYTES * parameters / (setup.dp * layout.cp),
        activations=activations,
        logits=LOGITS_BYTES * tokens * model.vocabulary / layout.tp,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingCost:
    setup: TrainerSetup
    lines: tuple[CostLine, ...]
    memory: TrainingMemory

    @property
    def gpu_s(self) -> float:
        return total(self.lines)

    @property
    def step_s(self) -> float:
        return self.gpu_s / self.setup.gpus


def push_s(speed: Speed, setup: TrainerSetup) -> float:
    """Each pipeline stage broadcasts its part from one GPU's NIC."""
    stages = setup.layout.pp * speed.cluster.network_bytes_s * speed.constants.network_fraction
    return weight_bytes(speed.model) / (speed.constants.push_bytes_s or stages)


def compute_lines(workload: PlannedWorkload, speed: Speed, *, recompute: bool) -> tuple[list[CostLine], float]:
    """The costs that do not depend on the layout, and the operations of attention in one forward pass over the batch."""
    model, tokens = speed.model, workload.trained_tokens
    rate = speed.cluster.flops * speed.constants.train_fraction
    n, t = count(model.parameters), count(tokens)
    forward_s = 2 * model.parameters * tokens / rate
    passes = 3 + recompute + workload.logprob_passes
    pairs = workload.completions * workload.mean_square_length / 2
    attention = attention_flops_per_pair(model) * pairs
    lines = [
        CostLine(name="forward, backward", gpu_s=3 * forward_s, why=f"6 x {n} x {t} tokens at {rate / 1e12:.0f} TFLOP/s"),
    ]
    if share := workload.old_share:
        part = "" if share == 1 else f"; trainer.reuse_first_forward saves {1 - share:.0%}"
        lines.append(
            CostLine(name="old log-probs", gpu_s=share * forward_s, why=f"2 x {n} x {count(share * tokens)} tokens{part}")
        )
    if workload.reference:
        lines.append(CostLine(name="reference log-probs", gpu_s=forward_s, why=f"2 x {n} x {t} tokens; algo.kl_coef=0 saves it"))
    if recompute:
        lines.append(CostLine(name="recomputation", gpu_s=forward_s, why=f"2 x {n} x {t} tokens, because activations do not fit"))
    lines.append(CostLine(name="attention", gpu_s=passes * attention / rate, why=f"{passes:g} x {count(pairs)} causal pairs"))
    return lines, attention


def training_cost(workload: PlannedWorkload, speed: Speed, setup: TrainerSetup, packing: Packing = OURS) -> TrainingCost:
    lines, attention = compute_lines(workload, speed, recompute=setup.recompute)
    lines += _waiting_lines(workload, speed, setup, attention, packing)
    lines += _moving_lines(workload, speed, setup)
    return TrainingCost(setup=setup, lines=tuple(lines), memory=training_memory(speed.model, setup))


def _waiting_lines(
    workload: PlannedWorkload, speed: Speed, setup: TrainerSetup, attention: float, packing: Packing
) -> list[CostLine]:
    """Padding, and time in which ranks and stages wait for one another."""
    layout = setup.layout
    model, rate = speed.model, speed.cluster.flops * speed.constants.train_fraction
    forward_s = (2 * model.parameters * workload.trained_tokens + attention) / rate
    train_s = (3 + setup.recompute) * forward_s
    logprob_s = workload.logprob_passes * forward_s
    packed = workload.trained_tokens * (1 + packing.padding) / (setup.dp * setup.tokens_per_microbatch)
    microbatches, of_batch = ceil(packed / workload.minibatches), ceil(packed)
    waste_s = (packing.padding + packing.imbalance) * (train_s + logprob_s)
    bubble_s = train_s * (layout.pp - 1) / microbatches + logprob_s * (layout.pp - 1) / of_batch
    layers = model.parameters - model.embedding_parameters * (1 if model.tied else 2)
    output = model.embedding_parameters
    uneven = (layers / layout.pp + output) / ((layers + output) / layout.pp) - 1
    return [
        CostLine(
            name="packing", gpu_s=waste_s,
            why=f"{packing.padding:.1%} padding, {packing.imbalance:.1%} imbalance between DP ranks",
        ),
        CostLine(
            name="pipeline bubble", gpu_s=bubble_s,
            why=f"(PP - 1) / microbatches = {layout.pp - 1}/{microbatches} per minibatch, "
                f"{layout.pp - 1}/{of_batch} for log-probs",
        ),
        CostLine(
            name="uneven stages", gpu_s=uneven * (train_s + logprob_s),
            why=f"the last stage also holds the output layer: {uneven:.1%} longer than the mean",
        ),
    ]  # fmt: skip


def _moving_lines(workload: PlannedWorkload, speed: Speed, setup: TrainerSetup) -> list[CostLine]:
    layout = setup.layout
    model, cluster = speed.model, speed.cluster
    network = cluster.network_bytes_s * speed.constants.network_fraction
    parameters, gpus, shards = stage_parameters(model, setup), setup.gpus, setup.dp * layout.cp
    passes = 2 + setup.recompute + workload.logprob_passes
    exchange_s = workload.trained_tokens * passes * speed.exchange_s_per_token(layout.tp) * layout.tp
    reduced = (GRADIENT_BYTES + WEIGHT_BYTES) * parameters * (shards - 1) / shards
    optimizer = (2 * OPTIMIZER_BYTES + GRADIENT_BYTES + WEIGHT_BYTES) * parameters / shards
    lines = [
        CostLine(
            name="TP exchange", gpu_s=exchange_s,
            why=f"{passes:g} passes of {speed.exchange_s_per_token(layout.tp) * 1e6:.1f} us per token on {layout.tp} GPUs",
        ),
        CostLine(
            name="gradients, parameters", gpu_s=workload.minibatches * reduced / network * gpus,
            why=f"{workload.minibatches} x {gb(reduced)} per GPU over {network / 1e9:.0f} GB/s, not overlapped",
        ),
        CostLine(
            name="optimizer", gpu_s=workload.minibatches * optimizer / (cluster.hbm_bytes_s * 0.75) * gpus,
            why=f"{workload.minibatches} x {gb(optimizer)} per GPU through HBM",
        ),
    ]  # fmt: skip
    if layout.pp > 1:
        hops_s = workload.trained_tokens * passes * (layout.pp - 1) * model.hidden * WEIGHT_BYTES / network
        lines.append(
            CostLine(name="PP exchange", gpu_s=hops_s, why=f"activations across {layout.pp - 1} stage borders, not overlapped")
        )
    if layout.cp > 1:
        within = layout.tp * layout.cp <= cluster.gpus_per_node
        link = cluster.nvlink_bytes_s / 2 * speed.constants.network_fraction if within else network
        ring_s = workload.trained_tokens * (passes + 1) * kv_bytes_per_token(model, layout.tp) * (layout.cp - 1) / link
        where = "within a node" if within else "across nodes"
        lines.append(CostLine(name="CP exchange", gpu_s=ring_s, why=f"keys and values around a ring of {layout.cp} {where}"))
    if workload.reference:
        swap_s = 2 * WEIGHT_BYTES * parameters / PCIE_BYTES_S
        lines.append(
            CostLine(name="reference swap", gpu_s=swap_s * gpus, why=f"{gb(WEIGHT_BYTES * parameters)} per GPU, in and out")
        )
    seconds = push_s(speed, setup)
    why = f"{gb(weight_bytes(model))} in {seconds:.2f} s, while the trainer waits"
    lines.append(CostLine(name="weight push", gpu_s=seconds * gpus, why=why))
    return lines
