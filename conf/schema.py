"""The schema of a run's configuration: every setting with its type, default, meaning and the values that it takes.

Hydra composes the YAML files beside this file into a `RunConfig`. An unknown key and a value of a wrong type are refused with
the full key. What settings demand of one another is checked by `conf/compose/check.py`, before any process starts.

A setting is declared by its type: `number`, `flag`, `choice`, `text` or `texts`.
"""
# ruff: noqa: RUF009 `texts` makes a field whose default is a new list

from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from math import isfinite
from typing import Any, get_type_hints

from omegaconf import MISSING

RULE = "rule"  # key of a Rule in a field's metadata


class ConfigError(ValueError):
    """A configuration that cannot run; the message says what to change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """What a setting means, and which values it takes."""

    meaning: str
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    choices: Mapping[str, str] = field(default_factory=dict)  # each with its meaning
    any_text: bool = False
    loaded_by: str = ""  # the setting may name user code (conf/user_code.py), which processes of this role load

    @property
    def bounds(self) -> str:
        limits = (("at least", self.at_least), ("above", self.above), ("at most", self.at_most), ("below", self.below))
        return " and ".join(f"{word} {limit:g}" for word, limit in limits if limit is not None)

    def takes(self, number: float) -> bool:
        return (
            isfinite(number)
            and (self.at_least is None or number >= self.at_least)
            and (self.above is None or number > self.above)
            and (self.at_most is None or number <= self.at_most)
            and (self.below is None or number < self.below)
        )


def number(
    default: float,
    meaning: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> Any:
    """A finite number within its bounds."""
    rule = Rule(meaning=meaning, at_least=at_least, above=above, at_most=at_most, below=below)
    return field(default=default, metadata={RULE: rule})


def choice(default: str, meaning: str, choices: Mapping[str, str], *, loaded_by: str = "") -> Any:
    return field(default=default, metadata={RULE: Rule(meaning=meaning, choices=choices, loaded_by=loaded_by)})


def text(default: str, meaning: str) -> Any:
    """Any text."""
    return field(default=default, metadata={RULE: Rule(meaning=meaning, any_text=True)})


def texts(meaning: str, *, loaded_by: str = "") -> Any:
    """A list of any texts, empty by default."""
    return field(default_factory=list, metadata={RULE: Rule(meaning=meaning, any_text=True, loaded_by=loaded_by)})


def flag(default: bool, meaning: str) -> Any:
    return field(default=default, metadata={RULE: Rule(meaning=meaning)})


@dataclass(kw_only=True)
class ShapeConfig:
    """The dimensions of a model whose folder is not on this machine. Only the planner and the preview read them."""

    architecture: str = text("", "Model family, as config.json names it, such as Qwen2ForCausalLM")
    parameters: int = number(0, "Number of parameters. 0: counted from the dimensions", at_least=0)
    layers: int = number(0, "Decoder layers", at_least=0)
    hidden: int = number(0, "Width of the residual stream", at_least=0)
    heads: int = number(0, "Query heads", at_least=0)
    kv_heads: int = number(0, "Key-value heads", at_least=0)
    head_dim: int = number(0, "Width of one head", at_least=0)
    ffn: int = number(0, "Width of the gated MLP", at_least=0)
    vocabulary: int = number(0, "Rows of the embedding", at_least=0)
    tied: bool = flag(False, "The output embedding is the input embedding")


@dataclass(kw_only=True)
class ModelConfig:
    """The model that is trained."""

    path: str = text(MISSING, "Hugging Face folder with config.json, *.safetensors, the tokenizer and its chat template")
    prepare: str = choice(
        "",
        "What makes the folder, and the problems, when they do not exist",
        {
            "": "nothing: they must exist",
            "debug": "a tiny model, made on this machine",
            "debug_student": "the same, and an untrained model that it can teach",
            "debug_math": "a tiny model for word problems",
            "smollm2": "SmolLM2-135M, downloaded",
        },
    )
    dtype: str = choice("bfloat16", "Type of the weights in trainer and engines", {"float32": "on a CPU", "bfloat16": "on GPUs"})
    shape: ShapeConfig = field(default_factory=ShapeConfig)


@dataclass(kw_only=True)
class DataConfig:
    """The problems."""

    train: list[str] = texts(
        "Problems to train on: files, folders, patterns of files, or data sets such as hf://name?split=train"
    )
    weights: list[float] = field(
        default_factory=list,
        metadata={
            RULE: Rule(meaning="Share of each entry of data.train in the prompts, as [3, 1]. []: all problems equally often")
        },
    )
    heldout: list[str] = texts("Problems for evaluation only")
    heldout_fraction: float = number(
        0.0, "This share of data.train is held out for evaluation, chosen by the prompts themselves. 0: none", at_least=0, below=1
    )
    task: Any = field(
        default=None,
        metadata={RULE: Rule(meaning='Task of the rows that have none. "{column}" stands for the value of a column of the row')},
    )
    reader: str = choice("", "What gives the rows", {"": "the files themselves"}, loaded_by="queue")
    system_prompt: str = text("", "System message of the problems that have none of their own")
    chat_template_kwargs: dict[str, Any] = field(
        default_factory=dict, metadata={RULE: Rule(meaning="Given to the model's chat template, as {enable_thinking: false}")}
    )
    max_prompt_tokens: int = number(2048, "Problems with a longer prompt are left out", at_least=1)
    seed: int = number(0, "Seed of the order of the prompts", at_least=0, below=2**31)


@dataclass(kw_only=True)
class AlgoConfig:
    """The objective."""

    groups_per_step: int = number(512, "Prompts in one RL step", at_least=1)
    completions_per_group: int = number(8, "Completions of each prompt; their rewards are compared", at_least=2)
    minibatches: int = number(4, "Optimizer steps in one RL step", at_least=1)
    advantage: str = choice(
        "grpo",
        "Advantage of a completion with reward r",
        {
            "grpo": "(r - mean) / (std + eps) over its group",
            "dr_grpo": "r - mean of its group",
            "rloo": "r - mean of the other completions of its group",
        },
        loaded_by="trainer",
    )
    advantage_eps: float = number(1e-4, "eps of algo.advantage=grpo", above=0)
    overlong_buffer_fraction: float = number(
        0.0,
        "The reward falls linearly over this last part of rollout.max_completion_tokens, as in DAPO. 0: off",
        at_least=0,
        below=1,
    )
    overlong_penalty: float = number(
        1.0, "Penalty on the reward of a completion that reached rollout.max_completion_tokens", at_least=0, at_most=1000
    )
    policy_loss: str = choice(
        "ppo",
        "Policy loss",
        {
            "ppo": "clips the ratio current/old of each token",
            "gspo": "clips one ratio for each sequence",
            "cispo": "clips the weight of each token, and every token keeps its gradient",
        },
        loaded_by="trainer",
    )
    clip_low: float = number(0.2, "The ratio current/old is clipped below 1 - clip_low", at_least=0, at_most=1)
    clip_high: float = number(0.2, "The ratio current/old is clipped above 1 + clip_high", at_least=0)
    dual_clip: float = number(
        0.0, "For a negative advantage, the loss is at most this factor (above 1) times -advantage (ppo). 0: off", at_least=0
    )
    behaviour_correction: str = choice(
        "truncate",
        "Correction for tokens that an older policy sampled, by the weight exp(old - behaviour)",
        {
            "none": "no correction",
            "truncate": "weights above the cap become the cap",
            "mask": "weights above the cap or below the floor become 0",
        },
    )
    behaviour_level: str = choice(
        "token",
        "What one weight is computed over",
        {"token": "each token", "sequence": "the product over a sequence", "geometric": "the geometric mean over a sequence"},
    )
    behaviour_cap: float = number(2.0, "Largest weight exp(old - behaviour)", above=0)
    behaviour_floor: float = number(0.0, "Smallest weight that behaviour_correction=mask keeps", at_least=0)
    kl_coef: float = number(0.0, "Coefficient of KL(current || reference). 0: no reference pass is made", at_least=0)
    kl_estimator: str = choice(
        "k3",
        "Estimator of the KL divergence",
        {"k1": "-log ratio, for kl_in=reward only", "k2": "half of the squared log ratio", "k3": "ratio - 1 - log ratio"},
    )
    kl_in: str = choice(
        "loss",
        "Where the KL penalty is applied",
        {"loss": "added to the loss of each token", "reward": "the KL(old || reference) of a trajectory reduces its reward"},
    )
    reference_refresh_steps: int = number(
        0, "RL steps after which the current policy becomes the reference. 0: the reference is always model.path", at_least=0
    )
    teacher: str = text(
        "",
        "The model that the policy learns from on its own samples (on-policy distillation): a Hugging Face folder, or the "
        'address of an SGLang server, such as http://host:30000. "": none',
    )
    teacher_on: str = choice(
        "trainer",
        "Where a teacher runs that is given as a folder",
        {
            "trainer": "in the trainer, in the place of the reference policy: it must have the shape of the model",
            "engine": "on an SGLang server of its own, which the run starts: any model with the same tokenizer",
        },
    )
    teacher_tp: int = number(1, "Tensor-parallel ranks (GPUs) of the teacher's server, with teacher_on=engine", at_least=1)
    reward_weight: float = number(
        1.0, "Factor of the advantage from rewards beside a teacher. 0: rewards are only logged (pure distillation)", at_least=0
    )
    teacher_weight: float = number(
        1.0, "Factor of (log-prob of the policy - log-prob of the teacher), which each token's advantage is reduced by", above=0
    )
    entropy_coef: float = number(0.0, "Coefficient of the entropy bonus at the sampled tokens", at_least=0)
    loss_normalisation: str = choice(
        "token",
        "How the losses of tokens become one number",
        {
            "token": "the mean over all tokens of the minibatch",
            "sequence": "the mean over trajectories of each one's mean",
            "constant": "the sum over rollout.max_completion_tokens",
        },
    )
    ess_floor: float = number(
        0.1, "Smallest effective sample size of the behaviour weights, as a fraction of the tokens", at_least=0, below=1
    )
    ess_patience_steps: int = number(3, "Steps in a row with a smaller effective sample size that end the run", at_least=1)
    drop_no_signal: bool = flag(False, "Groups whose rewards are all equal are dropped and replaced (DAPO's dynamic sampling)")
    max_drops_per_step: int = number(
        4096,
        "More dropped groups in one RL step end the run: the problems are too easy or too hard, or are refused",
        at_least=0,
        below=2**31,
    )

    @property
    def teacher_has_address(self) -> bool:
        """Whether the teacher is a server that somebody else runs."""
        return self.teacher.startswith(("http://", "https://"))

    @property
    def teacher_has_engine(self) -> bool:
        """Whether the run starts a server for the teacher."""
        return bool(self.teacher) and not self.teacher_has_address and self.teacher_on == "engine"

    @property
    def teacher_is_asked(self) -> bool:
        """Whether the workers ask a server for the teacher's log-probs. Otherwise the trainer computes them."""
        return self.teacher_has_address or self.teacher_has_engine

    @property
    def teacher_is_reference(self) -> bool:
        """Whether the teacher takes the place of the reference policy in the trainer."""
        return bool(self.teacher) and not self.teacher_is_asked


