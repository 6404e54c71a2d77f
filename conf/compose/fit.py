"""Settings that are fitted to others when a configuration is composed, so that a preset works with any problems."""

from collections.abc import Iterator
from math import ceil

from conf.schema import RunConfig
from conf.shapes import layout_of


def fit(config: RunConfig) -> list[str]:
    """Gives a microbatch room for the longest trajectory, and ends the warm-up before the run ends.

    Returns one sentence per setting that was changed.
    """
    return list(_changes(config))


def _changes(config: RunConfig) -> Iterator[str]:
    trainer = config.trainer
    longest = config.data.max_prompt_tokens + config.rollout.max_completion_tokens
    multiple = layout_of(trainer).token_multiple
    if (tokens := ceil(longest / multiple) * multiple) > trainer.tokens_per_microbatch:
        yield (
            f"trainer.tokens_per_microbatch={trainer.tokens_per_microbatch} is raised to {tokens}: a trajectory may have "
            f"data.max_prompt_tokens + rollout.max_completion_tokens = {longest} tokens"
        )
        trainer.tokens_per_microbatch = tokens
    if (optimizer_steps := trainer.steps * config.algo.minibatches) <= trainer.warmup_steps:
        yield (
            f"trainer.warmup_steps={trainer.warmup_steps} is lowered to {optimizer_steps - 1}: the run has {optimizer_steps} "
            "optimizer steps"
        )
        trainer.warmup_steps = optimizer_steps - 1
