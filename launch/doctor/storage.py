"""Check of the disk: the checkpoints that are kept, the one being written, the last weights, and the journal must fit."""

import shutil
from pathlib import Path

from conf.schema import RunConfig
from launch.doctor.case import Case, existing
from launch.doctor.finding import Check, Finding, failure, ok, skipped, warning

WEIGHT_BYTES = {"bfloat16": 2, "float32": 4}
OPTIMIZER_BYTES = 12  # fp32 weight and two moments
SPARE = 1.2  # below so many times the need it warns: others write there too


LEAVES = ("checkpoints", "hf")  # what a run writes that is large, in its folder


def needed_bytes(config: RunConfig, parameters: float) -> tuple[float, float]:
    """Of one checkpoint, and of all that a run leaves at once."""
    weights = WEIGHT_BYTES[config.model.dtype] * parameters
    one = weights + OPTIMIZER_BYTES * parameters
    return one, (config.trainer.checkpoints_kept + 1) * one + config.trainer.save_hf * weights


def disk_space(case: Case) -> Finding:
    if not case.parameters:
        return skipped("the model's size is not known")
    one, needed = needed_bytes(case.config, case.parameters)
    folder = existing(case.run_dir)
    written = sum(_bytes(file) for part in LEAVES for file in (case.run_dir / part).rglob("*"))  # of a run that is resumed
    free = shutil.disk_usage(folder).free + written
    kept = case.config.trainer.checkpoints_kept
    of_it = f", {written / 1e9:.1f} of them in this run's files" if written else ""
    what = f"{needed / 1e9:.1f} GB needed ({kept} + 1 checkpoints of {one / 1e9:.2f} GB)"
    said = f"{free / 1e9:.1f} GB free at {folder}{of_it}, {what}"
    remedy = "free some, choose another output=…, or lower trainer.checkpoints_kept"
    if free < needed:
        return failure(said, remedy)
    return warning(said, remedy) if free < SPARE * needed else ok(said)


def _bytes(file: Path) -> int:
    """0 of what is just being deleted."""
    try:
        return file.lstat().st_size
    except FileNotFoundError:
        return 0


CHECKS = (Check(name="disk space", run=disk_space),)
