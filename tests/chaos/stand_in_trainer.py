"""A trainer without a model, as a process: it takes batches, "trains", pushes, advances, checkpoints, and goes on where it was.

    python -m tests.chaos.stand_in_trainer --run DIR --queue tcp://host:port

Its weights are a digest of all it was trained on, so two runs that saw the same batches in the same order end with the same
weights. It believes nothing: every token of a batch must be what the fake engine samples at that place with that version,
every reward what the completion is worth. Each step done is a line in <run>/trained.jsonl, those done again included.
Exit codes: 0 done, 1 it may be started again, 3 the ledger broke its contract.
"""

import argparse
import asyncio
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from conf.compose.load import read_run
from rollout.engine_client import EngineClient, EngineError
from rollout.ledger.records import Batch, EngineInfo, Finish, Trajectory
from rollout.ledger.wire import pack
from rollout.queue.client import QueueClient, QueueError
from rollout.queue.keys import RunKeys
from tests.chaos.words import NONSENSE, bonus, score, worth
from tests.rollout.fake_engine import next_token, prompt_logprob

CONTRACT_BROKEN = 3
TAKE_S = 1.0
TRAIN_S = 0.15
SHORTEST_CALL_S = 0.5


class ContractBroken(Exception):
    """What the ledger must never do."""


