"""Trains on a recorded batch again, without engines, judges or a queue server.

    python -m trainer.replay outputs/NAME step=12 [catch_up=false] [profile=trace.json] [trainer.tp=1 trainer.pp=1 ...]

Steps count as in metrics.jsonl: step 12 takes the weights from version 11 to 12. It starts from the newest checkpoint that is
not newer than version 11, or from the model's folder. It first trains on the batches in between (`catch_up`), then on the batch
of step 12, and prints the figures beside the recorded ones. `profile` writes a trace of that step on rank 0, for ui.perfetto.dev.
The run's folder is only read. Further settings change only the replay, so that one machine can replay a run of many GPUs in a
smaller layout.

The command starts all ranks of the layout on this machine. Under torchrun, it is one of the ranks.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from conf.compose.load import read_run
from conf.compose.run_folder import CHECKPOINTS, METRICS
from conf.schema import ConfigError, RunConfig
from conf.shapes import layout_of
from rollout import checkpoint_files
from rollout.ledger import past_batches
from rollout.ledger.past_batches import NoSuchBatch
from rollout.ledger.records import Batch
from trainer import process_groups
from trainer.learn.algorithm import load_algorithm
from trainer.learn.balance import PackingError
from trainer.learn.batch_figures import batch_figures
from trainer.learn.health import TrainingError
from trainer.megatron import checkpoint
from trainer.megatron.policy import load_policy
from trainer.ranks import Control, LeaderFailed
from trainer.step import Figures, Stopwatch, train_step


class ReplayError(RuntimeError):
    """The step cannot be replayed. The message says what to change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    run_dir: Path
    step: int  # numbered as in metrics.jsonl
    catch_up: bool  # first train on the batches between the checkpoint and the step; otherwise the weights are older
    profile: Path | None
    overrides: Sequence[str]

    @classmethod
    def of(cls, run_dir: Path, settings: Sequence[str]) -> "Replay":
        """settings: `step=12`, `catch_up=false`, `profile=FILE`, and settings of the configuration."""
        own: dict[str, str] = {}
        overrides = []
        for setting in settings:
            key, separator, value = setting.partition("=")
            if not separator:
                raise ReplayError(f"{setting!r}: expected key=value, for example step=12 or trainer.tp=1")
            if key in ("step", "catch_up", "profile"):
                own[key] = value
            elif "." in key:
                overrides.append(setting)
            else:
                raise ReplayError(
                    f"{key}: unknown setting. Give step, catch_up, profile, or a setting of the configuration such as trainer.tp"
                )
        if not own.get("step", "").isdigit() or int(own["step"]) < 1:
            raise ReplayError("name the step to replay, numbered from 1 as in metrics.jsonl: step=12")
        if (catch_up := own.get("catch_up", "true")) not in ("true", "false"):
            raise ReplayError(f"catch_up={catch_up}: must be true or false")
        profile = Path(own["profile"]).absolute() if own.get("profile") else None
        return cls(
            run_dir=run_dir, step=int(own["step"]), catch_up=catch_up == "true", profile=profile, overrides=tuple(overrides)
        )

    def config(self) -> RunConfig:
        """The run's configuration with the changes for the replay. Raises ConfigError."""
        return read_run(self.run_dir, self.overrides)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayPlan:
    checkpoint: str  # "" for the model's folder
    version: int  # the version of the loaded weights
    batches: Sequence[int]  # to train on, numbered as in the ledger: batch s takes the weights from version s to s + 1


def plan(replay: Replay) -> ReplayPlan:
    """The checkpoint to load and the batches to train on. Raises ReplayError, NoSuchBatch."""
    wanted = replay.step - 1
    older = [found for found in checkpoint_files.complete(replay.run_dir / CHECKPOINTS) if found[0] <= wanted]
    version, path = older[-1] if older else (0, "")
    batches = list(range(version, wanted + 1)) if replay.catch_up else [wanted]
    there = past_batches.steps(replay.run_dir, read_run(replay.run_dir))
    if missing := [step for step in batches if step not in there]:
        kept = f"those of steps {there[0] + 1} to {there[-1] + 1}" if there else "none"
        what = f"step {missing[0] + 1}" + (f", between version {version} and it," if missing[0] != wanted else "")
        raise ReplayError(
            f"step {replay.step} cannot be replayed: the batch of {what} is not in the ledger. The ledger holds {kept}. Batches "
            "before the oldest kept checkpoint are forgotten (a larger trainer.checkpoints_kept keeps more)"
            + ("" if wanted not in there else "; catch_up=false trains only on the batch of this step, from older weights")
        )
    return ReplayPlan(checkpoint=str(path), version=version, batches=batches)


