"""How fast engines and trainer are. The simulator knows nothing else about hardware. Planner or a real run give the values."""

from dataclasses import dataclass

from launch.plan.inputs import PlannedWorkload
from launch.plan.reliability import save_stall_s
from launch.plan.speed import Speed
from launch.plan.training import STATE_BYTES, TrainerSetup, push_s, training_cost


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpeeds:
    """A decode step of n sequences with c context tokens in total takes `decode_s[n] + c * decode_s_per_context_token`."""

    decode_s: tuple[float, ...]  # [concurrency + 1]; the first entry is not used
    decode_s_per_context_token: float
    prefill_s_per_token: float  # nothing is decoded meanwhile
    kv_tokens: float  # capacity of the KV cache


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSpeeds:
    old_logprob_s_per_token: float  # per token of the batch, prompts included
    ref_logprob_s_per_token: float  # 0: no reference
    train_s_per_token: float  # all minibatches
    step_overhead_s: float  # added to every step
    push_s: float  # engines and trainer wait meanwhile
    checkpoint_stall_s: float  # for which the trainer stalls
    checkpoint_write_s: float  # until the checkpoint is complete
    spread: tuple[float, ...] = (1.0,)  # factor on the passes' time, one per step, repeated in a cycle


def engine_speeds(speed: Speed, *, tp: int, concurrency: int, context_tokens: float) -> EngineSpeeds:
    """The cost of prefill is its mean for contexts of this length."""
    return EngineSpeeds(
        decode_s=tuple(speed.decode_step_s(tp, n, 0.0) for n in range(concurrency + 1)),
        decode_s_per_context_token=speed.decode_step_s(tp, 1, 1.0) - speed.decode_step_s(tp, 1, 0.0),
        prefill_s_per_token=speed.prefill_s(tp, context_tokens) / context_tokens,
        kv_tokens=speed.kv_tokens(tp),
    )


def trainer_speeds(speed: Speed, workload: PlannedWorkload, setup: TrainerSetup) -> TrainerSpeeds:
    """The planner's step, divided by floating-point operations: 1 for each log-prob pass, 3 for forward and backward."""
    cost = training_cost(workload, speed, setup)
    pushed_s = push_s(speed, setup)
    token_s = (cost.step_s - pushed_s) / (3 + workload.logprob_passes) / workload.trained_tokens
    return TrainerSpeeds(
        old_logprob_s_per_token=token_s * workload.old_share,
        ref_logprob_s_per_token=token_s if workload.reference else 0.0,
        train_s_per_token=3 * token_s,
        step_overhead_s=0.0,
        push_s=pushed_s,
        checkpoint_stall_s=save_stall_s(speed, setup),
        checkpoint_write_s=STATE_BYTES * speed.model.parameters / speed.cluster.storage_bytes_s,
    )
