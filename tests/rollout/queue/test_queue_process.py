"""The queue server as a real process: it is killed, spoken to by strangers, and started wrongly."""

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from conf.compose.load import read_run, write_run
from conf.schema import AlgoConfig, DataConfig, ModelConfig, RolloutConfig, RunConfig, TrainerConfig
from rollout.checkpoint_files import write_sums
from rollout.exit_codes import NOT_NOW
from rollout.ledger.journal import Journal, JournalError
from rollout.ledger.records import Answered, Batch, EngineInfo, Waiting
from rollout.ledger.rules import Rules
from rollout.ledger.wire import pack, unpack
from rollout.queue.__main__ import open_server
from rollout.queue.client import AsyncQueueClient, QueueClient, QueueTimeout, Refused
from rollout.queue.keys import RunKeys
from rollout.queue.messages import Answer
from rollout.queue.server import LONGEST_MESSAGE_BYTES
from tests.ports import free_port
from tests.rollout.builders import segment, verdict

REPOSITORY = Path(__file__).resolve().parents[3]
WAIT_S = 60.0


def write_run_folder(folder: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(100)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0").save_pretrained(folder / "model")
    task = {"kind": "calls", "entry_point": "f", "tests": [{"args": [], "expected": 1}]}
    lines = [{"id": f"p{i}", "prompt": f"t{i} t{i + 1}", "raw": True, "task": task} for i in range(1, 9)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = RunConfig(
        model=ModelConfig(path=str(folder / "model"), dtype="float32"),
        data=DataConfig(train=[str(folder / "problems.jsonl")], max_prompt_tokens=32),
        algo=AlgoConfig(groups_per_step=2, completions_per_group=2, minibatches=1),
        rollout=RolloutConfig(max_staleness=1, max_completion_tokens=9, segment_tokens=3, lease_s=5.0, engine_start_s=30.0),
        trainer=TrainerConfig(steps=6, stall_s=60.0),
    )
    write_run(config, folder / "run")
    RunKeys.create(folder / "run")
    return folder / "run"


class Process:
    def __init__(self, run: Path) -> None:
        self.run, self.keys, self.endpoint = run, RunKeys.load(run), f"tcp://127.0.0.1:{free_port()}"
        self.start()

    def start(self) -> None:
        argv = [sys.executable, "-m", "rollout.queue", "--run", str(self.run), "--bind", self.endpoint]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(argv, cwd=REPOSITORY, env=environment, stderr=subprocess.PIPE, text=True)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def client(self, name: str, timeout_s: float = WAIT_S) -> QueueClient:
        return QueueClient(self.endpoint, self.keys, name, timeout_s=timeout_s, decode_tokens=str)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Process]:
    process = Process(write_run_folder(tmp_path))
    yield process
    process.kill()


class Worker(threading.Thread):
    """A worker, an engine and a judge in one: three segments of three tokens each, whose tokens tell where they are."""

    def __init__(self, served: Process) -> None:
        super().__init__(daemon=True)
        self.served, self.version, self.over = served, 0, threading.Event()

    def run(self) -> None:
        asyncio.run(self.work())

    async def work(self) -> None:
        client = AsyncQueueClient(self.served.endpoint, self.served.keys, "w", timeout_s=WAIT_S)
        async with client:
            await client.register_engine("w", "http://w", 1, 1)
            while not self.over.is_set():
                await client.heartbeat("w", "worker")
                work = await client.lease_segments("w", 4, wait_s=0.2)
                await asyncio.gather(*(self.generate(client, w) for w in work))

    async def generate(self, client: AsyncQueueClient, work) -> None:
        position = work.position
        first = position.group * 1000 + position.trajectory * 100 + position.offset
        done = segment([self.version] * work.max_new_tokens, "cut", first_token=first)
        await client.report_segment("w", position, done)


def graded(trainer: QueueClient, judge: QueueClient, step: int) -> Batch:
    """The batch of a step, whose completions the judge has graded."""
    while not isinstance(batch := trainer.take(step, wait_s=0.1), Batch):
        for work in judge.lease_grading("judge", 8, wait_s=0.0):
            judge.answer("judge", [Answered(work.position, verdict(float(work.position.trajectory)))])
    return batch


def joined(trainer: QueueClient) -> list[EngineInfo]:
    """The fleet, once the worker is there; a server that was started again hears of it again."""
    while not (fleet := trainer.fleet()):
        time.sleep(0.05)
    return fleet


def test_run_in_which_the_server_is_killed_again_and_again_loses_nothing(served):
    worker = Worker(served)
    worker.start()
    seen: list[int] = []
    with served.client("trainer") as trainer, served.client("judge") as judge:
        trainer.published(0, joined(trainer))
        for step in range(3):
            batch = graded(trainer, judge, step)
            served.kill()
            served.start()
            again = trainer.take(step, wait_s=1.0)
            assert pack(again) == pack(batch)
            seen += [g.index for g in batch.groups]
            for group in batch.groups:
                for i, trajectory in enumerate(group.trajectories):
                    first = group.index * 1000 + i * 100
                    assert trajectory.tokens[trajectory.sampled].tolist() == list(range(first, first + 9))
                    assert trajectory.segments == 3 and trajectory.lag(step) <= 1
            worker.version = step + 1
            trainer.advance(step + 1, joined(trainer))
        counts = trainer.status()["ledger"]
        worker.over.set()
        worker.join(WAIT_S)
        trainer.stop()
    assert seen == list(range(6))
    assert counts["trained_tokens"] == 3 * 2 * 2 * 9 and counts["lost_tokens"] == {}
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(WAIT_S) == 0


def test_run_whose_ledger_was_damaged_goes_on_to_its_end_in_the_way_that_the_server_says(served):
    def life(version: int, steps: range) -> dict[str, Any]:
        """The trainer begins at a version and takes some steps; its checkpoint after each, and the account in the end."""
        worker = Worker(served)
        worker.version = version
        worker.start()
        with served.client("trainer") as trainer, served.client("judge") as judge:
            trainer.rewind(version)
            trainer.published(version, joined(trainer))
            for step in steps:
                graded(trainer, judge, step)
                worker.version = step + 1
                trainer.advance(step + 1, joined(trainer))
                if step == 0:
                    checkpoint = served.run / "checkpoints" / "version-1"
                    checkpoint.mkdir(parents=True)
                    record = {"version": 1, "extra": {"ledger": trainer.status()["ledger"]}}
                    (checkpoint / "kestrel.json").write_text(json.dumps(record))
                    write_sums(checkpoint, {})
            counts = trainer.status()["ledger"]
            worker.over.set()
            worker.join(WAIT_S)
        return counts

    life(0, range(3))
    served.kill()
    ledger = served.run / "ledger.db"
    data = ledger.read_bytes()
    ledger.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))
    served.start()
    _, said = served.process.communicate(timeout=WAIT_S)
    assert served.process.returncode == 2 and "is damaged" in said
    _, *words = said[said.index("python -m rollout.ledger.new_ledger") :].split()
    mended = subprocess.check_output([sys.executable, *words], cwd=REPOSITORY, text=True, timeout=WAIT_S)
    assert "starts again at version 1" in mended
    served.start()
    counts = life(1, range(1, 6))
    assert counts["trained_tokens"] == 6 * 2 * 2 * 9 and counts["waiting_tokens"] == 0
    lost = counts["dropped_groups"]["ledger_lost"]
    assert f"{lost} groups that were admitted" in mended and f"with {counts['dropped_tokens']['ledger_lost']} tokens" in mended
    assert counts["admitted_groups"] == 6 * 2 + lost