def run_rank(replay: Replay) -> None:
    """The work of one rank. All ranks must call it, because it uses collectives."""
    config = replay.config()
    trainer = config.trainer
    mesh = process_groups.initialize(layout_of(trainer), seed=trainer.seed, timeout_s=trainer.collective_s)
    control = Control(timeout_s=trainer.collective_s)
    todo = control.share(ReplayPlan, lambda: plan(replay))
    policy = load_policy(config, mesh)
    algorithm = load_algorithm(config.algo, replay.run_dir)
    if todo.checkpoint:
        checkpoint.load(todo.checkpoint, policy.training_state)
    found: list[Batch] = []  # filled on rank 0 only

    def read() -> int:
        found.extend(past_batches.batches(replay.run_dir, read_run(replay.run_dir), todo.batches))
        return len(found)

    control.share(int, read)
    if control.is_leader:
        print(f"weights of version {todo.version} ({todo.checkpoint or config.model.path})", flush=True)
    for _ in todo.batches:
        batch = control.share(Batch, lambda: found.pop(0))
        last = batch.step + 1 == replay.step
        watch = Stopwatch()
        with _profiler(replay.profile if last and control.is_leader else None):
            figures = batch_figures(batch) | train_step(policy, algorithm, batch, config, watch)
        if control.is_leader:
            print(f"step {batch.step + 1}: loss {figures.get('loss/total', float('nan')):.6g}", flush=True)
    if control.is_leader:
        print(table(figures | watch.seconds, recorded_figures(replay)), flush=True)
    process_groups.shutdown()


def recorded_figures(replay: Replay) -> Mapping[str, float]:
    """The figures of the step in metrics.jsonl, or {} if they are missing."""
    path = replay.run_dir / METRICS
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []
    return next((line for line in reversed(lines) if line["step"] == replay.step), {})


def table(replayed: Figures, recorded_line: Mapping[str, float]) -> str:
    """One line per figure: recorded, replayed, and the difference."""
    width = max(map(len, replayed))
    lines = [f"{'':{width}}  {'recorded':>14}  {'replayed':>14}  {'difference':>12}"]
    for name, value in sorted(replayed.items()):
        before = recorded_line.get(name)
        known = ("-", "-") if before is None else (f"{before:.6g}", f"{value - before:.2e}")
        lines.append(f"{name:{width}}  {known[0]:>14}  {value:>14.6g}  {known[1]:>12}")
    return "\n".join(lines)


def _profiler(target: Path | None) -> AbstractContextManager:
    if target is None:
        return nullcontext()

    def write(profiler: torch.profiler.profile) -> None:
        profiler.export_chrome_trace(str(target))
        print(f"{target}: open it in ui.perfetto.dev", flush=True)

    return torch.profiler.profile(on_trace_ready=write)


def start_ranks(replay: Replay, arguments: Sequence[str]) -> None:
    """Replaces this process by torchrun, which starts all ranks. First raises the errors that the ranks would raise."""
    trainer = replay.config().trainer
    plan(replay)
    ranks = layout_of(trainer).ranks_per_replica * trainer.dp
    torchrun = [sys.executable, "-m", "rollout.patched.torchrun", "--standalone", "--nproc-per-node", str(ranks)]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning,ignore::FutureWarning,ignore::DeprecationWarning")
    sys.stdout.flush()
    os.execv(sys.executable, [*torchrun, "-m", "trainer.replay", *arguments])


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="trainer.replay", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("settings", nargs="*", help="step=N, catch_up=false, profile=FILE, section.key=value")
    options = parser.parse_args(arguments)
    try:
        replay = Replay.of(options.run, options.settings)
        if "RANK" in os.environ:
            run_rank(replay)
        else:
            start_ranks(replay, arguments)
    except LeaderFailed:  # rank 0 prints the reason
        return 1
    except (ConfigError, PackingError, NoSuchBatch, ReplayError, TrainingError) as error:
        print(f"replay: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
