"""The checkpoints of a run: which one it starts from, when the next one is due, and which versions the ledger may forget."""

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from conf.schema import TrainerConfig
from rollout import checkpoint_files
from trainer.between_steps.evaluation import Evaluations
from trainer.between_steps.feed import Feed
from trainer.learn.health import TrainingError
from trainer.megatron import checkpoint
from trainer.megatron.checkpoint import Checkpoints, DamagedCheckpoint, Loaded, Saved, TrainingState
from trainer.ranks import Control
from trainer.step import Figures, Stopwatch

log = logging.getLogger("trainer")


def load_newest(folder: Path, state: TrainingState, control: Control) -> Loaded | None:
    """Loads the newest checkpoint whose files are undamaged; None if there is none. Collective."""
    while newest := control.share(str, lambda: str(checkpoint.latest(folder) or "")):
        try:
            loaded = checkpoint.load(newest, state)
        except DamagedCheckpoint as damaged:
            message = control.share(str, partial(checkpoint.put_aside, Path(newest), damaged))
            if control.is_leader:
                log.error(message)
            continue
        if control.is_leader:
            log.info("resumes from %s", newest)
        return loaded
    return None


class Saver:
    """Saves while training goes on. Every method is collective."""

    def __init__(
        self, checkpoints: Checkpoints, config: TrainerConfig, control: Control, feed: Feed, evaluations: Evaluations
    ) -> None:
        self._checkpoints, self._config = checkpoints, config
        self._control, self._feed, self._evaluations = control, feed, evaluations
        self._first_version = feed.version

    def after_step(self) -> Figures:
        """Starts a checkpoint of this version if one is due, and tells the ledger about those that are complete by now."""
        watch = Stopwatch()
        with watch("time/checkpoint_stall_s"):
            ended = [*self._checkpoints.poll(), *(self._begin() if self._is_due() else ())]
            self._settle(ended)
        figures = watch.seconds | {"checkpoint/failed": sum(saved.failure is not None for saved in ended)}
        if written_s := [saved.seconds for saved in ended if saved.failure is None]:
            figures["time/checkpoint_write_s"] = written_s[-1]
        return figures

    def save_now(self) -> None:
        """Saves this version, unless it was loaded or is being saved already."""
        if self._feed.version > self._first_version and not self._is_due():
            self._settle(self._begin())

    def wait(self) -> None:
        """Waits until the last checkpoint is written. Raises TrainingError if it failed."""
        ended = self._checkpoints.wait(timeout_s=self._config.collective_s)
        self._settle(ended)
        if failures := [saved.failure for saved in ended if saved.failure is not None]:
            raise TrainingError(f"the last checkpoint could not be written: {failures[-1]}")

    def _is_due(self) -> bool:
        version, every = self._feed.version, self._config.checkpoint_every
        return version == self._config.steps or (every > 0 and version % every == 0)

    def _begin(self) -> Sequence[Saved]:
        """Starts a checkpoint of this version, and returns how an earlier one ended."""
        extra: dict[str, Any] = {"ledger": self._feed.position(), "evaluation_owed": self._evaluations.owed}
        return self._checkpoints.begin_save(self._feed.version, extra)

    def _settle(self, ended: Sequence[Saved]) -> None:
        for saved in ended:
            if saved.failure is None:
                # The run may resume from the oldest kept checkpoint, so the ledger keeps what that one needs.
                oldest = self._control.share(int, lambda: checkpoint_files.complete(self._checkpoints.folder)[0][0])
                self._feed.durable(oldest)
            elif self._control.is_leader:
                log.error("the checkpoint of version %d failed: %s", saved.version, saved.failure)
