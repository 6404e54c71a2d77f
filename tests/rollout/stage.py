"""A run's folder and its processes, for tests with the real queue server and real workers: the test is trainer and judge."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from conf.compose.load import write_run
from conf.schema import AlgoConfig, DataConfig, ModelConfig, RolloutConfig, RunConfig, TrainerConfig
from rollout.engine_client import EngineClient
from rollout.ledger.records import Answered, Batch, EngineInfo, Finish, Observation, Trajectory, Verdict
from rollout.queue.client import QueueClient
from rollout.queue.keys import RunKeys
from tests.rollout.engine_controls import slow_down
from tests.rollout.fake_engine import VOCABULARY, next_token

REPOSITORY = Path(__file__).resolve().parents[2]
WORKER = """
import sys
from rollout.__main__ import main
from tests.rollout.fake_engine import FAKE_LAUNCHER
sys.exit(main(launcher=FAKE_LAUNCHER))
"""
PORTS_APART = 40
_PORTS = iter(range(20_000 + os.getpid() % 200 * PORTS_APART, 32_000, PORTS_APART))
_PORTS_LOCK = threading.Lock()
_CLAIMS: list[socket.socket] = []
WAIT_S = 60.0
SEEN = np.array([3, 1, 4], np.int32)  # what an environment answers
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

    def __init__(
        self,
        folder: Path,
        wait_s: float = WAIT_S,
        teacher: str = "",
        teacher_on: str = "trainer",
        judge_model: str = "",
        **rollout: object,
    ) -> None:
        self.run = folder / "run"
        self.config = run_config(folder, rollout)
        self.config.algo.teacher, self.config.algo.teacher_on = teacher, teacher_on
        self.config.reward.judge_model = judge_model
        self.wait_s = wait_s
        write_run(self.config, self.run)
        self.keys = RunKeys.create(self.run)
        self.first_port = free_ports(20)
        self.endpoint = f"tcp://127.0.0.1:{self.first_port}"
        self.processes: list[subprocess.Popen[bytes]] = []
        self.queue = self.start_queue()
        self.client = QueueClient(self.endpoint, self.keys, "test", timeout_s=WAIT_S, decode_tokens=str)

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

    def advance(self, version: int, engines: list[EngineInfo]) -> None:
        """A step is done. The push comes first: an engine with older weights would be leased groups of the new version."""
        self.push(version, engines)
        self.client.advance(version, engines)

    def slow_down(self, engine: EngineInfo, token_s: float) -> None:
        self.ask(engine, slow_down, token_s)

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
            position, room = work.position, self.config.rollout.max_completion_tokens - work.position.offset
            verdict = Verdict(reward=float(position.trajectory))
            if len(work.turns) < self.config.rollout.max_turns and work.finish is Finish.STOP and room > len(SEEN):
                self.client.answer("judge", [Answered(position, observation=Observation(tokens=SEEN))])
            else:
                self.client.answer("judge", [Answered(position, verdict)])

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
    """The first of so many ports in a row, at most PORTS_APART, that nobody listens on; no test of this machine gets them again
    while this process lives."""
    with _PORTS_LOCK:
        for first in _PORTS:
            with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
                claim = socket.socket(socket.AF_UNIX)
                claim.bind(f"\0kestrel-test-ports-{first}")  # a name, and no file: it goes with the process
                _CLAIMS.append(claim)
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
                return first
    raise AssertionError("no free ports")


def run_config(folder: Path, rollout: dict[str, object]) -> RunConfig:
    problems = folder / "problems.jsonl"
    task = {"kind": "calls", "entry_point": "f", "tests": [{"args": [1], "expected": 1}]}
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


def leased(stage: Stage) -> int:
    return sum(stage.client.status()["leases"].values())


def listener(url: str) -> int:
    """The process that listens at this address."""
    import psutil

    port = int(url.rsplit(":", 1)[1])
    return next(c.pid for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.laddr.port == port and c.pid)
