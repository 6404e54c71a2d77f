"""A sweep as rows: what was varied, how each job ended, and what its steps were like."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from pathlib import Path
from statistics import fmean, median

from conf.compose.load import read_run
from conf.compose.run_folder import METRICS
from conf.schema import ConfigError
from launch.report.metrics_file import Metrics, read_metrics
from launch.report.summary import LAST_STEPS
from launch.report.sweep_jobs import State, SweepJob, read_jobs

SEEDS = ("trainer.seed", "data.seed")  # runs that differ in these alone are repetitions
KILLED = "left no result: it was killed, or it still runs"


class NoSweep(ValueError):
    """A folder that holds no runs; the message says what to give."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepRow:
    """One job. A figure that the job lacks is NaN. Means leave out the first step, which waits for everything to start."""

    job: SweepJob
    steps: int  # finished steps
    wanted_steps: int  # 0: unknown
    reward: float  # mean of the last steps
    pass_before: float
    pass_after: float
    trained_per_s: float  # tokens
    lag_mean: float  # versions
    lag_max: float
    mismatch_same: float  # |engine's log-prob - trainer's log-prob|, over tokens sampled with the trainer's own version
    mismatch_all: float
    idle_trainer: float
    idle_rollout: float
    step_s: float  # median
    rewards: Sequence[tuple[int, float, float]]  # (step, seconds since the start, reward)

    @property
    def complete(self) -> bool:
        return self.job.state is State.DONE


def read_sweep(folder: Path) -> list[SweepRow]:
    """Raises NoSweep."""
    jobs = read_jobs(folder) or [
        SweepJob(name=path.parent.name, said={}, state=State.DONE) for path in sorted(folder.glob(f"*/{METRICS}"))
    ]
    if not jobs:
        raise NoSweep(f"{folder} holds no sweep: give the folder that `python -m launch -m …` named, multirun/DATE")
    return [row(job, read_metrics(folder / job.name), _wanted_steps(folder / job.name)) for job in jobs]


def _wanted_steps(run_dir: Path) -> int:
    try:
        return read_run(run_dir).trainer.steps
    except ConfigError:
        return 0


def row(job: SweepJob, lines: Sequence[Metrics], wanted_steps: int) -> SweepRow:
    steps = [line for line in lines if line["step"] > 0]
    steady = steps[1:] or steps
    passed = _values(lines, "eval/pass_rate")
    seconds = sum(_values(steady, "time/step_s"))
    return SweepRow(
        job=job, steps=len(steps), wanted_steps=wanted_steps,
        reward=_mean(_values(steps, "reward/mean")[-LAST_STEPS:]),
        pass_before=passed[0] if len(passed) > 1 else nan, pass_after=passed[-1] if passed else nan,
        trained_per_s=sum(_values(steady, "tokens/trained")) / seconds if seconds else nan,
        lag_mean=_mean(_values(steady, "lag/mean_versions")), lag_max=max(_values(steps, "lag/max_versions"), default=nan),
        mismatch_same=_mean(_values(steady, "mismatch/same_version_abs_logprob")),
        mismatch_all=_mean(_values(steady, "mismatch/abs_logprob")),
        idle_trainer=_mean(_values(steady, "idle/trainer_fraction")),
        idle_rollout=_mean(_values(steady, "idle/rollout_fraction")),
        step_s=median(_values(steady, "time/step_s") or [nan]), rewards=_rewards(lines, steps),
    )  # fmt: skip


def _rewards(lines: Sequence[Metrics], steps: Sequence[Metrics]) -> list[tuple[int, float, float]]:
    start_s = float(lines[0]["time"]) if lines else 0.0
    rewarded = [line for line in steps if _values([line], "reward/mean")]
    return [(line["step"], float(line["time"]) - start_s, float(line["reward/mean"])) for line in rewarded]


def _values(lines: Sequence[Metrics], key: str) -> list[float]:
    return [float(line[key]) for line in lines if line.get(key) is not None and isfinite(line[key])]


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else nan


def varied_keys(rows: Sequence[SweepRow]) -> list[str]:
    """The settings whose values differ between the jobs, in the order of the command line."""
    said = [row.job.said for row in rows]
    keys = dict.fromkeys(key for one in said for key in one if "/" not in key)
    return [key for key in keys if len({one.get(key) for one in said}) > 1]


def number(text: str) -> float | None:
    """The value of a number. None for words, `inf` and `nan`, which an axis of numbers cannot show."""
    try:
        return value if isfinite(value := float(text)) else None
    except ValueError:
        return None


def is_numeric(rows: Sequence[SweepRow], key: str) -> bool:
    return all(number(row.job.said.get(key, "")) is not None for row in rows)


def choose_x(rows: Sequence[SweepRow], wanted: str = "") -> str:
    """The key on the x axis: the wanted one, else the first varied key that is a number and no seed. Raises NoSweep."""
    keys = varied_keys(rows)
    if wanted:
        if wanted not in keys:
            raise NoSweep(f"--x {wanted}: the sweep varies {', '.join(keys) or 'nothing'}")
        return wanted
    others = [key for key in keys if key not in SEEDS] or keys
    return next((key for key in others if is_numeric(rows, key)), others[0] if others else "")


def lines_of(rows: Sequence[SweepRow], x: str) -> Mapping[str, list[SweepRow]]:
    """The rows grouped by what else was varied, with repetitions together. Each group is one line of a chart."""
    keys = [key for key in varied_keys(rows) if key != x and key not in SEEDS]
    groups: dict[str, list[SweepRow]] = {}
    for one in rows:
        groups.setdefault(", ".join(f"{short(key)}={one.job.said.get(key, '')}" for key in keys), []).append(one)
    return groups


def short(key: str) -> str:
    return key.rpartition(".")[2]
