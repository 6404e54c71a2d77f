"""The trainer: `torchrun --nproc-per-node 4 -m trainer --run outputs/x --queue tcp://host:port --push-port 21100`.

A run is one page of calls (`Trainer.run`): take a batch, train on it, push the weights, tell the ledger, save when due. It starts
from the run's newest checkpoint, or from the model's folder, and exits with 0 once `trainer.steps` steps are done and saved.

SIGUSR1 tells it to save after the step it is at and to exit with 0; it is held back (blocked) and looked for while it waits for a
batch.
"""

import argparse
import json
import logging
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from conf.compose.load import read_run
from conf.schema import ConfigError, RunConfig
from conf.shapes import ModelError, layout_of
from rollout import checkpoint_files
from rollout.queue.client import QueueClient, QueueError
from rollout.queue.keys import KeysError, RunKeys
from trainer import process_groups
from trainer.control import Control, FirstFailure, LeaderFailed
from trainer.evaluation import Evaluations
from trainer.feed import Feed
from trainer.learn.balance import PackingError
from trainer.learn.health import Divergence, TrainingError
from trainer.learn.metrics import MetricsWriter
from trainer.megatron import checkpoint, hf_weights
from trainer.megatron.policy import load_policy
from trainer.push.push import Pusher
from trainer.step import Figures, Stopwatch, batch_figures, train_step

log = logging.getLogger("trainer")
DESCRIPTION = "model_description"  # in the run's folder: the model's folder without its weights
EXPECTED = (ConfigError, KeysError, ModelError, PackingError, QueueError, TimeoutError, TrainingError)
"""Errors whose message says what is wrong and what to do."""


