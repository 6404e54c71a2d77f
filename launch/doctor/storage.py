"""Check of the disk: the checkpoints that are kept, the one being written, the last weights, and the journal must fit."""

import shutil

from conf.schema import RunConfig
from launch.doctor.case import Case, existing
from launch.doctor.finding import Check, Finding, failure, ok, skipped, warning

WEIGHT_BYTES = {"bfloat16": 2, "float32": 4}
OPTIMIZER_BYTES = 12  # fp32 weight and two moments
SPARE = 1.2  # below so many times the need it warns: others write there too


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
    free = shutil.disk_usage(folder).free
    kept = case.config.trainer.checkpoints_kept
    said = f"{free / 1e9:.1f} GB free at {folder}, {needed / 1e9:.1f} GB needed ({kept} + 1 checkpoints of {one / 1e9:.2f} GB)"
    remedy = "free some, choose another output=…, or lower trainer.checkpoints_kept"
    if free < needed:
        return failure(said, remedy)
    return warning(said, remedy) if free < SPARE * needed else ok(said)


CHECKS = (Check(name="disk space", ask=disk_space),)
