"""What a model's shape costs to hold, to move and to attend with."""

from conf.shapes import ModelShape

WEIGHT_BYTES = 2  # bf16, in the trainer and in the engines


def weight_bytes(model: ModelShape) -> float:
    return WEIGHT_BYTES * model.parameters


def kv_bytes_per_token(model: ModelShape, tp: int = 1) -> int:
    """Keys and values of every layer, summed over `tp` ranks. A key-value head is replicated where there are more ranks."""
    return 2 * max(model.kv_heads, tp) * model.head_dim * model.layers * WEIGHT_BYTES


def attention_flops_per_pair(model: ModelShape) -> float:
    """Forward, all layers, one query and one key: scores and the weighted sum of values, 2 operations each."""
    return 4.0 * model.heads * model.head_dim * model.layers
