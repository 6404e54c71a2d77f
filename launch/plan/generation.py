"""What one RL step costs the fleet, what an engine's memory holds, and how long the longest completion takes."""

from dataclasses import dataclass
from functools import cached_property

from conf.schema import ConfigError
from conf.shapes import tensor_parallel_faults
from launch.plan.cost_lines import CostLine, count
from launch.plan.inputs import SLICES, PlannedWorkload
from launch.plan.model_costs import weight_bytes
from launch.plan.speed import Speed


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetSetup:
    engines: int
    tp: int
    concurrency: int

    @property
    def gpus(self) -> int:
        return self.engines * self.tp

    def __str__(self) -> str:
        return f"{self.engines} x TP{self.tp}, {self.concurrency} at once"


def engine_tps(speed: Speed) -> list[int]:
    """Tensor-parallel sizes that cut the model evenly and fill a node."""
    return [tp for tp in speed.model.tensor_parallel_sizes if not speed.cluster.gpus_per_node % tp]


def check_engine(fleet: FleetSetup, speed: Speed) -> None:
    """Raises ConfigError for a TP that cuts the model unevenly or does not fill a node."""
    for fault in tensor_parallel_faults(speed.model, "rollout.engine_tp", fleet.tp):
        raise ConfigError(str(fault))
    if speed.cluster.gpus_per_node % fleet.tp:
        raise ConfigError(
            f"rollout.engine_tp={fleet.tp} does not divide the {speed.cluster.gpus_per_node} GPUs of a node; choose one of "
            f"{', '.join(map(str, engine_tps(speed)))}"
        )


def check_memory(fleet: FleetSetup, workload: PlannedWorkload, speed: Speed) -> None:
    """Raises ConfigError with the smallest TP that holds the weights and the longest completion."""
    if speed.kv_tokens(fleet.tp) < workload.longest_tokens:
        holding = [t for t in engine_tps(speed) if speed.kv_tokens(t) >= workload.longest_tokens]
        wanted = f"the smallest that does is rollout.engine_tp={holding[0]}" if holding else "no engine within a node does"
        raise ConfigError(
            f"rollout.engine_tp={fleet.tp}: {fleet.tp * speed.cluster.gpu_bytes / 1e9:.0f} GB cannot hold the weights "
            f"({weight_bytes(speed.model) / 1e9:.0f} GB) and one completion of {workload.longest_tokens:.0f} tokens; {wanted}"
        )


def sequences_that_fit(workload: PlannedWorkload, speed: Speed, tp: int) -> int:
    """The number of running sequences that the cache holds at their mean context."""
    return max(0, int(speed.kv_tokens(tp) / workload.context_tokens))


def running_sequences(workload: PlannedWorkload, speed: Speed, fleet: FleetSetup, max_staleness: int) -> float:
    """Sequences running in one engine: the smallest of what is asked for, what its cache holds and what the ledger admits."""
    admitted = (max_staleness + 1) * workload.completions / fleet.engines
    return max(1.0, min(fleet.concurrency, sequences_that_fit(workload, speed, fleet.tp), admitted))