class Trainer:
    """Everything one rank holds during a run."""

    def __init__(self, config: RunConfig, run_dir: Path, *, queue_endpoint: str, push_port: int) -> None:
        self.config, self.run_dir = config, run_dir
        trainer = config.trainer
        self.mesh = process_groups.initialize(layout_of(trainer), seed=trainer.seed, timeout_s=trainer.collective_s)
        self.control = Control(timeout_s=trainer.collective_s)
        keys = RunKeys.load(run_dir)
        self.queue = (
            QueueClient(queue_endpoint, keys, name="trainer", timeout_s=trainer.stall_s) if self.control.is_leader else None
        )
        self.policy = load_policy(config, self.mesh)
        if trainer.save_hf and self.control.is_leader:  # at the end of the run the model's folder may be gone
            hf_weights.copy_description(Path(config.model.path), run_dir / DESCRIPTION)
        if config.algo.kl_coef > 0:
            self.policy.remember_reference()
        self.checkpoints = checkpoint.Checkpoints(
            run_dir / "checkpoints", self.policy.training_state, keep=trainer.checkpoints_kept
        )
        pusher = Pusher(
            self.policy,
            self.control,
            self.queue,
            address=process_groups.address(),
            first_port=push_port,
            bucket_bytes=trainer.push_bucket_bytes,
            deadline_s=trainer.push_s,
            engine_api_key=keys.engine_api_key,
        )
        self.divergence = Divergence(ess_floor=config.algo.ess_floor, patience_steps=config.algo.ess_patience_steps)
        self.first_version = version = self.resume()
        self.feed = Feed(self.control, self.queue, pusher, version=version)
        self.evaluations = Evaluations(self.feed, config, owed=self.resumed.get("evaluation_owed", False))
        self.metrics = MetricsWriter(run_dir, config, version=version) if self.control.is_leader else None

    def run(self) -> None:
        self.feed.begin(self.resumed.get("ledger", {}))
        if before := self.evaluations.begin():
            self.write(before)
        while self.feed.version < self.config.trainer.steps and (figures := self.step()) is not None:
            figures |= self.evaluations.after_step()
            figures |= self.save_when_due()
            self.write(figures)
        if self.feed.version < self.config.trainer.steps:
            self.leave()
        else:
            self.finish()

    def step(self) -> Figures | None:
        """One RL step: the policy and the fleet go from version v to v + 1. None if told to leave before its batch came."""
        watch = Stopwatch()
        with watch("time/step_s"):
            with watch("time/wait_batch_s"):
                batch = self.feed.take(told_to_leave)
            if batch is None:
                return None
            figures = batch_figures(batch) | train_step(self.policy, batch, self.config, watch)
            self.divergence.check(figures)  # before the weights go out
            with watch("time/push_s"):
                push = self.feed.advance()
        figures |= watch.seconds | {"push/bytes": push.bytes, "push/pause_s": push.pause_s, "push/engines": len(push.engines)}
        figures["idle/trainer_fraction"] = watch.seconds["time/wait_batch_s"] / watch.seconds["time/step_s"]
        figures["tokens/trained_per_s"] = figures["tokens/trained"] / watch.seconds["time/step_s"]
        return figures | self.feed.queue_figures()

    def write(self, figures: Figures) -> None:
        if self.metrics is not None:
            self.metrics.write(self.feed.version, figures)

    def resume(self) -> int:
        """Loads the newest checkpoint whose files are whole, and returns its version; 0 when there is none."""
        self.resumed: dict[str, Any] = {}  # what was saved beside the weights
        while newest := self.control.share(str, lambda: str(checkpoint.latest(self.checkpoints.folder) or "")):
            try:
                loaded = checkpoint.load(newest, self.policy.training_state)
            except checkpoint.DamagedCheckpoint as damaged:
                said = self.control.share(str, partial(checkpoint.put_aside, Path(newest), damaged))
                if self.control.is_leader:
                    log.error(said)
                continue
            self.resumed = loaded.extra
            if self.control.is_leader:
                log.info("goes on from %s", newest)
            return loaded.version
        return 0

    def save_when_due(self) -> Figures:
        """Starts a checkpoint of this version when one is due, and tells the ledger of those that are safe by now."""
        watch = Stopwatch()
        with watch("time/checkpoint_stall_s"):
            ended = [*self.checkpoints.poll(), *(self.begin_save() if self.checkpoint_due() else ())]
            self.settle(ended)
        figures = watch.seconds | {"checkpoint/failed": sum(saved.failure is not None for saved in ended)}
        if written_s := [saved.seconds for saved in ended if saved.failure is None]:
            figures["time/checkpoint_write_s"] = written_s[-1]
        return figures

    def begin_save(self) -> Sequence[checkpoint.Saved]:
        """Starts the checkpoint of this version, and returns how an earlier one ended."""
        extra = {"ledger": self.feed.position(), "evaluation_owed": self.evaluations.owed}
        return self.checkpoints.begin_save(self.feed.version, extra)

    def checkpoint_due(self) -> bool:
        version, every = self.feed.version, self.config.trainer.checkpoint_every
        return version == self.config.trainer.steps or (every > 0 and version % every == 0)

    def settle(self, ended: Sequence[checkpoint.Saved]) -> None:
        for saved in ended:
            if saved.failure is None:
                # What the oldest kept checkpoint needs stays: it may be the one to go on from.
                oldest = self.control.share(int, lambda: checkpoint_files.complete(self.checkpoints.folder)[0][0])
                self.feed.durable(oldest)
            elif self.control.is_leader:
                log.error("the checkpoint of version %d failed: %s", saved.version, saved.failure)

    def leave(self) -> None:
        """Ends before the last step: the run can be gone on with from this version. The queue stays as it is."""
        if self.feed.version > self.first_version and not self.checkpoint_due():
            self.settle(self.begin_save())
        self.wait_for_checkpoint()
        if self.metrics is not None:
            self.metrics.close()
        process_groups.shutdown()

    def wait_for_checkpoint(self) -> None:
        """A trainer that exits with 0 has saved its weights."""
        ended = self.checkpoints.wait(timeout_s=self.config.trainer.collective_s)
        self.settle(ended)
        if failures := [saved.failure for saved in ended if saved.failure is not None]:
            raise TrainingError(f"the last checkpoint could not be written: {failures[-1]}")

    def finish(self) -> None:
        self.wait_for_checkpoint()
        if self.config.trainer.save_hf:
            hf_weights.save(
                self.policy.chunks, self.policy.shape, self.mesh, self.run_dir / "hf", description=self.run_dir / DESCRIPTION
            )
        if self.queue is not None:
            status = self.queue.status()
            (self.run_dir / "summary.json").write_text(json.dumps({"steps": self.feed.version, "queue": status}, indent=2) + "\n")
            self.queue.stop()
        if self.metrics is not None:
            self.metrics.close()
        process_groups.shutdown()


def told_to_leave() -> bool:
    """Every rank gets the signal, at different moments; rank 0's view counts."""
    return signal.SIGUSR1 in signal.sigpending()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="trainer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="the run's folder, with config.yaml and keys/")
    parser.add_argument("--queue", required=True, help="the queue server, as tcp://host:port")
    parser.add_argument("--push-port", type=int, required=True, help="first of the ports for weight groups")
    options = parser.parse_args(arguments)
    # What cannot be logged, on a full disk, is left out; printing it would end the trainer.
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", stream=sys.stdout)
    log.setLevel(logging.INFO)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # were it ignored, it would not stay pending
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        with FirstFailure(options.run, expected=EXPECTED):
            Trainer(read_run(options.run), options.run, queue_endpoint=options.queue, push_port=options.push_port).run()
    except LeaderFailed:  # rank 0 says why
        return 1
    except EXPECTED as error:
        print(f"trainer: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
