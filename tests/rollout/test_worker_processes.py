"""Workers as processes, with the real queue server and fake engines: nothing that was finished is lost.

The test plays trainer and judge. The fake engine's pseudo-model is a function of tokens and version, so every token of a
batch is checked against it, however often its trajectory was cut, moved or met by a push.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from conf.load import write_run
from conf.schema import AlgoConfig, DataConfig, ModelConfig, RolloutConfig, RunConfig, TrainerConfig
from rollout.client import QueueClient
from rollout.engine_client import EngineClient
from rollout.keys import RunKeys
from rollout.types import Batch, EngineInfo, Trajectory, Verdict
from tests.rollout.fake_engine import VOCABULARY, next_token

REPOSITORY = Path(__file__).resolve().parents[2]
WORKER = """
import sys
from rollout.__main__ import main
from tests.rollout.fake_engine import FAKE_LAUNCHER
sys.exit(main(launcher=FAKE_LAUNCHER))
"""
WAIT_S = 60.0
LEAVING_S = 10.0  # DRAIN_S, LEAVE_S, and the interpreter's own end
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "eos_token_id": [7, 77, 177, 277],
}


class Stage:
    """A run's folder and its processes."""

    def __init__(self, folder: Path, wait_s: float = WAIT_S, **rollout: object) -> None:
        self.run = folder / "run"
        self.config = run_config(folder, rollout)
        self.wait_s = wait_s
        write_run(self.config, self.run)
        self.keys = RunKeys.create(self.run)
        self.first_port = free_ports(20)
        self.endpoint = f"tcp://127.0.0.1:{self.first_port}"
        self.processes: list[subprocess.Popen[bytes]] = []
        self.queue = self.start_queue()
        self.client = QueueClient(self.endpoint, self.keys, "test", timeout_s=WAIT_S)

    def start(self, *argv: str, rank: int = 0) -> subprocess.Popen[bytes]:
        environment = os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen([sys.executable, *argv], cwd=REPOSITORY, env=environment, start_new_session=True)
        self.processes.append(process)
        return process

    def start_queue(self) -> subprocess.Popen[bytes]:
        return self.start("-m", "rollout.queue", "--run", str(self.run), "--bind", self.endpoint)

    def start_worker(self, rank: int = 0, program: tuple[str, ...] = ("-c", WORKER)) -> subprocess.Popen[bytes]:
        port = str(self.first_port + 2)
        arguments = ("--run", str(self.run), "--queue", self.endpoint, "--engine-port", port)
        return self.start(*program, *arguments, rank=rank)

    def close(self) -> None:
        self.client.close()
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    # The trainer's part.

    def fleet(self, size: int) -> list[EngineInfo]:
        """The engines, once there are so many."""
        wait_until(lambda: len(self.client.fleet()) == size, f"{size} engines", self.wait_s)
        return self.client.fleet()

    def push(self, version: int, engines: list[EngineInfo]) -> None:
        """Gives fake weights to the engines; the ledger is told by the caller."""
        for engine in engines:
            self.ask(engine, _push, version)

    def publish(self, engines: list[EngineInfo], version: int = 0) -> None:
        self.push(version, engines)
        self.client.published(version, engines)

    def slow_down(self, engine: EngineInfo, token_s: float) -> None:
        self.ask(engine, lambda client: client.slow_down(token_s))

    def ask(self, engine: EngineInfo, call: Callable, *arguments: object) -> None:
        async def run() -> None:
            async with EngineClient(engine.url, api_key=self.keys.engine_api_key) as client:
                await call(client, *arguments)

        asyncio.run(run())

    def batch(self, step: int, check: Callable[[Trajectory], None] | None = None) -> Batch:
        """The batch of this step; the test grades meanwhile."""
        deadline = time.monotonic() + self.wait_s
        while time.monotonic() < deadline:
            self.grade()
            answer = self.client.take(step, wait_s=0.1)
            if isinstance(answer, Batch):
                for trajectory in answer.trajectories:
                    (check or check_fake)(trajectory)
                return answer
        raise AssertionError(f"no batch of step {step} within {self.wait_s} s: {answer.table}")

    def grade(self) -> None:
        for work in self.client.lease_grading("judge", 64, wait_s=0.0):
            position = work.position
            self.client.verdict("judge", position.group, position.trajectory, Verdict(reward=float(position.trajectory)))

    def ledger(self, key: str) -> int:
        value = self.client.status()["ledger"][key]
        return sum(value.values()) if isinstance(value, dict) else value


async def _push(client: EngineClient, version: int) -> None:
    await client.pause()
    await client.flush_cache()
    await client.begin_weight_update()
    await client.end_weight_update(version)
    await client.continue_()


