"""How fast trainer and engines are: one set of formulas, and two sets of constants for them.

`stated` assumes 40% of peak FLOP/s and 75% of peak bandwidth, and no overheads.
`calibrated` is fitted to measurements (`benchmarks/calibrate.py`): it has per-step and per-sequence overheads and the
exchange between tensor-parallel ranks, which `stated` sets to zero.
"""

from dataclasses import dataclass
from functools import cached_property

from conf.shapes import ModelShape
from launch.plan.inputs import Cluster
from launch.plan.model_costs import attention_flops_per_pair, kv_bytes_per_token, weight_bytes


@dataclass(frozen=True, kw_only=True)
class Constants:
    """The constants of the formulas. Fractions refer to the cluster's peak values."""

    name: str
    decode_step_s: float  # fixed time per decode step: kernel launches, latencies, sampling
    sequence_s: float  # added to a decode step per running sequence
    weight_fraction: float  # fraction of HBM bandwidth when reading weights
    kv_fraction: float  # fraction of HBM bandwidth when reading the KV cache
    prefill_fraction: float  # fraction of peak FLOP/s in prefill
    decode_compute_fraction: float  # fraction of peak FLOP/s in decode; 0: only bandwidth limits decode
    exchange_fraction: float  # fraction of one NVLink direction in tensor-parallel exchange; 0: it costs nothing
    skips_embedding: bool  # a decode step reads only one embedding row per sequence; `stated` counts the whole embedding
    engine_memory_fraction: float  # fraction of a GPU's memory for weights and KV cache
    train_fraction: float  # fraction of peak FLOP/s while a pipeline stage computes
    network_fraction: float  # fraction of a NIC's bandwidth
    push_bytes_s: float  # from trainer to engines; 0: the bandwidth of the pipeline stages' NICs
    sources: str


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The constants applied to a model and a cluster."""

    model: ModelShape
    cluster: Cluster
    constants: Constants

    @cached_property
    def decoded_bytes(self) -> float:
        """Bytes of weights that a decode step reads."""
        model = self.model
        skipped = 2 * model.embedding_parameters if self.constants.skips_embedding and not model.tied else 0
        return weight_bytes(model) - skipped

    def decode_step_s(self, tp: int, sequences: float, context_tokens: float) -> float:
        """Time in which each running sequence gets one token; `context_tokens` is their mean context."""
        return sum(self.decode_parts_s(tp, sequences, context_tokens))

    def decode_parts_s(self, tp: int, sequences: float, context_tokens: float) -> tuple[float, float, float]:
        """Seconds for weights, KV cache and overheads. With many sequences, computing takes longer than reading the weights."""
        c, hbm = self.constants, tp * self.cluster.hbm_bytes_s
        weights_s = self.decoded_bytes / (hbm * c.weight_fraction)
        if c.decode_compute_fraction:
            flops = 2 * self.model.parameters * sequences
            weights_s = max(weights_s, flops / (tp * self.cluster.flops * c.decode_compute_fraction))
        cache_s = sequences * context_tokens * kv_bytes_per_token(self.model, tp) / (hbm * c.kv_fraction)
        return weights_s, cache_s, c.decode_step_s + c.sequence_s * sequences

    def prefill_s(self, tp: int, tokens: float, context_tokens: float = 0.0) -> float:
        """Time to prefill `tokens` on top of a context that is already in the cache."""
        c, model = self.constants, self.model
        pairs = tokens * (context_tokens + tokens / 2)
        flops = 2 * model.parameters * tokens + attention_flops_per_pair(model) * pairs
        return flops / (tp * self.cluster.flops * c.prefill_fraction) + tokens * self.exchange_s_per_token(tp)

    def exchange_s_per_token(self, tp: int) -> float:
        """Tensor-parallel exchange in a forward pass: two all-reduces per layer, each of 2 (tp - 1) / tp of the activations."""
        c, model = self.constants, self.model
        if tp == 1 or not c.exchange_fraction:
            return 0.0
        moved = 2 * model.layers * 2 * (tp - 1) / tp * model.hidden * 2
        return moved / (self.cluster.nvlink_bytes_s / 2 * c.exchange_fraction)

    def kv_tokens(self, tp: int) -> float:
        """Tokens that an engine's cache holds; 0 or less when the weights alone do not fit."""
        room = tp * self.cluster.gpu_bytes * self.constants.engine_memory_fraction - weight_bytes(self.model)
        return room / kv_bytes_per_token(self.model, tp)


def stated(compute_fraction: float = 0.40, bandwidth_fraction: float = 0.75) -> Constants:
    return Constants(
        name="stated", sources="planning sheet: fractions of peak, no overheads",
        decode_step_s=0.0, sequence_s=0.0, decode_compute_fraction=0.0, exchange_fraction=0.0, skips_embedding=False,
        weight_fraction=bandwidth_fraction, kv_fraction=bandwidth_fraction, network_fraction=bandwidth_fraction,
        prefill_fraction=compute_fraction, train_fraction=compute_fraction, engine_memory_fraction=0.85, push_bytes_s=0.0,
    )  # fmt: skip
