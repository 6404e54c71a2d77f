"""Where the figures of a run are written: `metrics.jsonl`, TensorBoard and, if a project is named, Weights & Biases.

A logger that fails never ends the training: its figures are missing, and a warning says why.
"""

import json
import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from conf.compose.run_folder import METRICS, TENSORBOARD
from conf.schema import RunConfig

log = logging.getLogger("trainer")
REASONS = "verdict_reasons"
"""The one entry of a line that is no number; see `batch_figures.commonest_reasons`."""


class Logger(Protocol):
    def write(self, step: int, figures: Mapping[str, float], reasons: Mapping[str, int]) -> None: ...

    def close(self) -> None: ...


class Loggers:
    """All loggers of a run, on rank 0."""

    def __init__(self, run_dir: Path, config: RunConfig, *, version: int) -> None:
        """version: the version that the run starts at. What an interrupted run wrote beyond it is removed, as those steps are
        done again."""
        makers: dict[str, Callable[[], Logger]] = {
            "metrics.jsonl": lambda: JsonLines(run_dir / METRICS, version),
            "TensorBoard": lambda: TensorBoard(run_dir / TENSORBOARD, version),
        }
        if config.trainer.wandb_project:
            makers["Weights & Biases"] = lambda: WeightsAndBiases(run_dir, config)
        self._failing: set[str] = set()
        made = {name: self._try(name, make) for name, make in makers.items()}
        self._loggers = {name: logger for name, logger in made.items() if logger is not None}

    def write(self, step: int, figures: Mapping[str, float], reasons: Mapping[str, int]) -> None:
        for name, logger in self._loggers.items():
            self._try(name, partial(logger.write, step, figures, reasons))

    def close(self) -> None:
        for name, logger in self._loggers.items():
            self._try(name, logger.close)

    def _try(self, name: str, action: Callable[[], Any]) -> Any:
        """Calls a logger. It warns once when a logger begins to fail, not once per step."""
        try:
            result = action()
        except Exception as error:  # noqa: BLE001 - no logger is worth the training, whatever happens inside it
            if name not in self._failing:
                log.warning("warning: figures are missing in %s (training goes on): %s", name, error or type(error).__name__)
            self._failing.add(name)
            return None
        self._failing.discard(name)
        return result


class JsonLines:
    """`metrics.jsonl`: one JSON object per step."""

    def __init__(self, path: Path, version: int) -> None:
        kept = [line for line in _lines(path) if _step(line) <= version] if version else []
        # Replaced, not rewritten: whoever follows the file sees the whole old one or the whole new one.
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text("".join(kept))
        unfinished.replace(path)
        self._file = path.open("a", buffering=1)

    def write(self, step: int, figures: Mapping[str, float], reasons: Mapping[str, int]) -> None:
        line: dict[str, Any] = {"step": step, "time": round(time.time(), 3)}
        line |= {name: round(float(value), 8) for name, value in sorted(figures.items())}
        if reasons:
            line[REASONS] = dict(reasons)
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    def __init__(self, folder: Path, version: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and only rank 0 writes

        self._writer = SummaryWriter(str(folder), purge_step=version + 1 if version else None)

    def write(self, step: int, figures: Mapping[str, float], reasons: Mapping[str, int]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """One W&B run per run: its id is kept in the run's folder, so a resumed run goes on in the same W&B run."""

    def __init__(self, run_dir: Path, config: RunConfig) -> None:
        import wandb  # optional: needed only if a project is named

        id_file = run_dir / "wandb_id"
        if not id_file.exists():
            id_file.write_text(secrets.token_hex(8))
        self._run = wandb.init(
            project=config.trainer.wandb_project,
            name=config.name,
            id=id_file.read_text(),
            resume="allow",
            config=asdict(config),
            dir=str(run_dir),
        )
        # W&B's own step may not go back, but a resumed run does some steps again: "step" is the x axis instead.
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, figures: Mapping[str, float], reasons: Mapping[str, int]) -> None:
        self._run.log({"step": step, **figures})

    def close(self) -> None:
        self._run.finish()


def _lines(path: Path) -> list[str]:
    """The complete lines: a killed run may have left half a line at the end."""
    if not path.exists():
        return []
    return [line for line in path.read_text(errors="replace").splitlines(keepends=True) if line.endswith("\n")]


def _step(line: str) -> float:
    """The step of a line; infinity for a damaged line (a full disk, a lost block), so that it is removed."""
    try:
        found = json.loads(line)
    except json.JSONDecodeError:
        return math.inf
    step = found.get("step") if isinstance(found, dict) else None
    return step if isinstance(step, int) else math.inf
