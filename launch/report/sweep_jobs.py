"""One record per job of a sweep, `jobs/<name>.json`, written when the job starts and again when it ends.

A job that fails before it has a folder still has a record, and the record of a killed job says that it runs. So the report of a
sweep shows every job.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path

JOBS = "jobs"


class State(StrEnum):
    RUNNING = "running"  # or it was killed
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepJob:
    name: str  # the run's folder within the sweep's folder
    said: Mapping[str, str]  # the job's overrides: key -> value
    state: State = State.RUNNING
    outcome: float | None = None  # the number that a sweeper compares
    failure: str = ""
    code: int = 0  # the exit code of the same run outside of a sweep

    def write(self, sweep_dir: Path) -> None:
        folder = sweep_dir / JOBS
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / f".{self.name}.json"
        unfinished.write_text(json.dumps(asdict(self), indent=2) + "\n")
        unfinished.rename(folder / f"{self.name}.json")


def read_jobs(sweep_dir: Path) -> list[SweepJob]:
    """The jobs in the order of their numbers. A job whose record is damaged counts as failed."""
    return [_read_job(path) for path in sorted((sweep_dir / JOBS).glob("[!.]*.json"))]


def _read_job(path: Path) -> SweepJob:
    try:
        record = json.loads(path.read_text())
        return SweepJob(**{**record, "state": State(record["state"])})
    except (ValueError, TypeError, KeyError) as error:
        return SweepJob(name=path.stem, said={}, state=State.FAILED, failure=f"{path} is damaged: {error}", code=1)


@dataclass(slots=True)
class Recorded:
    """The record of a job that runs; `end` and `fail` finish it."""

    job: SweepJob
    sweep_dir: Path
    ended: bool = field(default=False)

    def end(self, outcome: float) -> None:
        self._write(replace(self.job, state=State.DONE, outcome=outcome if outcome == outcome else None))  # NaN is no JSON

    def fail(self, why: str, code: int) -> None:
        self._write(replace(self.job, state=State.FAILED, failure=why, code=code))

    def _write(self, job: SweepJob) -> None:
        job.write(self.sweep_dir)
        self.ended = True


@contextmanager
def recorded(job: SweepJob, sweep_dir: Path) -> Iterator[Recorded]:
    """Writes the job's record. A job that is left by an error or an interrupt has failed."""
    record = Recorded(job, sweep_dir)
    job.write(sweep_dir)
    try:
        yield record
    except BaseException as error:
        if not record.ended:
            record.fail(f"{type(error).__name__}: {error}", 1)
        raise
