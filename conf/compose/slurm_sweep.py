"""Sweeps through Slurm (`hydra/launcher=submitit_slurm`) outlive their jobs.

submitit raises an error when a job is killed (out of memory, node lost). The launcher plugin passes the error on, which ends the
sweep. Here each job of a sweep is a Slurm job of its own, and a job that dies counts as failed. The method of the plugin is
replaced, because Hydra finds launchers only in `hydra_plugins` packages. Remove this file when hydra-submitit-launcher returns
failed jobs instead of raising.
"""

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from math import nan
from typing import Any

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus

from conf.compose.sweep import failures_are_raised
from conf.schema import ConfigError

CHOICE = "hydra/launcher=submitit_slurm"
MOST_JOBS_AT_ONCE = 256


def install() -> None:
    """Raises ConfigError if the packages for it are not installed."""
    Plugins.instance()  # loads the plugins now; loading them later would undo the replacement
    try:
        from hydra_plugins.hydra_submitit_launcher.submitit_launcher import SlurmLauncher
        from submitit.core.utils import FailedJobError, UncompletedJobError
    except ImportError as error:
        raise ConfigError(f"{CHOICE} needs hydra-submitit-launcher: pip install 'kestrel[sweep]' ({error})") from error

    together = SlurmLauncher.launch

    def launch(self: Any, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        def one(overrides: Sequence[str], number: int) -> JobReturn:
            try:
                (done,) = together(self, [overrides], number)
                return done
            except (FailedJobError, UncompletedJobError) as error:
                print(f"launch: job {number} of the sweep died: {str(error).splitlines()[0]}", file=sys.stderr)
                if failures_are_raised(self.config.hydra):
                    return JobReturn(overrides=overrides, status=JobStatus.FAILED, _return_value=error)
                return JobReturn(overrides=overrides, status=JobStatus.COMPLETED, _return_value=nan)

        numbers = range(initial_job_idx, initial_job_idx + len(job_overrides))
        with ThreadPoolExecutor(max_workers=int(self.params.get("array_parallelism") or MOST_JOBS_AT_ONCE)) as pool:
            return list(pool.map(one, job_overrides, numbers))

    SlurmLauncher.launch = launch