@dataclass(kw_only=True)
class RolloutConfig:
    """Sampling, and the engines that do it."""

    max_staleness: int = number(2, "Largest number of versions between a trained token and the trained policy", at_least=0)
    window: int = number(0, "Number of finished groups that may be trained before an older, unfinished one", at_least=0)
    max_completion_tokens: int = number(4096, "A completion that reaches this length is truncated", at_least=1)
    max_turns: int = number(
        1, "Turns of one episode, if its reward is an environment; rollout.max_completion_tokens limits all of them", at_least=1
    )
    segment_tokens: int = number(
        4096, "Tokens after which a completion is interrupted; another engine may continue it", at_least=1
    )
    temperature: float = number(1.0, "Sampling temperature; the trainer's log-probs use it too", above=0)
    engines: int = number(2, "SGLang servers", at_least=1)
    engine_tp: int = number(1, "Tensor-parallel ranks (GPUs) of one server", at_least=1)
    concurrency: int = number(64, "Trajectories that one engine samples at the same time", at_least=1)
    max_total_tokens: int = number(0, "Tokens in the KV cache of one engine. 0: as many as fit (on a GPU)", at_least=0)
    lease_s: float = number(30.0, "A worker or judge that sends no heartbeat for this long loses its leases", above=0)
    request_s: float = number(600.0, "Deadline of one request to an engine", above=0)
    engine_start_s: float = number(600.0, "Deadline from the start of an engine to its first token", above=0)
    engine_restarts: int = number(20, "Restarts of one worker's engine before the worker gives up", at_least=0)
    engine_args: list[str] = texts("Further arguments of sglang.launch_server")


