"""The speed of a real run: its configuration and the metrics of its steps, read from its folder. Files are read only here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from conf.compose.load import read_run
from conf.schema import ConfigError, RunConfig
from launch.report.metrics_file import read_metrics

Metrics = Mapping[str, Any]
WARM_UP_STEPS = 2  # the first pushes, and what is compiled or loaded at first use
FEWEST_STEPS = 12
NEEDED = ("time/step_s", "time/wait_batch_s", "tokens/trained", "completion/max_tokens", "queue/to_grade")


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    name: str  # its folder
    config: RunConfig
    steps: Sequence[Metrics]  # one line of metrics per step that holds all of NEEDED

    @property
    def supplied(self) -> Sequence[Metrics]:
        """The steps without the last `max_staleness` of a run that has ended. The fleet has nothing left to generate then, so its
        idle time says nothing about its speed."""
        last = self.config.trainer.steps - self.config.rollout.max_staleness
        return [line for line in self.steps if line["step"] <= last]

    @property
    def warm(self) -> Sequence[Metrics]:
        return self.steps[WARM_UP_STEPS:]


def read_measured_run(run_dir: Path, overrides: Sequence[str] = ()) -> MeasuredRun:
    """Raises ConfigError for a folder that is no run's, and for a run that is too short to learn from."""
    config = read_run(run_dir, overrides)
    lines = [line for line in read_metrics(run_dir) if "time/step_s" in line]
    lacking = [[key for key in NEEDED if not _is_number(line.get(key))] for line in lines]
    complete = [line for line, keys in zip(lines, lacking, strict=True) if not keys]
    if len(complete) < FEWEST_STEPS:
        without = next((f" with {keys[0]}" for keys in lacking if keys), "")
        raise ConfigError(
            f"{run_dir}: {len(complete)} steps were measured{without}; to calibrate and predict takes at least {FEWEST_STEPS}"
        )
    return MeasuredRun(name=str(run_dir), config=config, steps=complete)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and isfinite(value)
