"""Checks of the checkpoint from which a resumed run goes on.

A launch looks only whether the files are there, since a large checkpoint takes minutes to read. The trainer compares the digests
when it loads the checkpoint, and the doctor does so before.
"""

from pathlib import Path

from conf.compose.run_folder import CHECKPOINTS
from launch.doctor.case import Case
from launch.doctor.finding import Check, Finding, failure, ok, skipped, warning
from rollout.checkpoint_files import SumsError, complete, damage, read_sums


def files_there(case: Case) -> Finding:
    return _check(case, digests=False)


def digests_match(case: Case) -> Finding:
    return _check(case, digests=True)


def _check(case: Case, *, digests: bool) -> Finding:
    checkpoints = complete(case.run_dir / CHECKPOINTS)
    if not checkpoints:
        return skipped("the run has no checkpoint yet")
    newest = checkpoints[-1][1]
    try:
        fault = damage(newest) if digests else _missing(newest)
    except SumsError as error:
        return failure(str(error), "or remove that checkpoint, so that the run goes on from an older one")
    if fault is None:
        return ok(f"{newest.name}: {'digests match' if digests else 'all files are there'}")
    if len(checkpoints) == 1:
        return failure(f"{fault}, and there is no older checkpoint", "bring the file back, or begin a new run")
    older = checkpoints[-2][1].name
    return warning(fault, f"bring the file back, or let the run go on from {older} by itself and repeat the steps since then")


def _missing(checkpoint: Path) -> str | None:
    return next((f"{checkpoint / name} is missing" for name in read_sums(checkpoint) if not (checkpoint / name).is_file()), None)


CHECKS = (
    Check(name="checkpoint", run=files_there),
    Check(name="checkpoint digests", run=digests_match, fast=False),
)
