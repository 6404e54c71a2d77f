"""Settings that are fitted to others when a configuration is composed, so that a preset works with any problems."""

from math import ceil

from conf.schema import RunConfig
from conf.shapes import layout_of


def fit(config: RunConfig) -> None:
    """A microbatch has room for the longest trajectory, and the warm-up ends before the run does."""
    trainer = config.trainer
    longest = config.data.max_prompt_tokens + config.rollout.max_completion_tokens
    multiple = layout_of(trainer).token_multiple
    trainer.tokens_per_microbatch = max(trainer.tokens_per_microbatch, ceil(longest / multiple) * multiple)
    trainer.warmup_steps = min(trainer.warmup_steps, trainer.steps * config.algo.minibatches - 1)
