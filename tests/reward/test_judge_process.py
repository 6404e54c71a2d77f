"""`python -m reward` against the real queue server: completions become a batch with rewards, through kills and restarts."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from conf.compose.load import read_run, write_run
from conf.schema import AlgoConfig, DataConfig, ModelConfig, RewardConfig, RolloutConfig, RunConfig, TrainerConfig
from launch.report.metrics_file import read_metrics
from launch.report.run_report import write_report
from rollout.ledger.records import Batch, Finish, Segment
from rollout.queue.client import AsyncQueueClient, QueueClient, QueueTimeout
from rollout.queue.keys import RunKeys
from trainer.learn.batch_figures import batch_figures
from trainer.metrics.loggers import Loggers

pytestmark = pytest.mark.slow

GROUPS, COMPLETIONS = 2, 4
SQUARE = {"kind": "calls", "entry_point": "f", "tests": [{"args": [x], "expected": x * x} for x in (1, 5)]}
ANSWERS = ("    return x * x", "    return x", "    import os\n    os._exit(0)", "    return x ** 2")
REWARDS = [1.0, 0.0, 0.0, 1.0]
MY_REWARDS = """
def brevity(completion, metadata):
    if "import" in completion:
        raise ValueError("no imports")
    return 0.25, {"words": len(completion.split())}
