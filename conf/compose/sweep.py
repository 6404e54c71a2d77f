"""What the launcher needs to know about Hydra's sweeps: the folder, the words that vary, and how failed jobs are treated."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig


class RememberSweep(Callback):
    """Remembers the folder of a multirun in `sweep_dir`."""

    sweep_dir: Path | None = None

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        type(self).sweep_dir = Path(config.hydra.sweep.dir)


MULTIRUN = ("-m", "--multirun")
UNNAMED = "hydra.job.config.override_dirname.exclude_keys"


def unnamed_keys(words: Sequence[str]) -> str:
    """The Hydra override that keeps keys which no job varies out of the jobs' names. Hydra hands it to every job of the sweep."""
    overrides = OverridesParser.create().parse_overrides([word for word in words if "=" in word and not word.startswith("-")])
    fixed = [override.get_key_element().lstrip("+~") for override in overrides if not override.is_sweep_override()]
    keys = ",".join(f"'{key}'" for key in fixed)
    return f"{UNNAMED}=[{keys}]"


OPTUNA = "hydra/sweeper=optuna"
OPTUNA_GOES_ON = "hydra.sweeper.max_failure_rate=1.0"
"""Put before the words of the user, so that a failed trial does not end Optuna's search unless the user wants it."""


def failures_are_raised(hydra: Any) -> bool:
    """Optuna's sweeper counts an exception as a failed trial and cannot read NaN. Hydra's own sweeper ends at an exception."""
    return bool(hydra.runtime.choices.get("hydra/sweeper") == "optuna")
