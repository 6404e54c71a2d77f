"""The schema of a run's configuration: every setting with its type, unit and default.

Hydra composes the YAML beside this file into a `RunConfig`; unknown keys and wrong types are refused with the full key. What one
field cannot tell alone is checked by `check()`, before any process starts.
"""

from dataclasses import dataclass, field
from math import ceil, isfinite, lcm

from omegaconf import MISSING


class ConfigError(ValueError):
    """A configuration that cannot run; the message says what to change."""


@dataclass(kw_only=True)
class ShapeConfig:
    """A model whose folder is not at hand, for the planner; with a folder, its config.json is read instead."""

    architecture: str = ""  # the family, as config.json names it: Qwen2ForCausalLM, Qwen3ForCausalLM, …
    parameters: int = 0  # 0: counted from the dimensions
    layers: int = 0  # decoder layers
    hidden: int = 0  # width of the residual stream
    heads: int = 0  # query heads
    kv_heads: int = 0  # key-value heads
    head_dim: int = 0  # width of a head
    ffn: int = 0  # width of the gated MLP
    vocabulary: int = 0  # rows of the embedding
    tied: bool = False  # output embedding is the input embedding


@dataclass(kw_only=True)
class ModelConfig:
    path: str = MISSING  # Hugging Face folder: config.json, *.safetensors, tokenizer, chat template
    prepare: str = ""  # `debug` | `smollm2` | "": who makes the folder (and the data) when it is not there
    dtype: str = "bfloat16"  # float32 | bfloat16, of the trainer's and the engines' weights
    shape: ShapeConfig = field(default_factory=ShapeConfig)


@dataclass(kw_only=True)
class DataConfig:
    train: list[str] = field(default_factory=list)  # JSONL files, or hf://name?split=train
    heldout: list[str] = field(default_factory=list)  # evaluation only
    max_prompt_tokens: int = 2048  # longer prompts are refused when read
    seed: int = 0  # order of the prompts


@dataclass(kw_only=True)
class AlgoConfig:
    groups_per_step: int = 512  # P, prompts of an RL step
    completions_per_group: int = 8  # G, completions of each prompt
    minibatches: int = 4  # optimizer steps in an RL step
    advantage: str = "grpo"  # grpo: (r - mean) / (std + eps) | dr_grpo: r - mean | rloo: r - mean of the others
    advantage_eps: float = 1e-4  # added to the standard deviation (grpo)
    overlong_buffer_fraction: float = 0.0  # the last part of max_completion_tokens, over which the reward falls (DAPO); 0: off
    overlong_penalty: float = 1.0  # … by so much, for a completion of max_completion_tokens
    policy_loss: str = (
        "ppo"  # ppo: a clipped ratio a token | gspo: a sequence | cispo: clipped, but every token keeps its gradient
    )
    clip_low: float = 0.2  # the ratio current/old is clipped below 1 - clip_low
    clip_high: float = 0.2  # … and above 1 + clip_high
    dual_clip: float = 0.0  # c above 1: where the advantage is negative, the loss is at most -c x advantage (ppo); 0: off
    behaviour_correction: str = (
        "truncate"  # none | truncate: exp(old - behaviour), at most the cap | mask: 0 outside of floor and cap
    )
    behaviour_level: str = "token"  # token | sequence: product over the sequence | geometric: its geometric mean
    behaviour_cap: float = 2.0  # of the weight exp(old - behaviour)
    behaviour_floor: float = 0.0  # mask: a smaller weight is 0 too
    kl_coef: float = 0.0  # beta of KL(current || reference); 0 needs no reference pass
    kl_estimator: str = "k3"  # k1 (in the reward only) | k2 | k3
    kl_in: str = "loss"  # loss | reward: beta x the trajectory's KL(old || reference) is taken off its reward
    reference_refresh_steps: int = 0  # every so many RL steps the policy becomes the reference; 0: the model's folder, always
    entropy_coef: float = 0.0  # bonus for the mean entropy of the policy at the sampled tokens
    loss_normalisation: str = (
        "token"  # token: mean of the minibatch's tokens | sequence: mean of trajectories' means | constant: sum / longest
    )
    ess_floor: float = 0.1  # effective sample size of the behaviour weights, as a share of the tokens …
    ess_patience_steps: int = 3  # … that ends the run when it stays below for so many steps
    drop_no_signal: bool = False  # groups whose rewards are all equal are dropped and replaced (DAPO's dynamic sampling)
    max_drops_per_step: int = 4096  # more drops than this between two takes end the run: the data is too easy or too hard


