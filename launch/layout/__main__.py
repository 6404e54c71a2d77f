"""The overrides that suit this node's GPUs, one a line; launch/debug.sh adds them to its command.

    python -m launch.layout [override …]

Of a sweep (`-m trainer.lr=1e-5,1e-4`) it takes the first value of each. It prints nothing where a run goes by the experiment as
it is: with fewer than two GPUs, and for a run that is resumed.
"""

import sys

from hydra.core.override_parser.overrides_parser import OverridesParser

from conf.load import composed, to_run_config
from conf.schema import ConfigError
from launch.doctor.node import gpus
from launch.layout.fit import fit
from launch.plan.inputs import read_model
from launch.site import visible_gpus

ASKED_WRONGLY = 2
MULTIRUN = ("-m", "--multirun")


def main(words: list[str]) -> int:
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return 0
    found = gpus()
    if (visible := visible_gpus()) is not None:
        found = found[: len(visible)]
    if len(found) < 2 or any(word.startswith("resume=") for word in words):
        return 0
    try:
        config = to_run_config(composed(["name=layout", "experiment=debug", *one_job(words)]))
        gpu_bytes = min(gpu["memory_mb"] for gpu in found) * 1024.0**2
        layout = fit(len(found), gpu_bytes, read_model(config), config.trainer.tokens_per_microbatch)
    except ConfigError as error:
        print(f"layout: {error}", file=sys.stderr)
        return ASKED_WRONGLY
    print("\n".join(layout.overrides))
    return 0


def one_job(words: list[str]) -> list[str]:
    """The overrides of a sweep's first job; what a sweeper draws by itself, and what is for Hydra alone, is left out."""
    if not set(words) & set(MULTIRUN):
        return words
    kept = [word for word in words if word not in MULTIRUN and not word.startswith(("hydra.", "hydra/"))]
    job = []
    for word, parsed in zip(kept, OverridesParser.create().parse_overrides(kept), strict=True):
        if not parsed.is_sweep_override():
            job.append(word)
        elif parsed.is_discrete_sweep():
            job.append(f"{parsed.get_key_element()}={next(parsed.sweep_string_iterator())}")
    return job


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
