"""The planner's inputs: a model, a cluster and a workload, read from a run's configuration."""

from dataclasses import dataclass
from functools import cached_property
from math import erf, exp, log, sqrt

from conf.schema import ConfigError, RunConfig
from conf.shapes import ModelShape, shape_of
from rollout.servers import frozen_gpus

DAY_S = 86_400.0
SLICES = 256
WIDEST_SIGMA = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    nodes: int
    gpus_per_node: int
    gpu_bytes: float  # memory of one GPU
    hbm_bytes_s: float
    flops: float  # dense bf16, peak of one GPU
    nvlink_bytes_s: float  # both directions together
    network_bytes_s: float  # per GPU's NIC, one direction
    storage_bytes_s: float  # the whole cluster
    node_mtbf_s: float
    restart_s: float  # from a lost trainer node to training again, without the time of repeated steps
    frozen_gpus: int = 0  # GPUs that the servers of a teacher and a judge model take

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def shared_gpus(self) -> int:
        """Those that trainer and fleet share."""
        return self.gpus - self.frozen_gpus

    @property
    def unit(self) -> str:
        """The unit that is split between trainer and fleet: nodes, or the GPUs of a single node."""
        return "nodes" if self.nodes > 1 else "GPUs"


@dataclass(frozen=True, kw_only=True)
class LengthDistribution:
    """Completion lengths: a lognormal distribution, cut at the cap. The mean is that of the cut lengths."""

    mean_tokens: float
    cap_tokens: int
    sigma: float  # standard deviation of the log-lengths

    def __post_init__(self) -> None:
        if not 0 < self.mean_tokens < self.cap_tokens:
            raise ConfigError(
                f"plan.completion_tokens={self.mean_tokens:g}: must lie between 0 and rollout.max_completion_tokens="
                f"{self.cap_tokens}, the longest completion"
            )
        if not 0 < self.sigma <= WIDEST_SIGMA:
            raise ConfigError(
                f"plan.length_sigma={self.sigma:g}: the spread of the log of the length must be above 0 and at most "
                f"{WIDEST_SIGMA:g}; 1 means that the 99th percentile is ten medians"
            )

    @cached_property
    def mu(self) -> float:
        """The log of the median that gives this mean."""
        low, high = log(self.mean_tokens) - 20.0, log(self.cap_tokens) + 20.0
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if self._moment(1, middle) < self.mean_tokens else (low, middle)
        return low

    @property
    def median_tokens(self) -> float:
        return min(exp(self.mu), self.cap_tokens)

    @cached_property
    def mean_square(self) -> float:
        return self._moment(2, self.mu)

    @property
    def capped_fraction(self) -> float:
        return self.longer_than(self.cap_tokens)

    def longer_than(self, tokens: float) -> float:
        """Share of completions that are longer than this number of tokens."""
        return 1.0 - _normal((log(tokens) - self.mu) / self.sigma) if tokens > 0 else 1.0

    @cached_property
    def survival(self) -> tuple[tuple[float, float], ...]:
        """(token, share of completions that are longer), at the middles of `SLICES` equal slices up to the cap."""
        middles = [(i + 0.5) * self.cap_tokens / SLICES for i in range(SLICES)]
        return tuple((at, self.longer_than(at)) for at in middles)

    def _moment(self, order: int, mu: float) -> float:
        """A moment of the cut length: the lognormal's part below the cap, and the cap for everything above."""
        below = (log(self.cap_tokens) - mu) / self.sigma
        part = exp(order * mu + (order * self.sigma) ** 2 / 2) * _normal(below - order * self.sigma)
        return part + float(self.cap_tokens) ** order * (1.0 - _normal(below))


