"""The trainer: `torchrun --nproc-per-node 4 -m trainer --run outputs/x --queue tcp://host:port --push-port 21100`.

It starts from the run's newest checkpoint, or from the model's folder, and exits with 0 when `trainer.steps` steps are done and
saved. `Trainer.run` is the training loop. `trainer/step.py` is one step, and `trainer/between_steps/` is the rest.

On SIGUSR1 it saves after the current step and exits with 0. The signal is blocked, and looked for while the trainer waits for a
batch.
"""

import argparse
import json
import logging
import signal
import sys
from pathlib import Path

from conf.compose.load import read_run
from conf.compose.model_description import description_of
from conf.compose.run_folder import CHECKPOINTS, HF, SUMMARY
from conf.schema import ConfigError, RunConfig
from conf.shapes import layout_of
from rollout.ledger.records import Batch
from rollout.queue.client import QueueClient, QueueError
from rollout.queue.keys import KeysError, RunKeys
from trainer import process_groups
from trainer.between_steps.evaluation import Evaluations
from trainer.between_steps.feed import Feed
from trainer.between_steps.saver import Saver, load_newest
from trainer.learn.algorithm import load_algorithm
from trainer.learn.balance import PackingError
from trainer.learn.batch_figures import batch_figures, commonest_reasons
from trainer.learn.health import Divergence, TrainingError, no_signal_warning
from trainer.megatron import hf_weights
from trainer.megatron.checkpoint import Checkpoints
from trainer.megatron.policy import load_policy
from trainer.metrics.loggers import Loggers
from trainer.push.push import Pusher
from trainer.ranks import Control, FirstFailure, LeaderFailed
from trainer.step import Figures, Stopwatch, train_step

log = logging.getLogger("trainer")
EXPECTED = (ConfigError, KeysError, PackingError, QueueError, TimeoutError, TrainingError)
"""Errors whose message says what is wrong and what to do."""


class Trainer:
    """One rank of the trainer during a run."""

    def __init__(self, config: RunConfig, run_dir: Path, *, queue_endpoint: str, push_port: int) -> None:
        self.config, self.run_dir = config, run_dir
        trainer, algo = config.trainer, config.algo
        self.mesh = process_groups.initialize(layout_of(trainer), seed=trainer.seed, timeout_s=trainer.collective_s)
        control = Control(timeout_s=trainer.collective_s)
        keys = RunKeys.load(run_dir)
        self.queue = QueueClient(queue_endpoint, keys, name="trainer", timeout_s=trainer.stall_s) if control.is_leader else None
        self.policy = load_policy(config, self.mesh)
        self.algorithm = load_algorithm(algo, run_dir)
        checkpoints = Checkpoints(run_dir / CHECKPOINTS, self.policy.training_state, keep=trainer.checkpoints_kept)
        pusher = Pusher(
            self.policy,
            control,
            self.queue,
            address=process_groups.address(),
            first_port=push_port,
            bucket_bytes=trainer.push_bucket_bytes,
            deadline_s=trainer.push_s,
            engine_api_key=keys.engine_api_key,
        )
        loaded = load_newest(checkpoints.folder, self.policy.training_state, control)
        version, self.resumed = (loaded.version, loaded.extra) if loaded else (0, {})
        self.feed = Feed(control, self.queue, pusher, version=version)
        self.evaluations = Evaluations(self.feed, config, owed=self.resumed.get("evaluation_owed", False))
        self.saver = Saver(checkpoints, trainer, control, self.feed, self.evaluations)
        self.divergence = Divergence(ess_floor=algo.ess_floor, patience_steps=algo.ess_patience_steps)
        self.steps_without_signal = 0
        self.loggers = Loggers(run_dir, config, version=version) if control.is_leader else None

    def run(self) -> None:
        self.feed.begin(self.resumed.get("ledger", {}))
        if first_evaluation := self.evaluations.begin():
            self.log(first_evaluation)
        while self.feed.version < self.config.trainer.steps:
            watch = Stopwatch()
            with watch("time/wait_batch_s"):
                batch = self.feed.take(told_to_leave)
            if batch is None:
                return self.leave()
            figures = self.step(batch, watch)
            figures |= self.evaluations.after_step()
            figures |= self.saver.after_step()
            self.log(figures, batch)
        self.finish()

    def step(self, batch: Batch, watch: Stopwatch) -> Figures:
        """One RL step: policy and fleet go from version v to v + 1."""
        figures = batch_figures(batch) | train_step(self.policy, self.algorithm, batch, self.config, watch)
        self.divergence.check(figures)  # before the engines get the weights
        has_signal = figures["reward/groups_with_signal_fraction"] or not self.config.algo.reward_weight
        self.steps_without_signal = 0 if has_signal else self.steps_without_signal + 1
        with watch("time/push_s"):
            push = self.feed.advance()
        step_s = watch.elapsed_s()
        return {
            **figures,
            **watch.seconds,
            "time/step_s": step_s,
            "reward/steps_without_signal": self.steps_without_signal,
            "push/bytes": push.bytes,
            "push/pause_s": push.pause_s,
            "push/engines": len(push.engines),
            "idle/trainer_fraction": watch.seconds["time/wait_batch_s"] / step_s,
            "tokens/trained_per_s": figures["tokens/trained"] / step_s,
            **self.feed.queue_figures(),
        }

    def log(self, figures: Figures, batch: Batch | None = None) -> None:
        if self.loggers is not None:
            reasons = commonest_reasons(batch) if batch else {}
            self.loggers.write(self.feed.version, figures, reasons)
            if warning := no_signal_warning(figures, reasons):
                log.warning("%s", warning)

    def leave(self) -> None:
        """Ends before the last step. The run can be resumed from this version; the queue stays as it is."""
        self.saver.save_now()
        self.saver.wait()
        self.close()

    def finish(self) -> None:
        self.saver.wait()
        if self.config.trainer.save_hf:
            description = description_of(self.config, self.run_dir)
            hf_weights.save(self.policy.chunks, self.policy.shape, self.mesh, self.run_dir / HF, description=description)
        if self.queue is not None:
            summary = {"steps": self.feed.version, "queue": self.queue.status()}
            (self.run_dir / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n")
            self.queue.stop()
        self.close()

    def close(self) -> None:
        if self.loggers is not None:
            self.loggers.close()
        process_groups.shutdown()


def told_to_leave() -> bool:
    """All ranks get the signal, at different moments; rank 0 decides."""
    return signal.SIGUSR1 in signal.sigpending()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="trainer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="the run's folder, with config.yaml and keys/")
    parser.add_argument("--queue", required=True, help="the queue server, as tcp://host:port")
    parser.add_argument("--push-port", type=int, required=True, help="first of the ports for weight groups")
    options = parser.parse_args(arguments)
    # logging drops a line that cannot be written because the disk is full; print would end the trainer.
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", stream=sys.stdout)
    log.setLevel(logging.INFO)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # an ignored signal would not stay pending
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        with FirstFailure(options.run, expected=EXPECTED):
            Trainer(read_run(options.run), options.run, queue_endpoint=options.queue, push_port=options.push_port).run()
    except LeaderFailed:  # rank 0 prints the reason
        return 1
    except EXPECTED as error:
        print(f"trainer: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
