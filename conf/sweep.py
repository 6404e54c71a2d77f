"""Where a multirun put its jobs, for whoever reports on it after Hydra is done."""

from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig


class RememberSweep(Callback):
    """After a multirun, `sweep_dir` is its folder."""

    sweep_dir: Path | None = None

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        type(self).sweep_dir = Path(config.hydra.sweep.dir)