@dataclass(kw_only=True)
class TrainerConfig:
    """Training, and how the model is sharded for it. The trainer takes tp x pp x cp x dp ranks."""

    steps: int = number(600, "RL steps of the run", at_least=1)
    tp: int = number(1, "Tensor-parallel ranks", at_least=1)
    pp: int = number(1, "Pipeline stages", at_least=1)
    dp: int = number(1, "Data-parallel ranks", at_least=1)
    cp: int = number(1, "Context-parallel ranks: each holds a part of every sequence", at_least=1)
    vpp: int = number(1, "Model chunks per pipeline stage; above 1 the schedule is interleaved", at_least=1)
    sequence_parallel: bool = flag(False, "Shards norms and residuals along the sequence dimension, to save memory")
    recompute: str = choice(
        "none",
        "Activations that are computed again in the backward pass, to save memory",
        {"none": "no activations", "selective": "those of attention", "full": "those of every layer"},
    )
    reuse_first_forward: bool = flag(
        True,
        "The first minibatch takes its old log-probs from the forward pass of its update, so they need no pass of their own. Has "
        "no effect with algo.kl_in=reward or a teacher, which need all old log-probs before the first loss",
    )
    overlap_grad_reduce: bool = flag(False, "Reduces gradients over dp during the backward pass")
    overlap_param_gather: bool = flag(False, "Gathers new parameters over dp during the next forward pass")
    tokens_per_microbatch: int = number(
        16384,
        "Whole trajectories are packed into microbatches of at most this many tokens. It is raised where the longest trajectory "
        "(data.max_prompt_tokens + rollout.max_completion_tokens) needs more",
        at_least=1,
    )
    lr: float = number(1e-6, "Peak learning rate of AdamW", above=0)
    lr_schedule: str = choice(
        "constant",
        "Learning rate after the warm-up",
        {"constant": "stays at lr", "cosine": "falls to lr x min_lr_fraction at the last step"},
    )
    warmup_steps: int = number(
        0, "Optimizer steps in which the learning rate rises from 0. It is lowered where the run has fewer steps", at_least=0
    )
    min_lr_fraction: float = number(0.1, "Learning rate at the end of a cosine, as a fraction of lr", at_least=0, at_most=1)
    adam_beta1: float = number(0.9, "Decay of AdamW's first moment", at_least=0, below=1)
    adam_beta2: float = number(0.95, "Decay of AdamW's second moment", at_least=0, below=1)
    adam_eps: float = number(1e-8, "Added to the root of AdamW's second moment", above=0)
    weight_decay: float = number(0.0, "Decoupled weight decay of AdamW", at_least=0)
    clip_grad: float = number(1.0, "Largest norm of the whole gradient", above=0)
    seed: int = number(0, "Seed of the random state, and of how a batch is split into minibatches", at_least=0, below=2**31)
    checkpoint_every: int = number(20, "RL steps between checkpoints. 0: only after the last step", at_least=0)
    checkpoints_kept: int = number(2, "Number of newest checkpoints that are kept; older ones are deleted", at_least=1)
    eval_every: int = number(0, "RL steps between evaluations. 0: before the first step and after the last", at_least=0)
    eval_completions: int = number(1, "Completions of each held-out problem in an evaluation", at_least=1)
    save_hf: bool = flag(True, "Saves the last weights as a Hugging Face folder in the run's folder")
    push_bucket_bytes: int = number(512 * 1024 * 1024, "Bytes of weights that are broadcast at once in a push", at_least=1)
    push_s: float = number(120.0, "Deadline of one weight push", above=0)
    stall_s: float = number(
        900.0,
        "The run ends when nothing is generated, graded or trained for this long. A worker or judge that cannot reach the queue "
        "server for this long ends too",
        above=0,
    )
    collective_s: float = number(1200.0, "Deadline of one collective operation", above=0)
    wandb_project: str = text("", 'Project in Weights & Biases. "": metrics are not sent there')


