"""What the jobs of a sweep leave beside their run folders: a record each, `jobs/<name>.json`, from its start on.

A job that fails before it has a folder leaves its record all the same, and one that was killed leaves a record that says that it
runs; so whoever looks at a sweep sees every job.
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
class Job:
    name: str  # of the run's folder in the sweep's
    said: Mapping[str, str]  # what the sweep and its command line set for this job: key -> value
    state: State = State.RUNNING
    outcome: float | None = None  # what a sweeper compares; None: there is none
    failure: str = ""
    code: int = 0  # exit code that a run of its own would have had

    def write(self, sweep_dir: Path) -> None:
        folder = sweep_dir / JOBS
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / f".{self.name}.json"
        unfinished.write_text(json.dumps(asdict(self), indent=2) + "\n")
        unfinished.rename(folder / f"{self.name}.json")


def read_jobs(sweep_dir: Path) -> list[Job]:
    """In the order of their names, which begin with their number; a job with a damaged record is one that failed."""
    return [_read_job(path) for path in sorted((sweep_dir / JOBS).glob("[!.]*.json"))]


def _read_job(path: Path) -> Job:
    try:
        record = json.loads(path.read_text())
        return Job(**{**record, "state": State(record["state"])})
    except (ValueError, TypeError, KeyError) as error:
        return Job(name=path.stem, said={}, state=State.FAILED, failure=f"{path} is damaged: {error}", code=1)


@dataclass(slots=True)
class Recorded:
    """A job while it runs: `end` says how it went."""

    job: Job
    sweep_dir: Path
    ended: bool = field(default=False)

    def end(self, outcome: float) -> None:
        self._write(replace(self.job, state=State.DONE, outcome=outcome if outcome == outcome else None))  # NaN is no JSON

    def fail(self, why: str, code: int) -> None:
        self._write(replace(self.job, state=State.FAILED, failure=why, code=code))

    def _write(self, job: Job) -> None:
        job.write(self.sweep_dir)
        self.ended = True


@contextmanager
def recorded(job: Job, sweep_dir: Path) -> Iterator[Recorded]:
    """Writes the job's record; whoever leaves without a word, by an error or an interrupt, has failed."""
    record = Recorded(job, sweep_dir)
    job.write(sweep_dir)
    try:
        yield record
    except BaseException as error:
        if not record.ended:
            record.fail(f"{type(error).__name__}: {error}", 1)
        raise