def check_fake(trajectory: Trajectory) -> None:
    """Each sampled token is what the pseudo-model says for the tokens before it and its version."""
    tokens = trajectory.tokens.tolist()
    for i in np.flatnonzero(trajectory.sampled):
        token, logprob = next_token(tokens[:i], int(trajectory.versions[i]))
        assert (tokens[i], np.float32(logprob)) == (token, trajectory.logprobs[i])


def wait_until(condition: Callable[[], bool], what: str, wait_s: float = WAIT_S) -> None:
    deadline = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {wait_s} s for {what}"
        time.sleep(0.05)


def free_ports(count: int) -> int:
    """The first of so many ports in a row that nobody listens on."""
    for first in range(20_000 + os.getpid() % 500 * 20, 32_000, count):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise AssertionError("no free ports")


def run_config(folder: Path, rollout: dict[str, object]) -> RunConfig:
    problems = folder / "problems.jsonl"
    task = {"kind": "calls", "tests": [{"args": [1], "expected": 1}]}
    lines = [{"id": f"p{i}", "prompt": f"t{i} t{i + 1}", "raw": True, "task": task} for i in range(20)]
    problems.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings: dict[str, object] = {
        "max_staleness": 1,
        "max_completion_tokens": 60,
        "segment_tokens": 16,
        "concurrency": 4,
        "lease_s": 2.0,
    }
    settings |= {"engine_start_s": 20.0, "request_s": 20.0}
    settings |= rollout
    return RunConfig(
        model=ModelConfig(path=str(write_model(folder / "model")), dtype="float32"),
        data=DataConfig(train=[str(problems)], max_prompt_tokens=32),
        algo=AlgoConfig(groups_per_step=2, completions_per_group=2, minibatches=1),
        rollout=RolloutConfig(**settings),  # type: ignore[arg-type]
        trainer=TrainerConfig(steps=8, push_s=5.0, stall_s=max(60.0, 1.0 + settings["engine_start_s"])),  # type: ignore[operator]
    )


