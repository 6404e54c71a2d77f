"""The launcher: from a command line to a finished run.

    python -m launch experiment=debug [trainer.steps=5 …]     one run
    python -m launch experiment=debug dry_run=true            its placement, configuration and costs; nothing is started
    python -m launch resume=outputs/NAME [trainer.steps=80]   resumes a run from its last checkpoint
    sbatch launch/kestrel_256.sh [override …]                 a run on the nodes of a Slurm job (docs/slurm.md)
    python -m launch -m experiment=debug rollout.max_staleness=0,1,2    several runs, one after another; then launch.report.sweep
    … hydra/launcher=submitit_slurm [hydra.launcher.partition=…]        the same runs as Slurm jobs, in parallel

Exit codes: 0 the run is complete · 1 it failed · 2 the command or a setting is wrong · 130 it was interrupted.
"""

import os
import re
import sys
import time
from dataclasses import fields, is_dataclass
from math import nan
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from conf.compose import slurm_sweep
from conf.compose.check import check_resumed
from conf.compose.hydra_errors import in_one_line
from conf.compose.load import read_resumed, read_run, register, to_run_config, write_run
from conf.compose.presets import check_names, check_presets, experiments, with_added_keys, with_quoted_addresses
from conf.compose.run_folder import CONFIG
from conf.compose.sweep import MULTIRUN, OPTUNA, OPTUNA_GOES_ON, RememberSweep, failures_are_raised, unnamed_keys
from conf.schema import ConfigError, RunConfig
from launch.processes.prepare import PrepareError
from launch.processes.supervise import RunFailed
from launch.report.sweep_jobs import State, SweepJob, read_jobs, recorded
from launch.run import dry_run, execute
from launch.slurm.allocation import with_device
from launch.slurm.job import SlurmError, was_requeued
from rollout.queue.keys import KeysError

FAILED, ASKED_WRONGLY, INTERRUPTED = 1, 2, 130
LONGEST_NAME = 120  # a longer name of a sweep's job is cut; it begins with the job's number, so it stays unique
KNOWN_ERRORS = (ConfigError, KeysError, PrepareError, RunFailed, SlurmError, OSError)


_failures: list[tuple[str, int]] = []
"""The message and exit code of each failure. An exception that goes through Hydra would get Hydra's own text around it."""


@hydra.main(version_base="1.3", config_path="pkg://conf", config_name="config")
def _one_job(composed: DictConfig) -> float:
    """One run, or one job of a sweep. Returns the number that a sweep compares. A failed job does not end a sweep."""
    sweep = HydraConfig.get().mode == RunMode.MULTIRUN
    try:
        with in_one_line():
            check_presets(HydraConfig.get().overrides.task, composed)
            _name(composed, sweep=sweep)
        if not sweep or composed.dry_run:
            return _run(_announced(composed), resumed=False)
    except KNOWN_ERRORS as error:
        return _failed(error)
    return _one_of_a_sweep(composed)


def _one_of_a_sweep(composed: DictConfig) -> float:
    said = dict(override.lstrip("+").partition("=")[::2] for override in HydraConfig.get().overrides.task)
    with recorded(SweepJob(name=composed.name, said=said), Path(composed.output)) as record:
        try:
            outcome = _run(_announced(composed), resumed=False)
        except KNOWN_ERRORS as error:
            record.fail(*_explained(error))
            if failures_are_raised(HydraConfig.get()):
                print(f"launch: {_explained(error)[0]}", file=sys.stderr)
                raise
            return _failed(error)
        record.end(outcome)
    return outcome


def _check_words(words: list[str]) -> None:
    """Refuses words that would have no effect, or another effect than they seem to have. Raises ConfigError."""
    groups = {"experiment", *(item.name for item in fields(RunConfig))}
    for word in words:
        if word.startswith("--") and re.split("[.=]", word[2:])[0] in groups:
            raise ConfigError(f"{word}: settings are given without dashes, {word[2:]}")
    # The jobs of a sweep get their names and a common folder by themselves.
    if set(MULTIRUN) & set(words):
        for word in words:
            if word.startswith(("output=", "name=", "resume=")):
                raise ConfigError(
                    f"{word} has no place in a sweep: its jobs are new runs in a folder of their own (hydra.sweep.dir=…)"
                )
    if any(word.startswith("resume=") for word in words):
        _check_resume_words(words)


def _check_resume_words(words: list[str]) -> None:
    """A resumed run has its folder, its name and its presets already. Raises ConfigError."""
    presets = {item.name for item in fields(RunConfig) if is_dataclass(item.type)}
    if len(runs := [word for word in words if word.startswith("resume=")]) > 1:
        raise ConfigError(f"{' '.join(runs)}: one run at a time can be resumed")
    for word in words:
        key = word.lstrip("+~").partition("=")[0]
        if word.startswith(("+", "~")) or re.split("[./@]", key)[0] == "hydra":
            raise ConfigError(f"{word} is for Hydra, which a resume does not use: change settings as in trainer.steps=80")
        if key in ("name", "output"):
            raise ConfigError(f"{word}: a resumed run keeps its folder; leave this out, or rename the folder first")
        if key in presets:
            raise ConfigError(f"{word}: presets are chosen when a run begins; change single settings instead, {key}.…=…")


