"""Published points of training at 32B on H100s: one constant is fitted, the rest is predicted.

Sources: the performance pages and recipes of NeMo-RL 0.5 (Qwen3-32B, GRPO on OpenMathInstruct-2, 64 prompts x 32
completions, at most 4,096 tokens, 3,258 on average, Megatron TP4 PP4, engines of TP4), and Megatron's training rate at 32B with
dynamic packing and without.

Fitted: the rate of a busy stage, such that the packed training rate comes out. Predicted: the rate without packing (padding to
the longest), the step one off (32 GPUs train while 32 generate), and the on-policy step (the same 32 do one after the
other). What the last one lacks is what the planner does not model: handing GPUs over between engine and trainer, the refit, and
vLLM where our measurements are SGLang's.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from conf.shapes import Layout
from launch.plan.generation import FleetSetup, drained_s
from launch.plan.inputs import LengthDistribution, PlannedWorkload
from launch.plan.model_costs import attention_flops_per_pair
from launch.plan.points import H100, QWEN3_32B
from launch.plan.speed import Constants, Speed
from launch.plan.training import Packing, TrainerSetup, training_cost

PACKED_FLOPS, PADDED_FLOPS = 388e12, 283e12  # per GPU and second, counting 6 N and attention
ONE_OFF_S, ON_POLICY_S = 200.0, 376.0
THEIRS = Packing(padding=0.02, imbalance=0.03)  # assumed: they published none; ours is packed better (benchmarks/packing.py)
SETUP = TrainerSetup(layout=Layout(tp=4, pp=4, sequence_parallel=True), dp=2, tokens_per_microbatch=4096)
PROMPT_TOKENS, MEAN_TOKENS, LONGEST_TOKENS = 150.0, 3258.0, 4096
WORKLOAD = PlannedWorkload(
    steps=1, groups=64, completions_per_group=32, minibatches=1, old_share=1.0, prompt_tokens=PROMPT_TOKENS,
    lengths=LengthDistribution(mean_tokens=MEAN_TOKENS - PROMPT_TOKENS, cap_tokens=LONGEST_TOKENS - 150, sigma=1.0),
    reference=True, segment_tokens=LONGEST_TOKENS, sandbox_s=0.0, sandbox_cores=1, target_hours=48.0,
)  # fmt: skip
MODEL = QWEN3_32B


def _speed(constants: Constants) -> Speed:
    return Speed(model=MODEL, cluster=replace(H100, nodes=4), constants=constants)


def training_flops(constants: Constants) -> float:
    """FLOP/s of one GPU while it trains, without log-probs and the push."""
    cost = training_cost(WORKLOAD, _speed(constants), SETUP, THEIRS)
    seconds = {line.name: line.gpu_s for line in cost.lines}
    passes = 3 + 1 + WORKLOAD.reference
    ours = ("forward, backward", "packing", "pipeline bubble", "gradients, parameters", "optimizer")
    spent = sum(seconds[name] for name in ours) + (seconds["attention"] + seconds["uneven stages"]) * 3 / passes
    spent += (seconds["TP exchange"] + seconds["PP exchange"]) * 2 / (passes - 1)
    pairs = WORKLOAD.completions * WORKLOAD.mean_square_length / 2
    flops = 6 * MODEL.parameters * WORKLOAD.trained_tokens + 3 * attention_flops_per_pair(MODEL) * pairs
    return flops / spent


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedPoint:
    what: str
    measured: float
    predicted: float
    unit: str
    fitted: bool

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def published(constants: Constants) -> list[PublishedPoint]:
    speed = _speed(constants)
    train_s = training_cost(WORKLOAD, speed, SETUP, THEIRS).step_s
    generate_s = drained_s(WORKLOAD, speed, FleetSetup(engines=8, tp=4, concurrency=256))
    packed = training_flops(constants)
    row: Callable[..., PublishedPoint] = PublishedPoint
    return [
        row(what="training, packed", measured=PACKED_FLOPS / 1e12, predicted=packed / 1e12, unit="TFLOP/s", fitted=True),
        row(
            what="training, padded", measured=PADDED_FLOPS / 1e12, predicted=packed * MEAN_TOKENS / LONGEST_TOKENS / 1e12,
            unit="TFLOP/s", fitted=False,
        ),
        row(what="one off, 32 + 32 GPUs", measured=ONE_OFF_S, predicted=max(train_s, generate_s), unit="s", fitted=False),
        row(what="on policy, 32 GPUs", measured=ON_POLICY_S, predicted=train_s + generate_s, unit="s", fitted=False),
    ]  # fmt: skip
