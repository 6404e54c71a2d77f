"""A check of the disk: it has room for the checkpoints that are kept, the one that is being written, and the last weights."""

import shutil
from pathlib import Path

from conf.compose.run_folder import CHECKPOINTS, HF
from conf.schema import RunConfig
from launch.doctor.case import Case, existing
from launch.doctor.finding import Check, Finding, failure, ok, skipped, warning

WEIGHT_BYTES = {"bfloat16": 2, "float32": 4}
OPTIMIZER_BYTES = 12  # per parameter: the fp32 weight and two moments
WARN_BELOW = 1.2  # times the need, since others write to the same disk


def needed_bytes(config: RunConfig, parameters: float) -> tuple[float, float]:
    """The size of one checkpoint, and of everything that a run has on the disk at the same time."""
    weights = WEIGHT_BYTES[config.model.dtype] * parameters
    one = weights + OPTIMIZER_BYTES * parameters
    return one, (config.trainer.checkpoints_kept + 1) * one + config.trainer.save_hf * weights


def disk_space(case: Case) -> Finding:
    if not case.parameters:
        return skipped("the model's size is not known")
    one, needed = needed_bytes(case.config, case.parameters)
    folder = existing(case.run_dir)
    # A run that is resumed has written some of it.
    written = sum(_bytes(file) for part in (CHECKPOINTS, HF) for file in (case.run_dir / part).rglob("*"))
    free = shutil.disk_usage(folder).free + written
    kept = case.config.trainer.checkpoints_kept
    own = f", {written / 1e9:.1f} of them in this run's files" if written else ""
    what = f"{needed / 1e9:.1f} GB needed ({kept} + 1 checkpoints of {one / 1e9:.2f} GB)"
    said = f"{free / 1e9:.1f} GB free at {folder}{own}, {what}"
    remedy = "free some, choose another output=…, or lower trainer.checkpoints_kept"
    if free < needed:
        return failure(said, remedy)
    return warning(said, remedy) if free < WARN_BELOW * needed else ok(said)


def _bytes(file: Path) -> int:
    """0 for a file that is just being deleted."""
    try:
        return file.lstat().st_size
    except FileNotFoundError:
        return 0


CHECKS = (Check(name="disk space", run=disk_space),)