def _failed(error: Exception) -> float:
    _failures.append(_explained(error))
    print(f"launch: {_failures[-1][0]}", file=sys.stderr)
    return nan


def _announced(composed: DictConfig) -> RunConfig:
    """The run's configuration. Prints which settings were fitted to others. Raises ConfigError."""
    return to_run_config(composed, say=lambda change: print(f"settings: {change}", flush=True))


def _run(config: RunConfig, *, resumed: bool) -> float:
    config = with_device(config)
    if config.dry_run:
        dry_run(config, sys.stdout)
        return 0.0
    run_dir = Path(config.output) / config.name
    if config.cluster.kind == "slurm":
        run_dir = run_dir.resolve()  # other nodes get this path
        if was_requeued() and (run_dir / CONFIG).exists():
            stored = read_run(run_dir)
            check_resumed(stored, config)
            config.user_code, resumed = stored.user_code, True
    return execute(config, run_dir, write=lambda: write_run(config, run_dir), resumed=resumed, out=sys.stdout)


def _name(composed: DictConfig, *, sweep: bool) -> None:
    """Sets the run's folder, output/name. The jobs of a sweep share a folder and are named by number and by what varies."""
    hydra_config = HydraConfig.get()
    if not composed.name:
        experiment = hydra_config.runtime.choices.get("experiment") or "run"
        in_slurm = composed.cluster.kind == "slurm" and not composed.dry_run
        # A requeued job keeps its number, and so finds its run.
        stamp = os.environ.get("SLURM_JOB_ID", "") if in_slurm else ""
        composed.name = f"{experiment}-{stamp or time.strftime('%Y%m%d-%H%M%S')}"
    if sweep:
        unnamed = set(hydra_config.job.config.override_dirname.exclude_keys)
        varied = [o for o in hydra_config.overrides.task if o.lstrip("+~").partition("=")[0] not in unnamed]
        # ASCII, since the limit of a name is in bytes.
        what = [re.sub(r"[^\w.=+-]", "_", re.sub(r"^[^=]*\.", "", override), flags=re.ASCII) for override in varied]
        composed.output = hydra_config.sweep.dir
        composed.name = "-".join([f"{hydra_config.job.num:02d}", *what])[:LONGEST_NAME]


def main() -> int:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(f"{__doc__}\nSettings: docs/settings.md. Experiments: {', '.join(experiments())}.")
        return 0
    resumed = [a.removeprefix("resume=") for a in sys.argv[1:] if a.startswith("resume=")]
    # By default Hydra prints tracebacks itself. With this its errors are raised, and become one line here.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    register()
    try:
        sys.argv[1:] = with_added_keys(with_quoted_addresses(sys.argv[1:]))
        _check_words(sys.argv[1:])
        check_names(sys.argv[1:])
        if slurm_sweep.CHOICE in sys.argv:
            slurm_sweep.install()
        if OPTUNA in sys.argv:
            sys.argv.insert(sys.argv.index(OPTUNA), OPTUNA_GOES_ON)
        if resumed:
            _run(read_resumed(Path(resumed[0]), [a for a in sys.argv[1:] if not a.startswith("resume=")]), resumed=True)
        else:
            with in_one_line():
                if set(MULTIRUN) & set(sys.argv):
                    sys.argv.append(unnamed_keys(sys.argv[1:]))
                _one_job()
    except KNOWN_ERRORS as error:
        message, code = _explained(error)
        print(f"launch: {message}", file=sys.stderr)
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    if RememberSweep.sweep_dir is not None:
        return _after_sweep(RememberSweep.sweep_dir)
    return max((code for _, code in _failures), default=0)


def _after_sweep(sweep_dir: Path) -> int:
    """Counts the jobs by their records, since they may have run elsewhere. A mistake found before any job is a failure too."""
    jobs = read_jobs(sweep_dir)
    if jobs:
        done = sum(job.state is State.DONE for job in jobs)
        print(f"sweep {sweep_dir}: {done} of {len(jobs)} jobs are done; python -m launch.report.sweep {sweep_dir}")
    codes = [job.code if job.state is State.FAILED else FAILED for job in jobs if job.state is not State.DONE]
    return max([*codes, *(code for _, code in _failures)], default=0)


def _explained(error: Exception) -> tuple[str, int]:
    said = f"{type(error).__name__}: {error}" if isinstance(error, OSError) else str(error)
    return said, ASKED_WRONGLY if isinstance(error, ConfigError | KeysError) else FAILED


if __name__ == "__main__":
    sys.exit(main())
