"""Every figure of `metrics.jsonl`, with its unit and its meaning: the one place where figures are explained.

python -m trainer.metrics.table [FILE]        FILE is docs/metrics.md; without it the page is printed
"""

import re
from dataclasses import dataclass

from conf.compose.reference import write_page

HEAD = """# Metrics

This page is made by `python -m trainer.metrics.table docs/metrics.md` from `trainer/metrics/table.py`. Change that file, not this
page.

A run writes one JSON object per step to `metrics.jsonl` in its folder. The same figures go to TensorBoard
(`tensorboard --logdir outputs/<run>/tensorboard`) and, with `trainer.wandb_project`, to Weights & Biases. The line of step n
describes the step from version n - 1 to version n; a line of step 0 holds the first evaluation. Figures cover the tokens and
completions of all ranks. A figure that does not apply to a run, or to a step, is left out. "Healthy" is what we expect of a run
that works; it is a place to start looking, not a limit.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    name: str  # NAME and N stand for any text without a slash
    unit: str
    meaning: str
    healthy: str = ""


def figure(name: str, unit: str, meaning: str, healthy: str = "") -> Figure:
    return Figure(name=name, unit=unit, meaning=meaning, healthy=healthy)


SECTIONS: dict[str, tuple[Figure, ...]] = {
    "The line": (
        figure("step", "", "RL steps that are done, which is also the version of the weights."),
        figure("time", "s", "When the line was written, in seconds since 1970."),
        figure(
            "verdict_reasons", "count",
            "The most frequent reasons why completions did not get the full reward, each with its number of completions. "
            "Numbers and quoted words in a reason are replaced by `…`. Only in `metrics.jsonl`.",
        ),
    ),
    "Rewards": (
        figure("reward/mean", "", "Mean reward of the batch's completions, before shaping.", "rises over the run"),
        figure("reward/std", "", "Standard deviation of these rewards.", "above 0"),
        figure(
            "reward/groups_with_signal_fraction", "share", "Groups in which rewards differ; the others have no advantage.",
            "above 0.1; if it falls to 0, the problems are too easy or too hard",
        ),
        figure(
            "reward/steps_without_signal", "steps",
            "Steps in a row in which no group had different rewards, so the policy learned nothing from them. The trainer warns "
            "at 3. Counted from the start of the process; 0 with algo.reward_weight=0.",
            "0",
        ),
        figure("reward/part/NAME/mean", "", "Mean of one part of the verdicts, over the completions that have it."),
        figure("reward/part/NAME/min", "", "Smallest value of that part."),
        figure("reward/part/NAME/max", "", "Largest value of that part."),
    ),
    "Completions": (
        figure("completion/mean_tokens", "tokens", "Mean length of the completions that were trained on."),
        figure("completion/max_tokens", "tokens", "Length of the longest of them."),
        figure(
            "completion/length_capped_fraction", "share", "Completions that reached `rollout.max_completion_tokens`.",
            "below 0.1; if it grows, raise the limit or punish overlong completions",
        ),
        figure("trajectories/multi_version", "count", "Completions whose tokens were sampled by more than one version."),
        figure("trajectories/resumed", "count", "Completions of which a turn took more than one engine call."),
    ),
    "Episodes": (
        figure("episode/mean_turns", "turns", "Mean number of turns, in a batch with a completion of several turns."),
        figure("episode/max_turns", "turns", "The most turns of one completion.", "at most `rollout.max_turns`"),
        figure(
            "episode/environment_mean_s", "s", "Mean time that the environment of a completion took, its verdict included.",
            "well below the time that the completion is generated in",
        ),
        figure("episode/turns/N/reward_mean", "", "Mean reward of the completions with N turns."),
        figure("episode/turns/N/fraction", "share", "Completions with N turns."),
    ),
    "Staleness": (
        figure("lag/max_versions", "versions", "Age of the oldest trained token.", "at most `rollout.max_staleness`, always"),
        figure("lag/mean_versions", "versions", "Mean age of the trained tokens.", "about 1 in an asynchronous run"),
    ),
    "Loss": (
        figure("loss/total", "", "Mean loss per token: policy loss, KL and entropy bonus."),
        figure("loss/policy", "", "Mean policy loss per token, times the behaviour weight.", "near 0"),
        figure("loss/user/NAME", "", "A figure that the user's own loss returned, as mean over the tokens."),
        figure("entropy/mean", "nats", "Mean entropy of the policy at the sampled tokens.", "falls slowly, not to 0"),
        figure(
            "kl/reference", "nats", "Mean estimate of KL(policy || reference) per token, by `algo.kl_estimator`.",
            "below about 0.1 with the default coefficient",
        ),
        figure(
            "kl/teacher", "nats",
            "Mean of log-prob of the policy - log-prob of the teacher per token. It estimates KL(policy || teacher).",
            "falls",
        ),
        figure("clip/fraction", "share", "Tokens whose ratio current / old is clipped.", "below about 0.2"),
        figure("clip/low_fraction", "share", "Tokens that are clipped at the lower bound."),
        figure("clip/high_fraction", "share", "Tokens that are clipped at the upper bound."),
        figure("clip/dual_fraction", "share", "Tokens at the second bound of dual clipping (`algo.dual_clip`)."),
        figure("grad_norm", "", "Norm of the gradient before clipping, mean over the optimizer steps.", "steady"),
        figure("grad_norm_max", "", "Largest of these norms.", "not far above `grad_norm`"),
        figure("learning_rate", "", "Learning rate of the last optimizer step."),
    ),
    "Supervised fine-tuning": (
        figure("sft/loss", "nats", "Mean of -log-prob over the learned tokens of the step.", "falls"),
        figure("sft/heldout_loss", "nats", "The same over the chats of data.heldout.", "falls; if it rises, stop earlier"),
        figure("sft/epoch", "", "Passes over the chats that are done."),
    ),
    "Behaviour policy and engine mismatch": (
        figure("behaviour/weight_mean", "", "Mean of the weights that correct for the behaviour policy, as used.", "near 1"),
        figure("behaviour/weight_p99", "", "99th percentile of the raw weights exp(old - behaviour), to 1%."),
        figure("behaviour/weight_max", "", "Largest raw weight."),
        figure(
            "behaviour/ess_fraction", "share",
            "Effective sample size of the raw weights, as a share of the tokens. Below `algo.ess_floor` for "
            "`algo.ess_patience_steps` steps, the run ends.",
            "above 0.5",
        ),
        figure("mismatch/abs_logprob", "nats", "Mean |old - behaviour log-prob| per token: staleness and engine mismatch."),
        figure(
            "mismatch/same_version_abs_logprob", "nats",
            "The same over tokens that the present version sampled: the engines' numbers against the trainer's, nothing else.",
            "below 0.02 in bf16; above 0.1 trainer or engine is wrong",
        ),
        figure("mismatch/lag_N_abs_logprob", "nats", "The same over tokens that are n versions old.", "grows with n"),
    ),
    "Seconds": (
        figure("time/step_s", "s", "The whole step, from waiting for its batch to the end of the push."),
        figure("time/wait_batch_s", "s", "Waiting for the batch.", "small; otherwise the fleet is the bottleneck"),
        figure("time/pack_s", "s", "Packing trajectories into microbatches."),
        figure("time/old_logprob_s", "s", "Forward pass for the old log-probs."),
        figure(
            "time/ref_logprob_s", "s",
            "Forward pass for the log-probs of the reference, or of a teacher in its place, with both swaps.",
        ),
        figure("time/reference_swap_s", "s", "Swapping the reference's weights in and out again."),
        figure("time/train_s", "s", "Forward, backward and optimizer steps of all minibatches."),
        figure("time/push_s", "s", "Pushing the weights to the engines."),
        figure("time/checkpoint_stall_s", "s", "Time that the training loop lost to checkpoints."),
        figure("time/checkpoint_write_s", "s", "From the copy of the state to the finished checkpoint, of the last one."),
        figure("time/eval_s", "s", "Waiting for an evaluation: only before the first and after the last step."),
        figure("idle/trainer_fraction", "share", "Share of the step that the trainer waits for its batch.", "below 0.1"),
        figure("idle/rollout_fraction", "share", "Share of their time that the workers have nothing to generate.", "below 0.1"),
    ),
    "Tokens": (
        figure("tokens/trained", "tokens", "Sampled tokens in the batch."),
        figure("tokens/trained_per_s", "tokens/s", "The same per second of the step."),
        figure("tokens/generated_per_s", "tokens/s", "Tokens that all engines sampled, since the last step."),
    ),
    "Packing": (
        figure("packing/padding_fraction", "share", "Padding among the tokens that go through the model.", "near 0"),
        figure(
            "packing/dp_imbalance_fraction", "share",
            "How much longer a step computes than with equal work on every data-parallel rank.", "below 0.02",
        ),
        figure("packing/microbatches", "count", "Microbatches per data-parallel rank."),
    ),
    "Push": (
        figure("push/bytes", "bytes", "Sent to each engine."),
        figure("push/pause_s", "s", "How long the engines stood still."),
        figure("push/engines", "count", "Engines that hold the new version.", "all of them"),
    ),
    "Queue": (
        figure("queue/ready_groups", "groups", "Groups that are complete and not yet trained on, at the end of the step."),
        figure("queue/untaken_groups", "groups", "Groups that are admitted and not yet trained on."),
        figure("queue/waiting_tokens", "tokens", "Sampled tokens that are not yet trained on."),
        figure("queue/to_grade", "count", "Completions that wait for a judge or are being graded.", "small"),
        figure("queue/dropped_groups", "groups", "Groups dropped since the run began (`algo.drop_no_signal`, refused prompts)."),
        figure("queue/lost_tokens", "tokens", "Sampled tokens lost since the run began, as by an engine that died."),
    ),
    "Evaluation": (
        figure("eval/pass_rate", "share", "Completions of held-out problems with the full reward of 1.", "rises"),
        figure("eval/reward_mean", "", "Mean reward of the completions of held-out problems."),
        figure(
            "eval/kl_teacher", "nats",
            "Mean of log-prob - teacher's log-prob over the tokens of held-out problems, as the engines and the teacher's server "
            "report them.",
            "falls",
        ),
        figure("eval/tokens", "tokens", "Sampled for the evaluation."),
        figure("eval/version", "", "Version at which the evaluation was asked for."),
        figure("eval/version_min", "", "Oldest version among its tokens."),
        figure("eval/version_max", "", "Newest version among its tokens: a push does not stop an evaluation."),
        figure("eval/wall_s", "s", "From asking for it to its result."),
    ),
    "Reference and checkpoints": (
        figure("reference/version", "", "Version whose weights are the reference; 0 is the model's folder."),
        figure("reference/host_bytes", "bytes", "CPU memory of the reference on one rank."),
        figure("checkpoint/failed", "count", "Checkpoints that failed at this step.", "0"),
    ),
}  # fmt: skip


def find(name: str) -> Figure | None:
    """The entry of the table for a figure's name."""
    entries = (entry for section in SECTIONS.values() for entry in section)
    return next((entry for entry in entries if _pattern(entry.name).fullmatch(name)), None)


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile("[^/]+".join(re.escape(part) for part in re.split(r"NAME|N", name)))


def page() -> str:
    lines = [HEAD]
    for title, figures in SECTIONS.items():
        lines += [f"## {title}\n", "| figure | unit | meaning | healthy |", "|---|---|---|---|"]
        lines += [f"| `{f.name}` | {f.unit} | {f.meaning.replace('|', chr(92) + '|')} | {f.healthy} |" for f in figures]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    write_page(page, __doc__)
