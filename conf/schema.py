"""The schema of a run's configuration: every setting with its type, unit and default.

Hydra composes the YAML beside this file into a `RunConfig`; unknown keys and wrong types are refused with the full key. What one
field cannot tell alone is checked by `conf/compose/check.py`, before any process starts.
"""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

USER_CODE = "user_code"  # metadata of a setting that may name user code (conf/user_code.py): the process that loads it


class ConfigError(ValueError):
    """A configuration that cannot run; the message says what to change."""


def loaded(default: str, role: str) -> Any:
    """A setting that may name user code, which the processes of that role load."""
    return field(default=default, metadata={USER_CODE: role})


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
    reader: str = loaded("", "queue")  # module:object that reads the problems; "": JSONL or hf://
    max_prompt_tokens: int = 2048  # longer prompts are refused when read
    seed: int = 0  # order of the prompts


@dataclass(kw_only=True)
class AlgoConfig:
    groups_per_step: int = 512  # P, prompts of an RL step
    completions_per_group: int = 8  # G, completions of each prompt
    minibatches: int = 4  # optimizer steps in an RL step
    advantage: str = loaded("grpo", "trainer")  # grpo: (r - mean) / (std + eps) | dr_grpo: r - mean | rloo: r - mean of others
    advantage_eps: float = 1e-4  # added to the standard deviation (grpo)
    overlong_buffer_fraction: float = 0.0  # the last part of max_completion_tokens, over which the reward falls (DAPO); 0: off
    overlong_penalty: float = 1.0  # … by so much, for a completion of max_completion_tokens
    policy_loss: str = (
        loaded("ppo", "trainer")  # ppo: clips a ratio per token | gspo: per sequence | cispo: clips the weight, not the gradient
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
    nodes: int = 1  # machines of the run; under Slurm those of its job, and this is what dry_run and the planner go by
    gpus_per_node: int = 0  # 0: those found on this machine
    base_port: int = 0  # first of the run's ports; 0: chosen from the run's folder, below the ephemeral range
    worker_restarts: int = 20  # of each restartable process
    trainer_restarts: int = 0  # in a row without a new checkpoint; those for a lost node are not counted
    trainer_python: str = ""  # of the trainer's environment; "": the launcher's own
    rollout_python: str = ""  # of the fleet's, the queue server's and the judges'; "": the launcher's own
    heartbeat_s: float = 30.0  # a node that is silent for so long is lost (Slurm)
    save_s: float = 480.0  # for the checkpoint that SIGUSR1 asks for; less than the --signal of the batch script (Slurm)
    requeues: int = 20  # of one job, for its time limit or for lost nodes (Slurm)
    setup: list[str] = field(default_factory=list)  # shell lines before each process, e.g. "module load cuda" (Slurm)
    container: str = ""  # image that every process runs in; "": none (Slurm)
    container_runtime: str = "pyxis"  # pyxis | apptainer (Slurm)
    container_mounts: list[str] = field(default_factory=list)  # FROM:TO, beside the working and the run's folder (Slurm)
    srun_args: list[str] = field(default_factory=list)  # further options of every srun (Slurm)


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
    figures: str = ""  # the figures, as .html or .png
    show: list[str] = field(default_factory=list)  # sections of the report; none: all


@dataclass(kw_only=True)
class RunConfig:
    name: str = "run"  # one path component; "": the experiment, date and time
    output: str = "outputs"  # the run's folder is output/name
    resume: str = ""  # a run's folder to go on with
    dry_run: bool = False  # show placement, configuration and costs; start nothing
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    user_code: dict[str, str] = field(default_factory=dict)  # written by the launcher: the digest of each module in use