def test_stranger_is_not_answered_and_does_not_disturb(served, tmp_path):
    strange = RunKeys.create(tmp_path / "other")
    with served.client("friend") as friend:
        friend.status()
        for keys in (strange, RunKeys(**{**_dict(strange), "server_public": served.keys.server_public})):
            with QueueClient(served.endpoint, keys, "stranger", timeout_s=1.0) as stranger, pytest.raises(QueueTimeout):
                stranger.status()
        context = zmq.Context()
        plain = context.socket(zmq.DEALER)
        plain.connect(served.endpoint)
        plain.send(b"hello")
        assert not plain.poll(500)
        context.destroy(linger=0)
        assert isinstance(friend.take(0, wait_s=0.0), Waiting)
        with pytest.raises(Refused, match="was never taken"):
            friend.advance(1, [])


def test_slow_and_oversized_connections_disturb_nobody(served):
    port = int(served.endpoint.rpartition(":")[2])
    with served.client("friend") as friend, contextlib.ExitStack() as slow:
        friend.status()
        for number in range(50):  # each begins a handshake and never goes on
            connection = slow.enter_context(socket.create_connection(("127.0.0.1", port)))
            connection.sendall(b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03"[: number % 12])
        with served.client("large") as large:
            large._socket.send(bytes(LONGEST_MESSAGE_BYTES + 1))
            assert large._socket.poll(int(1000 * WAIT_S))
            assert "is longer than" in unpack(Answer, large._socket.recv()).value
            large._socket.send(bytes(2 * LONGEST_MESSAGE_BYTES + 1))  # ends the connection
            assert not large._socket.poll(500)
            assert large.status()  # over a new one
        began_s = time.monotonic()
        assert isinstance(friend.take(0, wait_s=0.0), Waiting)
        assert time.monotonic() - began_s < 10.0


def test_server_that_is_still_there_and_a_disk_that_is_full_are_said_to_pass(served):
    with served.client("trainer") as trainer:
        trainer.status()
    second = Process(served.run)
    second.process.communicate(timeout=WAIT_S)
    assert second.process.returncode == NOT_NOW
    resource.prlimit(served.process.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    with served.client("trainer", timeout_s=2.0) as trainer, pytest.raises(QueueTimeout):
        trainer.stop()
    served.process.communicate(timeout=WAIT_S)
    assert served.process.returncode == NOT_NOW


def _dict(keys: RunKeys) -> dict[str, str]:
    return {name: getattr(keys, name) for name in keys.__slots__}


def test_port_in_use_and_broken_problems_are_clear_errors_at_the_start(tmp_path, capfd):
    run = write_run_folder(tmp_path)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        process = Process(run)
        process.kill()
        process.endpoint = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        process.start()
        process.process.communicate(timeout=WAIT_S)
        assert process.process.returncode == NOT_NOW and "choose another port" in capfd.readouterr().out
    (tmp_path / "problems.jsonl").write_text('{"id": "p", "prompt"\n')
    process.endpoint = f"tcp://127.0.0.1:{free_port()}"
    process.start()
    _, said = process.process.communicate(timeout=WAIT_S)
    assert process.process.returncode == 2 and "problems.jsonl:1: broken JSON" in said


@pytest.mark.parametrize("change", ["a problem less", "another text", "another order", "another tokenizer", "another seed"])
def test_run_does_not_go_on_with_other_prompts(tmp_path, change):
    run = write_run_folder(tmp_path)
    config = read_run(run)
    problems = tmp_path / "problems.jsonl"
    lines = problems.read_text().splitlines(keepends=True)
    with Journal(run / "ledger.db", Rules.of(config)) as journal:
        open_server(config, run, journal, Rules.of(config))
    match change:
        case "a problem less":
            problems.write_text("".join(lines[:-1]))
        case "another text":
            problems.write_text(problems.read_text().replace('"t1 t2"', '"t1 t3"'))
        case "another order":
            problems.write_text("".join(reversed(lines)))
        case "another tokenizer":
            file = tmp_path / "model" / "tokenizer.json"
            file.write_text(file.read_text().replace('"t1":1', '"t1":2').replace('"t1": 1', '"t1": 2'))
        case "another seed":
            config.data.seed = 1
    with Journal(run / "ledger.db", Rules.of(config)) as journal, pytest.raises(JournalError, match="began with other prompts"):
        open_server(config, run, journal, Rules.of(config))


def test_run_whose_inputs_were_moved_goes_on(tmp_path):
    run = write_run_folder(tmp_path / "there")
    config = read_run(run)
    with Journal(run / "ledger.db", Rules.of(config)) as journal:
        open_server(config, run, journal, Rules.of(config))
    (tmp_path / "there").rename(tmp_path / "here")
    config.model.path, config.data.train = str(tmp_path / "here/model"), [str(tmp_path / "here/problems.jsonl")]
    run = tmp_path / "here/run"
    with Journal(run / "ledger.db", Rules.of(config)) as journal:
        open_server(config, run, journal, Rules.of(config))


def test_client_of_a_server_that_is_not_there_ends_at_its_deadline(tmp_path):
    keys = RunKeys.create(tmp_path)
    began = time.monotonic()
    nobody = QueueClient(f"tcp://127.0.0.1:{free_port()}", keys, "c", timeout_s=0.5)
    with nobody as client, pytest.raises(QueueTimeout, match="did not answer Take within 1 s"):
        client.take(0, wait_s=0.2)
    assert time.monotonic() - began < 5.0