def write_model(folder: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0").save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(QWEN2))
    return folder


@pytest.fixture
def stage(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Stage]:
    """Parametrized indirectly by settings of `rollout`."""
    stage = Stage(tmp_path, **getattr(request, "param", {}))
    try:
        yield stage
    finally:
        stage.close()


def test_push_leaves_the_versions_of_earlier_tokens_and_goes_on(stage: Stage) -> None:
    stage.start_worker()
    (engine,) = stage.fleet(1)
    stage.slow_down(engine, 0.02)
    stage.publish([engine])
    first = stage.batch(0)
    wait_until(lambda: stage.ledger("waiting_tokens") > 0, "tokens of the next groups")
    stage.push(1, [engine])
    stage.client.advance(1, [engine])
    second = stage.batch(1)
    assert {int(v) for t in first.trajectories for v in t.versions} == {-1, 0}
    assert any({0, 1} <= set(t.versions.tolist()) for t in second.trajectories)


def test_trajectory_goes_on_in_another_engine_when_a_worker_is_told_to_end(stage: Stage) -> None:
    worker = stage.start_worker(rank=0)
    (engine,) = stage.fleet(1)
    stage.slow_down(engine, 0.05)
    stage.publish([engine])
    wait_until(lambda: leased(stage), "leases")
    time.sleep(0.3)  # some tokens
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(timeout=LEAVING_S) == 0
    partial = stage.ledger("waiting_tokens")
    assert 0 < partial < 4 * 16  # cut in the middle of a segment
    assert not stage.client.fleet() and not leased(stage)
    stage.start_worker(rank=1)
    stage.publish(stage.fleet(1))
    assert any(t.segments > 1 for t in stage.batch(0).trajectories)
    assert stage.ledger("lost_tokens") == 0


def test_killed_engine_is_restarted_and_its_trajectories_go_on(stage: Stage) -> None:
    stage.start_worker()
    (engine,) = stage.fleet(1)
    stage.slow_down(engine, 0.05)
    stage.publish([engine])
    wait_until(lambda: leased(stage), "leases")
    os.kill(listener(engine), signal.SIGKILL)
    wait_until(lambda: bool(stage.client.fleet()) and stage.client.fleet()[0].epoch > engine.epoch, "the engine's next start")
    (restarted,) = stage.fleet(1)
    assert restarted.version is None and not leased(stage)  # no weights yet, so no work
    stage.publish([restarted])
    assert len(stage.batch(0).trajectories) == 4


def test_killed_queue_server_loses_nothing_that_was_finished(stage: Stage) -> None:
    stage.start_worker()
    (engine,) = stage.fleet(1)
    stage.slow_down(engine, 0.02)
    stage.publish([engine])
    for _ in range(3):
        time.sleep(0.4)
        stage.queue.kill()
        stage.queue.wait()
        time.sleep(0.5)
        stage.queue = stage.start_queue()
    assert len(stage.batch(0).trajectories) == 4
    assert stage.client.status()["ledger"]["lost_tokens"].keys() <= {"duplicate"}  # a report that was sent twice


def test_leases_of_a_killed_worker_return(stage: Stage) -> None:
    worker = stage.start_worker(rank=0)
    (engine,) = stage.fleet(1)
    stage.slow_down(engine, 0.05)
    stage.publish([engine])
    wait_until(lambda: leased(stage), "leases")
    worker.kill()
    worker.wait()
    wait_until(lambda: not leased(stage), "the leases' return", 3 * stage.config.rollout.lease_s)
    stage.start_worker(rank=1)
    wait_until(lambda: [e.name for e in stage.client.fleet()] == ["engine-1"], "the other engine alone")
    stage.publish(stage.fleet(1))
    assert len(stage.batch(0).trajectories) == 4


def test_workers_leave_with_exit_code_0_when_the_run_is_over(stage: Stage) -> None:
    worker = stage.start_worker()
    stage.publish(stage.fleet(1))
    stage.batch(0)
    wait_until(lambda: "idle/rollout_fraction" in stage.client.status()["figures"], "the worker's sums")
    stage.client.stop()
    assert worker.wait(timeout=LEAVING_S) == 0
    assert not stage.client.fleet()


@pytest.mark.parametrize("stage", [{"engine_args": ["--context-length=24"], "segment_tokens": 21}], indirect=True)
def test_prompt_that_the_engine_refuses_is_dropped(stage: Stage) -> None:
    stage.start_worker()
    stage.publish(stage.fleet(1))
    wait_until(lambda: stage.ledger("dropped_groups") > 0, "a dropped group")


@pytest.mark.parametrize("stage", [{"request_s": 0.3, "segment_tokens": 60}], indirect=True)
def test_late_request_is_cut_instead_of_thrown_away(stage: Stage) -> None:
    stage.start_worker()
    (engine,) = stage.fleet(1)
    stage.slow_down(engine, 0.02)
    stage.publish([engine])
    assert max(t.segments for t in stage.batch(0).trajectories) > 1


def test_engine_that_the_trainer_could_not_push_to_is_restarted(stage: Stage) -> None:
    stage.start_worker()
    (engine,) = stage.fleet(1)
    stage.client.condemn(engine, "half of the weights are new")
    wait_until(lambda: bool(stage.client.fleet()) and stage.client.fleet()[0].epoch > engine.epoch, "its next start")
    said = (stage.run / "logs" / "worker-0.log").read_text()
    assert "half of the weights are new" in said


@pytest.mark.slow
def test_engine_that_stays_silent_longer_than_a_push_is_restarted(stage: Stage) -> None:
    stage.start_worker()
    (engine,) = stage.fleet(1)
    stage.publish([engine])
    stage.ask(engine, EngineClient.pause)
    wait_until(lambda: bool(stage.client.fleet()) and stage.client.fleet()[0].epoch > engine.epoch, "its next start")


def test_engine_that_does_not_start_ends_the_worker_with_the_tail_of_its_log(stage: Stage) -> None:
    program = WORKER.replace("FAKE_LAUNCHER)", "('-c', 'print(3 * \"no GPU \"); raise SystemExit(3)'))")
    worker = stage.start_worker(program=("-c", program))
    assert worker.wait(timeout=WAIT_S) == 2
    said = (stage.run / "logs" / "worker-0.log").read_text()
    assert "exit code 3" in said and "no GPU no GPU no GPU" in said


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("stage", [{"wait_s": 400.0, "engine_start_s": 400.0, "max_total_tokens": 4096}], indirect=True)
def test_sglang_server_is_kept_busy_pushed_to_and_drained(stage: Stage) -> None:
    def check(trajectory: Trajectory) -> None:
        assert np.all(trajectory.logprobs[trajectory.sampled] < 0.0)

    worker = stage.start_worker(program=("-m", "rollout"))
    (engine,) = stage.fleet(1)
    stage.slow_down(engine, 0.02)
    stage.publish([engine])
    first = stage.batch(0, check)
    assert any(t.segments > 1 for t in first.trajectories)
    wait_until(lambda: stage.ledger("waiting_tokens") > 0, "tokens of the next groups", stage.wait_s)
    stage.push(1, [engine])
    stage.client.advance(1, [engine])
    second = stage.batch(1, check)
    assert {int(v) for t in second.trajectories for v in t.versions[t.sampled]} == {0, 1}
    wait_until(lambda: leased(stage), "leases", stage.wait_s)
    time.sleep(1.0)  # some tokens
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(timeout=LEAVING_S) == 0
    assert stage.ledger("waiting_tokens") > 0 and stage.ledger("lost_tokens") == 0


def leased(stage: Stage) -> int:
    return sum(stage.client.status()["leases"].values())


def listener(engine: EngineInfo) -> int:
    """The process that listens where the engine does."""
    import psutil

    port = int(engine.url.rsplit(":", 1)[1])
    return next(c.pid for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.laddr.port == port and c.pid)
