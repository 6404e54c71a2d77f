"""What the launcher must know of Hydra's sweeps: where one put its jobs, and how its sweeper takes a failed one."""

from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig


class RememberSweep(Callback):
    """After a multirun, `sweep_dir` is its folder."""

    sweep_dir: Path | None = None

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        type(self).sweep_dir = Path(config.hydra.sweep.dir)


OPTUNA = "hydra/sweeper=optuna"
TOLERANT = "hydra.sweeper.max_failure_rate=1.0"
"""Goes before the user's own words: unless told otherwise, a failed trial does not end Optuna's search."""


def failures_are_raised(hydra: Any) -> bool:
    """Optuna's sweeper takes an exception for a failed trial and stumbles over NaN; Hydra's own is ended by an exception."""
    return bool(hydra.runtime.choices.get("hydra/sweeper") == "optuna")