@dataclass(kw_only=True)
class RewardConfig:
    """The judges, which run the completions' code in sandboxes."""

    slots: int = number(0, "Completions that one judge process grades at once. 0: one per CPU core", at_least=0)
    judges: int = number(1, "Judge processes", at_least=1)
    cpu_limit_s: float = number(8.0, "CPU seconds for one completion, if its task sets no limit", above=0)
    memory_limit_mb: int = number(1024, "Memory for one completion in MiB, if its task sets no limit", at_least=1)
    credit: str = choice(
        "all",
        "What a completion gets whose tests pass in part",
        {"all": "1 if every test passes, else 0", "fraction": "the fraction of tests that pass"},
    )
    reasoning: str = text(
        "auto",
        "Tags around reasoning, which is no part of an answer. auto: those of the usual model families; none; "
        "or two tags, as '<plan> </plan>'",
    )
    functions: list[str] = texts(
        "Functions and classes of your own that tasks of the kinds `python` and `environment` may name, as my_rewards:brevity",
        loaded_by="judge",
    )
    function_memory_mb: int = number(4096, "Memory of one process that runs such functions, in MiB", at_least=64)
    parts: dict[str, dict[str, Any]] = field(
        default_factory=dict,
        metadata={RULE: Rule(meaning="Parts that every reward gets beside its task, by name, as {short: {kind: length, …}}")},
    )
    judge_model: str = text(
        "",
        "Hugging Face folder of a model that the run serves on an SGLang server of its own. Tasks of the kind `judge` without a "
        '`url` ask it. "": none',
    )
    judge_model_tp: int = number(1, "Tensor-parallel ranks (GPUs) of the judge model's server", at_least=1)
    packages: list[str] = texts("Installed packages that completions may import beside the standard library, such as numpy")
    truncated_reward: float = number(
        0.0,
        "What each part that grades an answer gives to a completion that reached rollout.max_completion_tokens",
        at_least=-1000,
        at_most=1000,
    )