@dataclass(kw_only=True)
class RolloutConfig:
    max_staleness: int = 2  # S, in versions: no trained token is older
    window: int = 0  # W, in groups: how many ready groups may bypass the oldest one
    max_completion_tokens: int = 16384  # a completion that reaches it is truncated
    segment_tokens: int = 4096  # a completion is cut after so many tokens and may go on in another engine
    temperature: float = 1.0  # of sampling; log-probs on both sides follow it
    engines: int = 2  # SGLang servers
    engine_tp: int = 1  # GPUs (or CPU ranks) a server
    concurrency: int = 64  # trajectories in flight in one engine
    max_total_tokens: int = 0  # KV cache of an engine, in tokens; 0: what the memory allows (on a GPU)
    lease_s: float = 30.0  # a worker or judge not heard for so long loses its leases
    request_s: float = 600.0  # deadline of one engine call
    engine_start_s: float = 600.0  # from its start to its first token
    engine_restarts: int = 20  # of one worker's engine, before the worker gives up
    engine_args: list[str] = field(default_factory=list)  # further arguments of sglang.launch_server


@dataclass(kw_only=True)
class TrainerConfig:
    steps: int = 600  # RL steps of the run
    tp: int = 1  # tensor-parallel ranks
    pp: int = 1  # pipeline stages
    dp: int = 1  # replicas; the trainer takes tp x pp x cp x dp ranks
    cp: int = 1  # context parallelism: a sequence lies on so many ranks
    vpp: int = 1  # model chunks that a pipeline stage holds; above 1 is the interleaved schedule
    sequence_parallel: bool = False  # what tp leaves whole (norms, residuals) is cut along the sequence: less memory
    recompute: str = "none"  # none | selective (attention) | full (every layer): activations made again, not kept
    overlap_grad_reduce: bool = False  # gradients are reduced over dp while the backward pass goes on
    overlap_param_gather: bool = False  # new parameters are gathered over dp while the next forward pass goes on
    tokens_per_microbatch: int = 16384  # at most; whole trajectories are packed, and a microbatch is as long as they are
    lr: float = 1e-6  # peak learning rate of AdamW
    lr_schedule: str = "constant"  # constant | cosine
    warmup_steps: int = 0  # optimizer steps
    min_lr_fraction: float = 0.1  # of lr, at the end of a cosine
    adam_beta1: float = 0.9  # decay of the first moment
    adam_beta2: float = 0.95  # decay of the second moment
    adam_eps: float = 1e-8  # added to the second moment's root
    weight_decay: float = 0.0  # of AdamW, decoupled
    clip_grad: float = 1.0  # largest norm of the whole gradient
    seed: int = 0  # of the random state, and of how a batch is dealt to minibatches
    checkpoint_every: int = 20  # RL steps; 0: only the last
    checkpoints_kept: int = 2  # the newest; older ones are deleted
    eval_every: int = 0  # RL steps between evaluations; 0: before the first and after the last
    eval_completions: int = 1  # sampled for each held-out prompt
    save_hf: bool = True  # the last weights as a Hugging Face folder in the run's folder
    push_bucket_bytes: int = 512 * 1024 * 1024  # weights gathered and broadcast at once
    push_s: float = 120.0  # deadline of one weight push
    stall_s: float = 900.0  # a batch that does not come for so long ends the run
    collective_s: float = 1200.0  # deadline of a collective
    wandb_project: str = ""  # "": no Weights & Biases


