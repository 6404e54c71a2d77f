"""Sweeps through Slurm (`hydra/launcher=submitit_slurm`) outlive their jobs.

submitit raises an error when a job is killed (out of memory, node lost). The launcher plugin passes the error on, which ends the
sweep. Here a job that dies counts as failed. The class of submitit is changed, because Hydra finds launchers only in
`hydra_plugins` packages. Remove this file when hydra-submitit-launcher returns failed jobs instead of raising.
"""

import sys
from collections.abc import Sequence
from math import nan
from typing import Any

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus

from conf.compose.sweep import failures_are_raised
from conf.schema import ConfigError

CHOICE = "hydra/launcher=submitit_slurm"


def install() -> None:
    """Raises ConfigError if the packages for it are not installed."""
    Plugins.instance()  # loads the plugins now; loading them later would undo the replacement
    try:
        from hydra_plugins.hydra_submitit_launcher.submitit_launcher import SlurmLauncher
        from submitit import SlurmJob
        from submitit.core.utils import FailedJobError, UncompletedJobError
    except ImportError as error:
        raise ConfigError(f"{CHOICE} needs hydra-submitit-launcher: pip install 'kestrel[sweep]' ({error})") from error

    launcher_class: Any = SlurmLauncher
    job_class: Any = SlurmJob
    submit_and_wait, results_or_error = launcher_class.launch, job_class.results

    def launch(self: Any, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        try:
            return submit_and_wait(self, job_overrides, initial_job_idx)
        except FailedJobError as error:
            raise ConfigError(f"sbatch refused the jobs of the sweep: {str(error).strip()}") from error

    def results(self: Any) -> list[JobReturn]:
        try:
            return results_or_error(self)
        except (FailedJobError, UncompletedJobError) as error:
            call = self.submission()  # of the launcher, with the arguments of the job
            overrides, _, number, *_ = call.args
            print(f"launch: job {number} of the sweep died: {str(error).splitlines()[0]}", file=sys.stderr)
            if failures_are_raised(call.function.config.hydra):
                return [JobReturn(overrides=overrides, status=JobStatus.FAILED, _return_value=error)]
            return [JobReturn(overrides=overrides, status=JobStatus.COMPLETED, _return_value=nan)]

    launcher_class.launch, job_class.results = launch, results
