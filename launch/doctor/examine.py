"""All checks in their order, and how a launch uses those of them that are fast."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from conf.schema import ConfigError, RunConfig
from launch.doctor import checkpoint, machine, model_folder, other_models, problems, software, storage, user_code
from launch.doctor.case import Case, DoctorError, gather
from launch.doctor.finding import Check, Finding, Level
from launch.placement.placement import ProcessSpec

CHECKS: tuple[Check[Case], ...] = (
    *model_folder.CHECKS, *other_models.CHECKS, *problems.CHECKS, *user_code.CHECKS, *checkpoint.CHECKS,
    *storage.CHECKS, *machine.CHECKS, *software.CHECKS,
)  # fmt: skip
INPUT_CHECKS = ("model folder", "layout", "teacher", "judge model", "problems", "user code", "checkpoint")
"""Checks of the user's own files. They need no answer of a node, so they run before anything is made."""

FULL_VERSIONS = {
    "problems": "all problems",
    "checkpoint": "checkpoint digests",
}
"""Fast check -> the slow check that replaces it in the doctor."""


def examine(case: Case, *, fast: bool) -> Iterator[tuple[str, Finding]]:
    """The findings in the order of the checks: all of them, or those of a launch. The slow checks run in parallel."""
    return _findings(case, [c for c in CHECKS if (c.fast or c.name in INPUT_CHECKS if fast else c.name not in FULL_VERSIONS)])


def _findings(case: Case, chosen: Sequence[Check[Case]]) -> Iterator[tuple[str, Finding]]:
    with ThreadPoolExecutor() as pool:
        waiting = {check.name: pool.submit(check.run, case) for check in chosen if not check.fast}
        for check in chosen:
            yield check.name, waiting[check.name].result() if check.name in waiting else check.run(case)


def input_findings(config: RunConfig, run_dir: Path, processes: Sequence[ProcessSpec]) -> dict[str, Finding]:
    """What is found of model, problems, user code and checkpoint, as far as this machine sees them."""
    case = Case(config=config, run_dir=run_dir, processes=processes)
    return {check.name: check.run(case) for check in CHECKS if check.name in INPUT_CHECKS}


def check_inputs(config: RunConfig, run_dir: Path, processes: Sequence[ProcessSpec]) -> None:
    """Before anything is made. Raises ConfigError."""
    findings = input_findings(config, run_dir, processes).values()
    if failures := [line(finding) for finding in findings if finding.level is Level.FAILURE]:
        raise ConfigError("\n".join(failures))


def check_before_start(config: RunConfig, run_dir: Path, processes: Sequence[ProcessSpec], say: Callable[[str], None]) -> None:
    """Runs the fast checks, after `check_inputs`. Says which problems it found, and warnings; failures refuse the start.

    Raises ConfigError.
    """
    try:
        findings = list(_findings(gather(config, run_dir, processes), [check for check in CHECKS if check.fast]))
    except DoctorError as error:
        raise ConfigError(f"the nodes cannot be examined: {error}") from error
    if failed := [line(finding) for _, finding in findings if finding.level is Level.FAILURE]:
        raise ConfigError("\n".join(failed))
    for name, finding in findings:
        if finding.level is Level.WARNING:
            say(f"warning, {name}: {line(finding)}")
        elif name == "problems":
            say(finding.message)


def line(finding: Finding) -> str:
    return f"{finding.message}: {finding.remedy}" if finding.remedy else finding.message