@dataclass(kw_only=True)
class ClusterConfig:
    """The machines, and how processes are started on them."""

    kind: str = choice("local", "Where the run's processes start", {"local": "on this machine", "slurm": "in a Slurm job"})
    device: str = choice(
        "auto", "What trainer and engines run on", {"auto": "the GPUs, if there are any", "cpu": "the CPU", "cuda": "the GPUs"}
    )
    nodes: int = number(
        1, "Machines of the run. A Slurm job has its own number of nodes; dry_run and the planner use this one", at_least=1
    )
    gpus_per_node: int = number(0, "GPUs of each machine. 0: those found on this machine", at_least=0)
    base_port: int = number(
        0, "First port of the run. 0: computed from the run's folder, below the ephemeral range", at_least=0, below=65_000
    )
    worker_restarts: int = number(20, "Restarts of each process that can be restarted", at_least=0)
    trainer_restarts: int = number(
        0, "Restarts of the trainer without a new checkpoint in between; restarts after a lost node do not count", at_least=0
    )
    trainer_python: str = text("", "Python of the trainer's environment. \"\": the launcher's own")
    rollout_python: str = text("", 'Python of engines, queue server and judges. "": the launcher\'s own')
    heartbeat_s: float = number(30.0, "A node that sends no heartbeat for this long is lost (Slurm)", above=0)
    save_s: float = number(
        480.0, "Deadline of the checkpoint that SIGUSR1 asks for; less than --signal in the batch script (Slurm)", above=0
    )
    requeues: int = number(20, "Times that one job is requeued after its time limit or lost nodes (Slurm)", at_least=0)
    setup: list[str] = texts('Shell lines that run before each process, such as "module load cuda" (Slurm)')
    container: str = text("", 'Image in which every process runs. "": none (Slurm)')
    container_runtime: str = choice(
        "pyxis", "What runs the container (Slurm)", {"pyxis": "Slurm's plugin", "apptainer": "Apptainer"}
    )
    container_mounts: list[str] = texts("FROM:TO, mounted beside the working folder and the run's folder (Slurm)")
    srun_args: list[str] = texts("Further arguments of every srun (Slurm)")


