"""A Hydra launcher through Slurm whose sweep outlives its jobs: `hydra/launcher=submitit_slurm` (conf/hydra/launcher/).

Submitit's own raises when a job dies hard (out of memory, node lost), and the sweep ends with it; here such a job counts as NaN
and the others go on.
"""

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from math import nan

from hydra.core.utils import JobReturn, JobStatus
from hydra_plugins.hydra_submitit_launcher.submitit_launcher import SlurmLauncher
from submitit.core.utils import FailedJobError, UncompletedJobError

AT_ONCE = 256


class SlurmSweepLauncher(SlurmLauncher):
    """Each job of the sweep is a Slurm job of its own, and its end, whatever it was, a number."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        with ThreadPoolExecutor(max_workers=int(self.params.get("array_parallelism") or AT_ONCE)) as pool:
            numbers = range(initial_job_idx, initial_job_idx + len(job_overrides))
            return list(pool.map(self._launch_one, job_overrides, numbers))

    def _launch_one(self, overrides: Sequence[str], number: int) -> JobReturn:
        try:
            (done,) = super().launch([overrides], number)
            return done
        except (FailedJobError, UncompletedJobError) as error:
            print(f"launch: job {number} of the sweep died: {str(error).splitlines()[0]}", file=sys.stderr)
            return JobReturn(overrides=overrides, status=JobStatus.COMPLETED, _return_value=nan)