@dataclass(frozen=True, kw_only=True)
class PlannedWorkload:
    steps: int
    groups: int  # P
    completions_per_group: int  # G
    minibatches: int
    old_share: float  # the share of the tokens that need a pass of their own for old log-probs
    prompt_tokens: float
    lengths: LengthDistribution
    reference: bool  # whether a KL penalty needs the reference's log-probs
    segment_tokens: int
    sandbox_s: float  # CPU seconds for the tests of one completion
    sandbox_cores: int
    target_hours: float

    @property
    def logprob_passes(self) -> float:
        """Forward passes without gradient over all tokens, in one step."""
        return self.old_share + self.reference

    @property
    def completions(self) -> int:
        return self.groups * self.completions_per_group

    @property
    def generated_tokens(self) -> float:
        return self.completions * self.lengths.mean_tokens

    @property
    def prompt_tokens_per_step(self) -> float:
        return self.completions * self.prompt_tokens

    @property
    def trained_tokens(self) -> float:
        """Prompts count too, because the forward pass needs them."""
        return self.generated_tokens + self.prompt_tokens_per_step

    @property
    def mean_square_length(self) -> float:
        """The mean square of prompt and completion together, without the spread of prompts."""
        lengths = self.lengths
        return self.prompt_tokens**2 + 2 * self.prompt_tokens * lengths.mean_tokens + lengths.mean_square

    @cached_property
    def context_tokens(self) -> float:
        """The mean context of a running sequence. Long completions run longer, so each counts by its length."""
        return self.prompt_tokens + self.lengths.mean_square / (2 * self.lengths.mean_tokens)

    @cached_property
    def resumed_tokens(self) -> float:
        """Context tokens per step that are prefilled again because completions are cut into segments and go on elsewhere."""
        cuts = range(self.segment_tokens, self.lengths.cap_tokens, self.segment_tokens)
        return self.completions * sum(self.lengths.longer_than(cut) * (self.prompt_tokens + cut) for cut in cuts)

    @property
    def longest_tokens(self) -> float:
        return self.prompt_tokens + self.lengths.cap_tokens


def _normal(x: float) -> float:
    return 0.5 * (1.0 + erf(x / sqrt(2.0)))


def read_inputs(config: RunConfig) -> tuple[ModelShape, Cluster, PlannedWorkload]:
    """Raises ConfigError for a run that cannot be planned."""
    plan, algo = config.plan, config.algo
    cluster = Cluster(
        nodes=config.cluster.nodes, gpus_per_node=config.cluster.gpus_per_node or 8, gpu_bytes=plan.gpu_memory_gb * 1e9,
        hbm_bytes_s=plan.hbm_gb_s * 1e9, flops=plan.peak_tflops * 1e12, nvlink_bytes_s=plan.nvlink_gb_s * 1e9,
        network_bytes_s=plan.network_gb_s * 1e9, storage_bytes_s=plan.storage_gb_s * 1e9,
        node_mtbf_s=plan.node_mtbf_days * DAY_S, restart_s=plan.restart_s, frozen_gpus=frozen_gpus(config),
    )  # fmt: skip
    if plan.prompt_tokens > config.data.max_prompt_tokens:
        raise ConfigError(
            f"plan.prompt_tokens={plan.prompt_tokens:g}: the mean prompt cannot be longer than data.max_prompt_tokens="
            f"{config.data.max_prompt_tokens}, the longest prompt"
        )
    lengths = LengthDistribution(
        mean_tokens=plan.completion_tokens, cap_tokens=config.rollout.max_completion_tokens, sigma=plan.length_sigma
    )
    workload = PlannedWorkload(
        steps=config.trainer.steps, groups=algo.groups_per_step, completions_per_group=algo.completions_per_group,
        minibatches=algo.minibatches, old_share=1 - config.first_pass_is_old / algo.minibatches,
        prompt_tokens=plan.prompt_tokens, lengths=lengths,
        reference=algo.kl_coef > 0 or algo.teacher_is_reference, segment_tokens=config.rollout.segment_tokens,
        sandbox_s=plan.sandbox_s, sandbox_cores=plan.sandbox_cores, target_hours=plan.target_hours,
    )  # fmt: skip
    return shape_of(config.model), cluster, workload