class StandInTrainer:
    def __init__(self, run: Path, endpoint: str) -> None:
        self.run_dir, self.config, self.keys = run, read_run(run), RunKeys.load(run)
        self.queue = QueueClient(endpoint, self.keys, "trainer", timeout_s=self.config.trainer.stall_s)
        self.checkpoints = run / "checkpoints"
        self.checkpoints.mkdir(exist_ok=True)
        self.version, self.weights = self.resume()

    def run(self) -> None:
        self.queue.rewind(self.version)
        self.queue.published(self.version, self.push())
        while self.version < self.config.trainer.steps:
            batch = self.take()
            self.check(batch)
            self.weights = hashlib.sha256(self.weights.encode() + pack(batch)).hexdigest()
            time.sleep(TRAIN_S)
            self.note(batch)
            self.version += 1
            self.queue.advance(self.version, self.push())
            if self.version % self.config.trainer.checkpoint_every == 0 or self.version == self.config.trainer.steps:
                self.save()
        summary = {"weights": self.weights, "queue": self.queue.status()}
        _write(self.run_dir / "summary.json", summary)
        self.queue.stop()

    def take(self) -> Batch:
        while not isinstance(answer := self.queue.take(self.version, wait_s=TAKE_S), Batch):
            if answer.fleet_changed:
                self.queue.published(self.version, self.push())
        return answer

    def push(self) -> list[EngineInfo]:
        """Gives the present version to the fleet, and has engines that fail started again; the engines that hold it."""
        fleet = self.queue.fleet()
        outcomes = asyncio.run(self._push(fleet))
        for engine, error in zip(fleet, outcomes, strict=True):
            if error is not None:
                self.queue.condemn(engine, str(error))
        return [engine for engine, error in zip(fleet, outcomes, strict=True) if error is None]

    async def _push(self, fleet: list[EngineInfo]) -> list[BaseException | None]:
        ends_s = time.monotonic() + self.config.trainer.push_s
        calls = (self._push_to(engine, ends_s) for engine in fleet)
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        for outcome in outcomes:
            if outcome is not None and not isinstance(outcome, EngineError):
                raise outcome
        return outcomes

    async def _push_to(self, engine: EngineInfo, ends_s: float) -> None:
        def left_s() -> float:
            return max(ends_s - time.monotonic(), SHORTEST_CALL_S)

        async with EngineClient(engine.url, api_key=self.keys.engine_api_key) as client:
            await client.pause(deadline_s=left_s())
            await client.flush_cache(deadline_s=left_s())
            await client.begin_weight_update(deadline_s=left_s())
            await client.end_weight_update(self.version, deadline_s=left_s())
            await client.continue_(deadline_s=left_s())

    # What the ledger promises.

    def check(self, batch: Batch) -> None:
        algo, staleness = self.config.algo, self.config.rollout.max_staleness
        self.need(batch.step == self.version, f"batch of step {batch.step} for step {self.version}")
        self.need(len(batch.groups) == algo.groups_per_step, f"{len(batch.groups)} groups")
        for group in batch.groups:
            self.need(len(group.trajectories) == algo.completions_per_group, f"{len(group.trajectories)} trajectories")
            for trajectory in group.trajectories:
                self.need(0 <= trajectory.lag(batch.step) <= staleness, f"a lag of {trajectory.lag(batch.step)}")
                self.need(int(trajectory.versions.max()) <= batch.step, "a token newer than its step")
                self.check_trajectory(trajectory)

    def check_trajectory(self, trajectory: Trajectory) -> None:
        tokens = trajectory.tokens.tolist()
        sampled = np.flatnonzero(trajectory.sampled)
        for i in sampled:
            token, logprob = next_token(tokens[:i], int(trajectory.versions[i]))
            self.need((tokens[i], np.float32(logprob)) == (token, trajectory.logprobs[i]), f"token {i} is not what was sampled")
            self.need(
                trajectory.teacher[i] == np.float32(prompt_logprob(tokens, i)), f"token {i} has another log-prob of the teacher"
            )
        completion = [tokens[i] for i in sampled]
        cap = self.config.rollout.max_completion_tokens
        self.need(trajectory.finish is Finish.STOP or len(completion) == cap, f"ended ({trajectory.finish}) at {len(completion)}")
        reward = worth(completion) if trajectory.finish is Finish.STOP else self.config.reward.truncated_reward
        added, failure = bonus(len(completion))
        parts, reason = trajectory.reward_parts, trajectory.reason
        refused = parts["failed"] == 1.0  # the service talked nonsense about it three times
        reward += added + (0.0 if refused else score(len(completion)))
        self.need(trajectory.reward == reward, f"a reward of {trajectory.reward} for what is worth {reward}: {reason}")
        self.need(parts["function_failed"] == bool(failure), f"a failure that was not counted: {reason}")
        self.need(("chaos_rewards:bonus: " in reason) == bool(failure) and failure in reason, f"the reason {reason!r}")
        self.need((f"'{NONSENSE}'" in reason) == refused, f"the reason {reason!r}")

    def need(self, condition: bool, what: str) -> None:
        if not condition:
            raise ContractBroken(f"step {self.version}: {what}")

    # What lasts.

    def resume(self) -> tuple[int, str]:
        for path in sorted(self.checkpoints.glob("*.json"), reverse=True):
            saved: dict[str, Any] = json.loads(path.read_text())
            return saved["version"], saved["weights"]
        return 0, ""

    def save(self) -> None:
        _write(self.checkpoints / f"{self.version:06d}.json", {"version": self.version, "weights": self.weights})
        kept = sorted(self.checkpoints.glob("*.json"))
        for path in kept[: -self.config.trainer.checkpoints_kept]:
            path.unlink()
        self.queue.durable(int(kept[-self.config.trainer.checkpoints_kept :][0].stem))

    def note(self, batch: Batch) -> None:
        groups = [
            {
                "index": g.index,
                "prompt": g.prompt_id,
                "tokens": sum(t.completion_tokens for t in g.trajectories),
                "segments": max(t.segments for t in g.trajectories),
            }
            for g in batch.groups
        ]
        lags = [t.lag(batch.step) for t in batch.trajectories]
        line = {"step": batch.step, "weights": self.weights, "groups": groups, "lag": max(lags)}
        with open(self.run_dir / "trained.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _write(path: Path, value: dict[str, Any]) -> None:
    unfinished = path.with_name(f".{path.name}")
    with open(unfinished, "w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--queue", required=True)
    arguments = parser.parse_args()
    try:
        StandInTrainer(arguments.run, arguments.queue).run()
    except ContractBroken as error:
        print(f"trainer: the contract is broken: {error}", file=sys.stderr, flush=True)
        return CONTRACT_BROKEN
    except (QueueError, EngineError) as error:
        print(f"trainer: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