"""


def made(tmp_path: Path, reward: RewardConfig) -> Path:
    """A run's folder with a tokenizer of bytes and one problem."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "model")
    problem = {"id": "square", "prompt": "Square x.\n", "raw": True, "prefill": "def f(x):\n", "task": SQUARE}
    (tmp_path / "train.jsonl").write_text(json.dumps(problem) + "\n")
    config = RunConfig(
        model=ModelConfig(path=str(tmp_path / "model")),
        data=DataConfig(train=[str(tmp_path / "train.jsonl")]),
        algo=AlgoConfig(groups_per_step=GROUPS, completions_per_group=COMPLETIONS, minibatches=1),
        rollout=RolloutConfig(max_staleness=0, max_completion_tokens=100, segment_tokens=100, lease_s=2.0),
        trainer=TrainerConfig(steps=1),
        reward=reward,
    )
    write_run(config, tmp_path / "run")
    RunKeys.create(tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return made(tmp_path, RewardConfig(slots=2))


@pytest.fixture
def endpoint(run_dir: Path) -> Iterator[str]:
    with served(run_dir) as address:
        yield address


@contextmanager
def served(run_dir: Path) -> Iterator[str]:
    """A queue server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    server = subprocess.Popen([sys.executable, "-m", "rollout.queue", "--run", str(run_dir), "--bind", address])
    try:
        yield address
    finally:
        server.terminate()
        server.wait(timeout=20)


def start_judge(run_dir: Path, endpoint: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "reward", "--run", str(run_dir), "--queue", endpoint, "--name", "judge-0"])


def await_handler(pid: int, number: int) -> None:
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s:
        [caught] = [line.split()[1] for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt")]
        if int(caught, 16) >> (number - 1) & 1:
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} does not handle signal {number}")


async def generate(run_dir: Path, endpoint: str) -> None:
    """Stands in for the fleet: every trajectory of every group gets its answer."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(run_dir.parent / "model")
    async with AsyncQueueClient(endpoint, RunKeys.load(run_dir), "engine-0", timeout_s=60) as queue:
        await queue.register_engine("engine-0", "http://nowhere", 1, 0)
        with QueueClient(endpoint, RunKeys.load(run_dir), "trainer", timeout_s=60) as trainer:
            trainer.published(0, trainer.fleet())
        done = 0
        while done < GROUPS * COMPLETIONS:
            for work in await queue.lease_segments("engine-0", 8, wait_s=5):
                tokens = np.array(tokenizer.encode(ANSWERS[work.position.trajectory], add_special_tokens=False), np.int32)
                segment = Segment(
                    tokens=tokens,
                    logprobs=np.zeros(len(tokens), np.float32),
                    versions=np.zeros(len(tokens), np.int32),
                    finish=Finish.STOP,
                    engine="engine-0",
                )
                position = work.position
                await queue.report_segment("engine-0", position, segment)
                done += 1


def take(run_dir: Path, endpoint: str) -> Batch:
    deadline_s = time.monotonic() + 60
    with QueueClient(endpoint, RunKeys.load(run_dir), "trainer", timeout_s=20) as trainer:
        while time.monotonic() < deadline_s:
            try:
                found = trainer.take(0, wait_s=5)
            except QueueTimeout:
                continue
            if isinstance(found, Batch):
                return found
    raise AssertionError("no batch within 60 s")


def test_completions_become_a_graded_batch_and_the_judge_leaves_when_the_run_closes(run_dir: Path, endpoint: str) -> None:
    asyncio.run(generate(run_dir, endpoint))
    judge = start_judge(run_dir, endpoint)
    try:
        batch = take(run_dir, endpoint)
        assert [group.rewards.tolist() for group in batch.groups] == [REWARDS] * GROUPS
        with QueueClient(endpoint, RunKeys.load(run_dir), "trainer", timeout_s=20) as trainer:
            trainer.advance(1, trainer.fleet())  # a run is over once it is stopped and its last step is done
            trainer.stop()
        assert judge.wait(timeout=20) == 0
    finally:
        judge.kill()
        judge.wait()


def test_parts_of_a_reward_reach_the_metrics_the_report_and_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text(MY_REWARDS)
    monkeypatch.chdir(tmp_path)  # where a user gives the command; the run gets its own copy
    parts: dict[str, dict[str, Any]] = {
        "brevity": {"kind": "python", "function": "my_rewards:brevity", "weight": 0.5},
        "short": {"kind": "length", "target": 10, "most": 20, "weight": 0.2},
    }
    run_dir = made(tmp_path, RewardConfig(slots=2, parts=parts))
    (tmp_path / "my_rewards.py").unlink()
    with served(run_dir) as address:
        asyncio.run(generate(run_dir, address))
        judge = start_judge(run_dir, address)
        try:
            batch = take(run_dir, address)
        finally:
            judge.kill()
            judge.wait()
    shorts = [max(0.0, min(1.0, (20 - len(answer)) / 10)) for answer in ANSWERS]
    brevities = [0.0 if "import" in answer else 0.25 for answer in ANSWERS]
    expected = [tests + 0.5 * brevity + 0.2 * short for tests, brevity, short in zip(REWARDS, brevities, shorts, strict=True)]
    for group in batch.groups:
        assert group.rewards.tolist() == pytest.approx(expected)
        assert [t.reward_parts["function_failed"] for t in group.trajectories] == [
            float("import" in answer) for answer in ANSWERS
        ]
        assert "brevity: my_rewards:brevity: my_rewards.py:4: ValueError: no imports" in group.trajectories[2].reason

    figures = batch_figures(batch)
    assert figures["reward/part/calls/mean"] == pytest.approx(fmean(REWARDS))
    assert figures["reward/part/brevity/mean"] == pytest.approx(fmean(brevities))
    assert (figures["reward/part/short/min"], figures["reward/part/short/max"]) == (min(shorts), pytest.approx(max(shorts)))
    loggers = Loggers(run_dir, read_run(run_dir), version=0)
    loggers.write(1, figures, {})
    loggers.close()
    assert write_report(run_dir)
    [line] = read_metrics(run_dir)
    page = (run_dir / "report.html").read_text()
    events = EventAccumulator(str(run_dir / "tensorboard")).Reload().Tags()["scalars"]
    for part in ("calls", "brevity", "short", "function_failed"):
        for figure in ("mean", "min", "max"):
            name = f"reward/part/{part}/{figure}"
            assert name in line and name in events
        assert part in page


def test_a_judge_that_is_killed_loses_nothing(run_dir: Path, endpoint: str) -> None:
    asyncio.run(generate(run_dir, endpoint))
    first = start_judge(run_dir, endpoint)
    time.sleep(1.5)
    first.kill()
    first.wait()
    second = start_judge(run_dir, endpoint)
    try:
        assert [group.rewards.tolist() for group in take(run_dir, endpoint).groups] == [REWARDS] * GROUPS
        await_handler(second.pid, signal.SIGTERM)  # the first may have been so quick that the second has only begun
        os.kill(second.pid, signal.SIGTERM)
        assert second.wait(timeout=20) == 0
    finally:
        second.kill()
        second.wait()


def test_a_run_that_is_none_is_refused_before_anything_starts(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "reward", "--run", str(tmp_path), "--queue", "tcp://127.0.0.1:1"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "config.yaml" in done.stderr
