"""All checks in their order, and what a launch makes of the fast ones."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from conf.schema import ConfigError, RunConfig
from launch.doctor import machine, model_folder, problems, software, storage, user_code
from launch.doctor.case import Case, DoctorError, gather
from launch.doctor.finding import Check, Finding, Level
from launch.placement.placement import Process

CHECKS: tuple[Check[Case], ...] = (
    *model_folder.CHECKS, *problems.CHECKS, *user_code.CHECKS, *storage.CHECKS, *machine.CHECKS, *software.CHECKS,
)  # fmt: skip
REPLACED = {"problems": "all problems"}  # a fast check -> the slow one that says more


def examine(case: Case, *, fast: bool) -> Iterator[tuple[str, Finding]]:
    """The findings in the order of the checks; the slow checks run side by side."""
    asked = [c for c in CHECKS if (c.fast if fast else c.name not in REPLACED)]
    with ThreadPoolExecutor() as pool:
        waiting = {check.name: pool.submit(check.ask, case) for check in asked if not check.fast}
        for check in asked:
            yield check.name, waiting[check.name].result() if check.name in waiting else check.ask(case)


def check_before_start(config: RunConfig, run_dir: Path, processes: Sequence[Process], say: Callable[[str], None]) -> None:
    """The fast checks: warnings are said, failures refuse the start. Raises ConfigError."""
    try:
        findings = list(examine(gather(config, run_dir, processes), fast=True))
    except DoctorError as error:
        raise ConfigError(f"the nodes cannot be examined: {error}") from error
    if failed := [line(finding) for _, finding in findings if finding.level is Level.FAILURE]:
        raise ConfigError("\n".join(failed))
    for name, finding in findings:
        if finding.level is Level.WARNING:
            say(f"warning, {name}: {line(finding)}")


def line(finding: Finding) -> str:
    return f"{finding.said}: {finding.remedy}" if finding.remedy else finding.said
