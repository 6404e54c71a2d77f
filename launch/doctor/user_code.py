"""A check of the user's own code: the processes that need it can load it, with their own Python and on their own node."""

import subprocess
from collections.abc import Sequence

from conf.schema import ConfigError
from conf.user_code import Named, find, named
from launch.doctor.case import Case, everywhere
from launch.doctor.finding import Check, Finding, failure, ok, skipped
from launch.placement.placement import ProcessSpec

LOAD_S = 120.0  # most of it is the import of torch
REMEDY = "mend the code or the setting; docs/extending.md has an example of each kind"


def loads(case: Case) -> Finding:
    wanted = list(named(case.config))
    if not wanted:
        return skipped("no setting names user code")
    for role in dict.fromkeys(one.role for one in wanted):
        processes = [process for process in case.processes if process.role == role]
        if refusal := _refusal([one for one in wanted if one.role == role], processes, case):
            return failure(refusal, REMEDY)
    return ok(", ".join(one.name for one in wanted))


def _refusal(wanted: Sequence[Named], processes: Sequence[ProcessSpec], case: Case) -> str:
    for one in wanted:
        try:
            find(one.name, case.run_dir, setting=one.setting)
        except ConfigError as error:
            return str(error)
    python = processes[0].argv[0]
    words = [python, "-m", "conf.user_code", str(case.run_dir), *(f"{one.setting}={one.name}" for one in wanted)]
    command = everywhere(words, case.config, case.run_dir, processes[:1])
    if command == words and case.config.cluster.container:
        return ""  # that Python is in the container, and this machine is outside of the job
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=LOAD_S)
    except OSError as error:
        return f"user code cannot be loaded: {python}: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"user code was not loaded within {LOAD_S:g} s: {', '.join(one.name for one in wanted)}"
    return answer.stderr.strip()[-2000:] if answer.returncode else ""


CHECKS = (Check(name="user code", run=loads, fast=False),)
