"""Measured decode latencies: reading a file of them, and what the benchmark's own protocol adds to an engine's speed.

A point is a closed loop of `concurrent_sequences` requests of one length: TTFT and TPOT are means over the requests. What
it shows is not the decode step alone. New prompts are prefilled while others decode, in chunks, so a share of the
prefill lands in TPOT and the rest in TTFT; and requests that the KV cache cannot hold wait, or are retracted.
"""

import csv
from dataclasses import dataclass
from pathlib import Path

from conf.schema import ConfigError
from conf.shapes import ModelShape
from launch.plan.inputs import Cluster
from launch.plan.speed import Constants, Speed

CHUNK_TOKENS = 8192  # SGLang's chunked prefill on an 80 GB GPU
REFERENCE_OUTPUT_TOKENS = 256

H100 = Cluster(
    nodes=1, gpus_per_node=8, gpu_bytes=80e9, hbm_bytes_s=3.35e12, flops=989e12, nvlink_bytes_s=900e9,
    network_bytes_s=50e9, storage_bytes_s=20e9, node_mtbf_s=20 * 86400.0, restart_s=600.0,
)  # fmt: skip
QWEN3_32B = ModelShape(
    name="Qwen3-32B", architecture="Qwen3ForCausalLM", layers=64, hidden=5120, heads=64, kv_heads=8, head_dim=128, ffn=25600,
    vocabulary=151936,
)  # fmt: skip
MODELS = {"Qwen3-32B-bf16": QWEN3_32B}
GPUS = {"H100-SXM-80GB": H100}
COLUMNS = ("gpu", "model", "prompt_tokens", "output_tokens", "concurrent_sequences", "tensor_parallel", "tpot_ms")


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    gpu: str
    model: str
    prompt_tokens: float
    output_tokens: float
    sequences: float
    tp: int
    tpot_s: float
    ttft_s: float = 0.0  # 0: not known; prediction never reads it

    @property
    def turn_s(self) -> float:
        """From a request to its last token."""
        return self.ttft_s + (self.output_tokens - 1) * self.tpot_s


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """How a closed-loop benchmark shares out prefill, and what an overfull cache costs it."""

    prefill_share: float  # share of other requests' prefill that delays a request's tokens, when there are many chunks
    chunk_loss: float  # chunks of a wave whose prefill does not delay decoding
    output_exponent: float  # longer outputs drift further out of step with one another
    retraction: float  # slowing of an oversubscribed engine, by the share of the context that is output


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    tpot_s: float
    turn_s: float
    running: float  # sequences that run at once: what the cache holds of those that were asked for
    step_s: float


def predict(point: Point, constants: Constants, protocol: Protocol) -> Prediction:
    speed = Speed(model=MODELS[point.model], cluster=GPUS[point.gpu], constants=constants)
    whole = point.prompt_tokens + point.output_tokens
    running = min(point.sequences, max(1.0, speed.kv_tokens(point.tp) / whole))
    step_s = speed.decode_step_s(point.tp, running, point.prompt_tokens + point.output_tokens / 2)
    oversubscribed = min(point.sequences / running - 1, 1.0)
    step_s *= 1 + protocol.retraction * oversubscribed * point.output_tokens / whole
    prefill_s = speed.prefill_s(point.tp, point.prompt_tokens)
    chunks = max(1.0, running * point.prompt_tokens / CHUNK_TOKENS)
    share = protocol.prefill_share * max(0.0, 1 - protocol.chunk_loss / chunks)
    share *= (point.output_tokens / REFERENCE_OUTPUT_TOKENS) ** protocol.output_exponent
    others_s = share * running * prefill_s / max(point.output_tokens - 1, 1)
    turn_s = point.sequences * prefill_s + point.sequences / running * point.output_tokens * step_s
    return Prediction(tpot_s=step_s + others_s, turn_s=turn_s, running=running, step_s=step_s)


def read_points(path: Path) -> list[Point]:
    """Raises ConfigError with file, line and what is wrong."""
    if not path.is_file():
        raise ConfigError(f"check={path}: {'a folder, and no file' if path.is_dir() else 'no such file'}")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            if missing := [column for column in COLUMNS if column not in (reader.fieldnames or ())]:
                raise ConfigError(f"{path}: no column {missing[0]!r}; needed are {', '.join(COLUMNS)}")
            points = [_point(row, f"{path}:{reader.line_num}") for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: is not a CSV file ({error})") from None
    if not points:
        raise ConfigError(f"{path}: holds no points")
    return points


def _point(row: dict[str, str], where: str) -> Point:
    for known, key in ((MODELS, "model"), (GPUS, "gpu")):
        if row[key] not in known:
            raise ConfigError(f"{where}: {key} {row[key]!r} is not known to the calibration; it knows {', '.join(known)}")
    numbers = {}
    for key in ("prompt_tokens", "output_tokens", "concurrent_sequences", "tensor_parallel", "tpot_ms"):
        try:
            numbers[key] = float(row[key])
        except (TypeError, ValueError):
            what = "is missing" if row[key] is None else f"{row[key]!r} is not a number"
            raise ConfigError(f"{where}: {key} {what}") from None
        if not 0 < numbers[key] < float("inf"):
            raise ConfigError(f"{where}: {key} {row[key]!r}: must be a finite number above 0")
    tp, heads, per_node = int(numbers["tensor_parallel"]), MODELS[row["model"]].heads, GPUS[row["gpu"]].gpus_per_node
    if tp != numbers["tensor_parallel"] or heads % tp or tp > per_node:
        fitting = max(t for t in range(1, per_node + 1) if heads % t == 0 and t <= max(tp, 1))
        raise ConfigError(
            f"{where}: tensor_parallel {row['tensor_parallel']} must divide the {heads} heads and be at most {per_node}, the "
            f"GPUs of a node; {fitting} does"
        )
    try:
        ttft_s = float(row.get("ttft_ms") or 0.0) / 1e3
    except ValueError:
        ttft_s = 0.0
    return Point(
        gpu=row["gpu"], model=row["model"], prompt_tokens=numbers["prompt_tokens"], output_tokens=numbers["output_tokens"],
        sequences=numbers["concurrent_sequences"], tp=tp, tpot_s=numbers["tpot_ms"] / 1e3, ttft_s=ttft_s,
    )  # fmt: skip