@dataclass(kw_only=True)
class SftConfig:
    """What only supervised fine-tuning reads (`python -m trainer.sft`)."""

    epochs: int = number(1, "Passes over the chats of data.train", at_least=1)
    examples_per_step: int = number(32, "Chats in one optimizer step", at_least=1)


@dataclass(kw_only=True)
class PlanConfig:
    """What only `python -m launch.plan` and the simulator read. The defaults describe the job of 256 H100 GPUs."""

    prompt_tokens: float = number(1200.0, "Mean length of a prompt", above=0)
    completion_tokens: float = number(
        2500.0, "Mean length of a completion; the longest reach rollout.max_completion_tokens", above=0
    )
    length_sigma: float = number(
        1.0, "Standard deviation of the logarithm of the length; at 1 the 99th percentile is ten medians", above=0
    )
    sandbox_s: float = number(8.0, "CPU seconds that the tests of one completion take", above=0)
    sandbox_cores: int = number(1024, "CPU cores that run tests", at_least=1)
    target_hours: float = number(48.0, "Time in which trainer.steps should be done", above=0)
    gpu_memory_gb: float = number(80.0, "Memory of one GPU", above=0)
    hbm_gb_s: float = number(3350.0, "Memory bandwidth of one GPU", above=0)
    peak_tflops: float = number(989.0, "Peak of one GPU in dense bfloat16", above=0)
    nvlink_gb_s: float = number(900.0, "NVLink bandwidth of one GPU, both directions together", above=0)
    network_gb_s: float = number(50.0, "Network bandwidth of one GPU", above=0)
    storage_gb_s: float = number(20.0, "Bandwidth of the shared storage for all nodes together", above=0)
    node_mtbf_days: float = number(20.0, "Mean time between failures of one node", above=0)
    restart_s: float = number(
        600.0, "Time from a lost trainer node until training continues, without the steps that are repeated", above=0
    )
    staleness_limit: int = number(
        4, "Largest staleness that the search tries; published runs learned as well up to 4, and less well at 8", at_least=1
    )
    max_cp: int = number(1, "Largest context parallelism that the search tries", at_least=1)
    compute_fraction: float = number(0.40, "Assumed fraction of peak FLOP/s (in the 'stated' estimate)", above=0, at_most=1)
    bandwidth_fraction: float = number(
        0.75, "Assumed fraction of peak memory bandwidth (in the 'stated' estimate)", above=0, at_most=1
    )
    out: str = text("", 'JSON file for the plan. "": none')
    figures: str = text("", 'File for the figures, .html or .png. "": none')
    show: list[str] = texts("Sections of the report that are shown; none: all")


@dataclass(kw_only=True)
class RunConfig:
    """The run itself."""

    name: str = text("run", 'Name of the run\'s folder. "": experiment, date and time')
    output: str = text("outputs", "The run's folder is output/name")
    resume: str = text("", "Folder of a run to resume from its last checkpoint")
    dry_run: bool = flag(False, "Shows placement, configuration and costs, and starts nothing")
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    user_code: dict[str, str] = field(
        default_factory=dict, metadata={RULE: Rule(meaning="The digest of each module of user code; the launcher writes it")}
    )

    @property
    def first_pass_is_old(self) -> bool:
        """Whether the first minibatch takes its old log-probs from its own forward pass, which is the old policy's: nothing has
        been updated yet. Not where all old log-probs must be known before the first loss."""
        return self.trainer.reuse_first_forward and self.algo.kl_in != "reward" and not self.algo.teacher


def settings(group: type = RunConfig, prefix: str = "") -> Iterator[tuple[str, Any, Field[Any]]]:
    """Every setting of a group: its key, its type and its field."""
    types = get_type_hints(group)
    for item in fields(group):
        if RULE in item.metadata:
            yield prefix + item.name, types[item.name], item
        else:
            yield from settings(types[item.name], f"{prefix}{item.name}.")


RULES: Mapping[str, Rule] = {key: item.metadata[RULE] for key, _, item in settings()}


def value_of(config: RunConfig, key: str) -> Any:
    node: Any = config
    for part in key.split("."):
        node = getattr(node, part)
    return node
