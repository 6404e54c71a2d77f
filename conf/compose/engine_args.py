"""Arguments of SGLang that `rollout.engine_args` must not hold, because tokens would be sampled from another distribution.

The trainer learns from tokens that the policy sampled at `rollout.temperature`, with nothing cut off. An engine that samples in
another way, or from another model, still reports log-probs, so nothing else would notice. Names are those of SGLang 0.5.23.
"""

from collections.abc import Mapping, Sequence

from conf.schema import ConfigError

CHANGES_SAMPLING = "changes how tokens are sampled; only rollout.temperature may do that"
SPECULATES = "samples by speculative decoding, whose draft model is not trained with the policy"
CHANGES_MODEL = "makes the engine sample from another model than the one that is trained"
HIDES_ARGUMENTS = "reads further arguments from a file, where they cannot be checked; name each one in rollout.engine_args"
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "--preferred-sampling-params", "--sampling-defaults", "--enable-watermark", "--watermark-config",
            "--enable-custom-logit-processor", "--enable-strict-thinking", "--forward-hooks", "--allow-auto-truncate",
            "--dllm-algorithm", "--dllm-algorithm-config",
        ),
        CHANGES_SAMPLING,
    ),
    **dict.fromkeys(("--speculative-", "--decoupled-spec-", "--enable-multi-layer-eagle", "--uno-lora-path"), SPECULATES),
    **dict.fromkeys(
        (
            "--model-path", "--revision", "--dtype", "--load-format", "--model-loader-extra-config", "--custom-weight-loader",
            "--json-model-override-args", "--quantization", "--quantize-and-serve", "--modelopt-", "--rl-quant-profile",
            "--kv-cache-dtype", "--enable-quant-communications", "--enable-hisparse", "--hisparse-config",
            "--hierarchical-sparse-attention-extra-config", "--enable-lora", "--lora-",
        ),
        CHANGES_MODEL,
    ),
    "--config": HIDES_ARGUMENTS,
}  # fmt: skip
"""Name -> why. A name that ends with a dash stands for all names that begin with it."""


def check_engine_args(arguments: Sequence[str]) -> None:
    """Raises ConfigError."""
    for argument in arguments:
        name = argument.split()[0].partition("=")[0] if argument.strip() else ""
        if name.startswith("--") and (why := next((why for option, why in REFUSED.items() if _means(name, option)), "")):
            raise ConfigError(f"rollout.engine_args: {name} {why}; leave it out")


def _means(name: str, option: str) -> bool:
    """Whether an engine may take the name for the option: argparse takes the beginning of a name for the whole one."""
    return option.startswith(name) or (option.endswith("-") and name.startswith(option))