@dataclass(kw_only=True)
class RewardConfig:
    slots: int = 0  # sandboxes in one judge process; 0: one a core
    judges: int = 1  # judge processes
    cpu_limit_s: float = 8.0  # of one completion, unless its task says otherwise
    memory_limit_mb: int = 1024  # of one completion, unless its task says otherwise
    credit: str = "all"  # all: 1 if every test passes, else 0 | fraction: share of passed tests
    truncated_reward: float = 0.0  # of a completion that reached max_completion_tokens


@dataclass(kw_only=True)
class ClusterConfig:
    kind: str = "local"  # local | slurm
    device: str = "auto"  # auto | cpu | cuda
    nodes: int = 1  # machines of the run
    gpus_per_node: int = 0  # 0: those found on this machine
    base_port: int = 0  # first of the run's ports; 0: chosen from the run's folder, below the ephemeral range
    worker_restarts: int = 20  # of each restartable process
    trainer_restarts: int = 0  # in a row without a new checkpoint; those for a lost node are not counted
    trainer_python: str = ""  # of the trainer's environment; "": the launcher's own
    rollout_python: str = ""  # of the fleet's, the queue server's and the judges'; "": the launcher's own
    heartbeat_s: float = 30.0  # a node that is silent for so long is lost (Slurm)
    save_s: float = 480.0  # for the last checkpoint before the time limit; less than the --signal of the batch script (Slurm)
    requeues: int = 20  # of one job, for its time limit or for lost nodes (Slurm)
    setup: list[str] = field(default_factory=list)  # shell lines before each process, e.g. "module load cuda" (Slurm)
    container: str = ""  # image that every process runs in; "": none (Slurm)
    container_runtime: str = "pyxis"  # pyxis | apptainer
    container_mounts: list[str] = field(default_factory=list)  # FROM:TO; the working directory and the run's folder are mounted
    srun_args: list[str] = field(default_factory=list)  # further options of every srun


@dataclass(kw_only=True)
class PlanConfig:
    """What `python -m launch.plan` assumes beside the run's own settings. Defaults: the job of 256 H100s."""

    prompt_tokens: float = 1200.0  # mean
    completion_tokens: float = 2500.0  # mean; the longest reach rollout.max_completion_tokens
    length_sigma: float = 1.0  # of the log of the length: at 1 the 99th percentile is ten medians
    sandbox_s: float = 8.0  # CPU seconds of one completion's tests
    sandbox_cores: int = 1024  # CPU cores that run tests
    target_hours: float = 48.0  # for trainer.steps
    gpu_memory_gb: float = 80.0  # of one GPU
    hbm_gb_s: float = 3350.0  # memory bandwidth of one GPU
    peak_tflops: float = 989.0  # dense bf16
    nvlink_gb_s: float = 900.0  # of a GPU, both directions together
    network_gb_s: float = 50.0  # of a GPU's NIC
    storage_gb_s: float = 20.0  # shared storage, all nodes together
    node_mtbf_days: float = 20.0  # a node fails about once in so many days
    restart_s: float = 600.0  # from a lost trainer node to training again, without the steps that are done again
    staleness_limit: int = 4  # the most that is searched: published runs learned as well up to 4, less well at 8
    max_cp: int = 1  # context parallelism that is searched
    compute_fraction: float = 0.40  # of peak, in the stated set of assumptions
    bandwidth_fraction: float = 0.75  # of peak, in the stated set of assumptions
    out: str = ""  # JSON file of the plan
    figures: str = ""  # HTML page of the figures
    show: list[str] = field(default_factory=list)  # sections of the report; none: all


@dataclass(kw_only=True)
class RunConfig:
    name: str = "run"  # one path component; "": the experiment, date and time
    output: str = "outputs"  # the run's folder is output/name
    resume: str = ""  # a run's folder to go on with
    dry_run: bool = False  # show placement, costs and configuration; start nothing
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)