@dataclass(frozen=True, kw_only=True)
class GenerationCost:
    """The cost of a busy fleet: its engines are full, with completions in all stages."""

    workload: PlannedWorkload
    speed: Speed
    fleet: FleetSetup
    push_s: float
    running: float  # sequences in one engine

    @cached_property
    def decode_parts_s(self) -> tuple[float, float, float]:
        """Seconds of a decode step for weights, KV cache and overheads."""
        return self.speed.decode_parts_s(self.fleet.tp, self.running, self.workload.context_tokens)

    @cached_property
    def prompt_s(self) -> float:
        return self.speed.prefill_s(self.fleet.tp, self.workload.prompt_tokens)

    @property
    def decode_steps(self) -> float:
        """Summed over the engines."""
        return self.workload.generated_tokens / self.running

    @property
    def retracted_tokens(self) -> float:
        """Tokens in flight when the weights are pushed."""
        return self.fleet.engines * self.running * self.workload.context_tokens

    @cached_property
    def gpu_s_by_part(self) -> dict[str, float]:
        tp, context = self.fleet.tp, self.workload.context_tokens
        weights_s, cache_s, overhead_s = self.decode_parts_s
        again_s = self.speed.prefill_s(tp, context) / context  # per token of context that is prefilled again
        return {
            "decode: weights": self.decode_steps * weights_s * tp,
            "decode: KV cache": self.decode_steps * cache_s * tp,
            "decode: overheads": self.decode_steps * overhead_s * tp,
            "prefill: prompts": self.workload.completions * self.prompt_s * tp,
            "prefill: resumed segments": self.workload.resumed_tokens * again_s * tp,
            "prefill: after the push": self.retracted_tokens * again_s * tp,
            "weight push": self.push_s * self.fleet.gpus,
        }

    @property
    def lines(self) -> tuple[CostLine, ...]:
        c, work = self.speed.constants, self.workload
        weights_s, cache_s, _ = self.decode_parts_s
        prompt_ms = f"{self.prompt_s * 1e3:.0f} ms per prompt; no prompt is shared"
        cache_ms = f"{cache_s * 1e3:.2f} ms per step"
        why = {
            "decode: weights": f"{weights_s * 1e3:.2f} ms x {count(self.decode_steps)} decode steps",
            "decode: KV cache": f"{self.running:.0f} sequences x {work.context_tokens:.0f} tokens: {cache_ms}",
            "decode: overheads": f"{c.decode_step_s * 1e3:.2f} ms per step and {c.sequence_s * 1e6:.0f} us per sequence",
            "prefill: prompts": f"{count(work.prompt_tokens_per_step)} tokens, {prompt_ms}",
            "prefill: resumed segments": f"{count(work.resumed_tokens)} tokens of cut completions, each on another engine",
            "prefill: after the push": f"{count(self.retracted_tokens)} tokens in flight are retracted and prefilled again",
            "weight push": f"all engines pause for {self.push_s:.2f} s",
        }
        return tuple(CostLine(name=name, gpu_s=gpu_s, why=why[name]) for name, gpu_s in self.gpu_s_by_part.items())

    @cached_property
    def gpu_s(self) -> float:
        return sum(self.gpu_s_by_part.values())

    @property
    def step_s(self) -> float:
        return self.gpu_s / self.fleet.gpus

    @property
    def decode_step_s(self) -> float:
        return sum(self.decode_parts_s)

    @property
    def tpot_s(self) -> float:
        """Time between two tokens of one completion, with all interruptions."""
        return self.step_s * self.running * self.fleet.engines / self.workload.generated_tokens

    @property
    def longest_s(self) -> float:
        """Seconds that a completion of the longest length takes."""
        return self.prompt_s + self.workload.lengths.cap_tokens * self.tpot_s

    @property
    def kv_tokens(self) -> float:
        return self.speed.kv_tokens(self.fleet.tp)


def drained_s(workload: PlannedWorkload, speed: Speed, fleet: FleetSetup) -> float:
    """Generation of a synchronous step. All completions of a wave start together and the last one ends alone. Completions beyond
    what an engine runs at once go before that wave, at the full rate."""
    share = workload.completions / fleet.engines
    room = max(1.0, min(fleet.concurrency, sequences_that_fit(workload, speed, fleet.tp)))
    wave = min(share, room)
    prefill_s = share * speed.prefill_s(fleet.tp, workload.prompt_tokens)
    bulk_s = (share - wave) * workload.lengths.mean_tokens / wave * speed.decode_step_s(fleet.tp, wave, workload.context_tokens)
    stride, wave_s = workload.lengths.cap_tokens / SLICES, 0.0
    for at, longer in workload.lengths.survival:
        left = wave * longer
        if left * fleet.engines < 0.5:  # the whole fleet has finished
            break
        wave_s += stride * speed.decode_step_s(fleet.tp, max(left, 1.0), workload.prompt_tokens + at)
    return prefill_s + bulk_s + wave_s