CHOICES = {
    "model.dtype": ("float32", "bfloat16"),
    "model.prepare": ("", "debug", "smollm2"),
    "algo.advantage": ("grpo", "dr_grpo", "rloo"),
    "algo.policy_loss": ("ppo", "gspo", "cispo"),
    "algo.behaviour_level": ("token", "sequence", "geometric"),
    "algo.kl_in": ("loss", "reward"),
    "algo.behaviour_correction": ("none", "truncate", "mask"),
    "algo.kl_estimator": ("k1", "k2", "k3"),
    "algo.loss_normalisation": ("token", "sequence", "constant"),
    "trainer.lr_schedule": ("constant", "cosine"),
    "trainer.recompute": ("none", "selective", "full"),
    "reward.credit": ("all", "fraction"),
    "cluster.kind": ("local", "slurm"),
    "cluster.device": ("auto", "cpu", "cuda"),
    "cluster.container_runtime": ("pyxis", "apptainer"),
}
AT_LEAST_ONE = (
    "algo.groups_per_step", "algo.minibatches", "algo.ess_patience_steps",
    "rollout.max_completion_tokens", "rollout.segment_tokens", "rollout.engines",
    "rollout.engine_tp", "rollout.concurrency", "trainer.steps", "trainer.tp", "trainer.pp", "trainer.dp",
    "trainer.cp", "trainer.vpp",
    "trainer.tokens_per_microbatch", "trainer.eval_completions", "trainer.checkpoints_kept", "trainer.push_bucket_bytes",
    "reward.judges", "data.max_prompt_tokens", "cluster.nodes", "plan.sandbox_cores",
    "plan.staleness_limit", "plan.max_cp",
)  # fmt: skip
AT_LEAST_ZERO = (
    "rollout.max_staleness", "rollout.window", "rollout.max_total_tokens", "rollout.engine_restarts", "algo.kl_coef",
    "algo.reference_refresh_steps",
    "algo.clip_low", "algo.clip_high", "algo.dual_clip", "algo.behaviour_floor", "algo.entropy_coef", "algo.overlong_penalty",
    "trainer.warmup_steps", "trainer.checkpoint_every", "trainer.eval_every",
    "trainer.weight_decay", "reward.slots", "cluster.base_port", "cluster.gpus_per_node",
    "cluster.worker_restarts", "cluster.trainer_restarts", "cluster.requeues", "trainer.min_lr_fraction",
)  # fmt: skip
POSITIVE = (
    "rollout.temperature", "rollout.lease_s", "rollout.request_s", "rollout.engine_start_s", "trainer.lr", "trainer.clip_grad",
    "trainer.push_s", "trainer.stall_s", "trainer.collective_s", "reward.cpu_limit_s", "reward.memory_limit_mb",
    "cluster.heartbeat_s", "cluster.save_s",
    "algo.behaviour_cap", "algo.advantage_eps", "trainer.adam_eps", "plan.prompt_tokens", "plan.completion_tokens",
    "plan.length_sigma", "plan.sandbox_s", "plan.target_hours", "plan.gpu_memory_gb", "plan.hbm_gb_s", "plan.peak_tflops",
    "plan.nvlink_gb_s", "plan.network_gb_s", "plan.storage_gb_s", "plan.node_mtbf_days", "plan.restart_s",
    "plan.compute_fraction", "plan.bandwidth_fraction",
)  # fmt: skip
FINITE = (
    *POSITIVE, "algo.kl_coef", "algo.dual_clip", "algo.behaviour_floor", "algo.entropy_coef", "algo.overlong_penalty",
    "algo.clip_high", "trainer.weight_decay",
)  # fmt: skip
WITHIN = {  # at least, below
    "trainer.adam_beta1": (0.0, 1.0),
    "trainer.adam_beta2": (0.0, 1.0),
    "trainer.min_lr_fraction": (0.0, 1.000001),
    "algo.clip_low": (0.0, 1.000001),
    "plan.compute_fraction": (0.0, 1.000001),
    "plan.bandwidth_fraction": (0.0, 1.000001),
    "algo.overlong_buffer_fraction": (0.0, 1.0),
    "algo.ess_floor": (0.0, 1.0),
    "algo.max_drops_per_step": (0, 2**31),
    "trainer.seed": (0, 2**31),
    "data.seed": (0, 2**31),
    "cluster.base_port": (0, 65_000),
}


def check(config: RunConfig) -> None:
    """Refuses what cannot run, before anything expensive starts. Raises ConfigError."""
    for key, allowed in CHOICES.items():
        if (value := _get(config, key)) not in allowed:
            raise ConfigError(f"{key}={value!r}: choose one of {', '.join(repr(a) for a in allowed)}")
    for keys, minimum in ((AT_LEAST_ONE, 1), (AT_LEAST_ZERO, 0)):
        for key in keys:
            if (value := _get(config, key)) < minimum:
                raise ConfigError(f"{key}={value}: must be at least {minimum}")
    for key in POSITIVE:
        if (value := _get(config, key)) <= 0:
            raise ConfigError(f"{key}={value}: must be above 0")
    if not config.name or "/" in config.name:
        raise ConfigError(f"name={config.name!r}: the run's folder is output/name, so it must be one path component")
    if not config.data.train:
        raise ConfigError("data.train is empty: name at least one JSONL file of problems")
    for key in FINITE:
        if not isfinite(value := _get(config, key)):
            raise ConfigError(f"{key}={value}: must be a finite number")
    for key, (low, high) in WITHIN.items():
        if not low <= (value := _get(config, key)) < high:
            raise ConfigError(f"{key}={value}: must be at least {low:g} and below {high:g}")
    _check_algorithm(config)
    _check_layout(config)
    _check_objective(config.algo)
    _check_lengths(config)
    _check_deadlines(config)


FIXED = (
    "algo.groups_per_step",
    "algo.completions_per_group",
    "rollout.max_staleness",
    "rollout.window",
    "rollout.max_completion_tokens",
)
"""What the ledger of a run was begun with and cannot change."""


def check_resumed(stored: RunConfig, resumed: RunConfig) -> None:
    """Refuses to go on with a run under another contract. Raises ConfigError."""
    for key in FIXED:
        if (before := _get(stored, key)) != (after := _get(resumed, key)):
            raise ConfigError(
                f"{key}={after}: the run was begun with {before}, which its ledger holds to; start a new run for that"
            )


def _check_algorithm(config: RunConfig) -> None:
    algo, rollout = config.algo, config.rollout
    if algo.completions_per_group < 2:
        raise ConfigError(
            f"algo.completions_per_group={algo.completions_per_group}: an advantage compares completions, take at least 2"
        )
    completions = algo.groups_per_step * algo.completions_per_group
    if completions % algo.minibatches:
        raise ConfigError(
            f"algo.minibatches={algo.minibatches} does not divide the {completions} completions of a step "
            f"({algo.groups_per_step} groups x {algo.completions_per_group})"
        )
    if algo.reference_refresh_steps and not algo.kl_coef:
        raise ConfigError(
            f"algo.reference_refresh_steps={algo.reference_refresh_steps} without algo.kl_coef: nothing looks at the reference"
        )
    window_versions = ceil(rollout.window / algo.groups_per_step)
    if window_versions > rollout.max_staleness:
        raise ConfigError(
            f"rollout.window={rollout.window} costs {window_versions} version(s) of lead (window / algo.groups_per_step, rounded "
            f"up), more than rollout.max_staleness={rollout.max_staleness}: make the window smaller or the staleness larger"
        )
    updates = config.trainer.steps * algo.minibatches
    if config.trainer.warmup_steps >= updates:
        raise ConfigError(
            f"trainer.warmup_steps={config.trainer.warmup_steps} must be below the run's {updates} optimizer steps "
            f"(trainer.steps x algo.minibatches)"
        )
    if rollout.max_staleness > 0 and algo.behaviour_correction == "none":
        raise ConfigError(
            "algo.behaviour_correction=none with rollout.max_staleness > 0 trains on stale tokens as if they were fresh: "
            "choose truncate or mask, or set rollout.max_staleness=0"
        )


def _check_layout(config: RunConfig) -> None:
    trainer = config.trainer
    if trainer.sequence_parallel and trainer.tp == 1:
        raise ConfigError("trainer.sequence_parallel=true needs trainer.tp above 1: it cuts what tensor parallelism leaves whole")
    if trainer.vpp > 1 and trainer.pp == 1:
        raise ConfigError(f"trainer.vpp={trainer.vpp} needs trainer.pp above 1: it interleaves the chunks of pipeline stages")
    if trainer.overlap_param_gather and not trainer.overlap_grad_reduce:
        raise ConfigError("trainer.overlap_param_gather=true needs trainer.overlap_grad_reduce=true: both go by the same buckets")


def _check_objective(algo: AlgoConfig) -> None:
    """Pairs of settings of which one would silently do nothing, or harm."""
    for refused, message in (
        (
            algo.kl_coef > 0 and algo.kl_in == "loss" and algo.kl_estimator == "k1",
            "algo.kl_estimator=k1 in the loss has a gradient of zero on average, so it regularises nothing: choose k2 or k3, or "
            "algo.kl_in=reward",
        ),
        (
            algo.kl_in == "reward" and algo.kl_coef == 0,
            "algo.kl_in=reward does nothing at algo.kl_coef=0: set a coefficient, or algo.kl_in=loss",
        ),
        (
            0 < algo.dual_clip <= 1,
            f"algo.dual_clip={algo.dual_clip}: must be above 1, or every token of negative advantage is clipped; 0 turns it off",
        ),
        (
            algo.dual_clip > 0 and algo.policy_loss != "ppo",
            f"algo.dual_clip={algo.dual_clip} belongs to algo.policy_loss=ppo; {algo.policy_loss} has no use for it, set it to 0",
        ),
        (
            algo.behaviour_floor > 0 and algo.behaviour_correction != "mask",
            f"algo.behaviour_floor={algo.behaviour_floor} is read by algo.behaviour_correction=mask alone: choose mask, or set "
            "the floor to 0",
        ),
        (
            algo.behaviour_floor >= algo.behaviour_cap,
            f"algo.behaviour_floor={algo.behaviour_floor} must be below algo.behaviour_cap={algo.behaviour_cap}",
        ),
        (
            algo.policy_loss == "gspo" and algo.behaviour_correction != "none" and algo.behaviour_level == "token",
            "algo.policy_loss=gspo has one ratio a sequence, which weights of single tokens would bend: set "
            "algo.behaviour_level=geometric or sequence",
        ),
    ):
        if refused:
            raise ConfigError(message)


def _check_deadlines(config: RunConfig) -> None:
    """A wait within a wait must be the shorter one."""
    trainer, rollout = config.trainer, config.rollout
    for shorter, short_s, longer, long_s, why in (
        ("trainer.push_s", trainer.push_s, "trainer.collective_s", trainer.collective_s, "all ranks wait for a push"),
        ("trainer.stall_s", trainer.stall_s, "trainer.collective_s", trainer.collective_s, "all ranks wait while rank 0 does"),
        ("rollout.engine_start_s", rollout.engine_start_s, "trainer.stall_s", trainer.stall_s, "a batch waits for the engines"),
    ):
        if short_s >= long_s:
            raise ConfigError(f"{shorter}={short_s:g} must be below {longer}={long_s:g}: {why}")


def _check_lengths(config: RunConfig) -> None:
    longest = config.data.max_prompt_tokens + config.rollout.max_completion_tokens
    trainer = config.trainer
    parts = trainer.cp * lcm(2 if trainer.cp > 1 else 1, trainer.tp if trainer.sequence_parallel else 1)
    needed = ceil(longest / parts) * parts
    if needed > trainer.tokens_per_microbatch:
        cut = f", {needed} when cut into the {parts} parts that tp, cp and sequence_parallel ask for" if parts > 1 else ""
        raise ConfigError(
            f"trainer.tokens_per_microbatch={trainer.tokens_per_microbatch} cannot hold the longest trajectory: "
            f"data.max_prompt_tokens + rollout.max_completion_tokens = {longest}{cut}"
        )
    if 0 < config.rollout.max_total_tokens < longest:
        raise ConfigError(
            f"rollout.max_total_tokens={config.rollout.max_total_tokens}: an engine's KV cache cannot hold the longest "
            f"trajectory, data.max_prompt_tokens + rollout.max_completion_tokens = {longest}"
        )


def _get(config: RunConfig, key: str):
    node: object = config
    for part in key.split("."):
        node = getattr(node, part)
    return node
