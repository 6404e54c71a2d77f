"""The queue server: its decisions with a clock of the test's, and as a real process that is killed."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from conf.load import write_run
from conf.schema import AlgoConfig, DataConfig, ModelConfig, RolloutConfig, RunConfig, TrainerConfig
from rollout import messages as m
from rollout.client import AsyncQueueClient, QueueClient, QueueTimeout, Refused
from rollout.journal import Journal, JournalError
from rollout.keys import KeysError, RunKeys
from rollout.ledger import Ledger
from rollout.prompts import PromptStream
from rollout.server import LONGEST_MESSAGE_BYTES, QueueServer
from rollout.types import Batch, EngineInfo, Position, Waiting
from rollout.wire import pack, unpack
from tests.rollout.builders import prompt, rules, segment, verdict

REPOSITORY = Path(__file__).resolve().parents[2]
LEASE_S, STALL_S = 10.0, 60.0
ENGINE = EngineInfo(name="e0", url="http://e0", tp=1, epoch=1)


class Desk:
    """A server without a socket: the test is every client, and the clock."""

    def __init__(self, path: Path, **changed) -> None:
        self.path, self.rules, self.now, self.ids = path, rules(**changed), 1000.0, 0
        self.open()

    def open(self) -> None:
        self.journal = Journal(self.path, self.rules)
        self.ledger = Ledger.replay(self.rules, self.journal.read())
        self.server = QueueServer(
            ledger=self.ledger,
            journal=self.journal,
            stream=PromptStream([prompt(i) for i in range(50)], seed=0),
            evals={"heldout": [prompt(100), prompt(101)]},
            lease_s=LEASE_S,
            stall_s=STALL_S,
            now=self.now,
        )

    def restart(self) -> None:
        self.journal.close()
        self.open()

    def send(self, request, client: str = "c", request_id: int | None = None) -> int:
        self.ids += 1
        request_id = self.ids if request_id is None else request_id
        envelope = {"client": client, "id": request_id, "op": type(request).__name__, "fields": request}
        self.server.receive(client.encode(), pack(envelope), self.now)
        return request_id

    def answers(self, after_s: float = 0.0) -> dict[int, m.Answer]:
        """Turns of half a second, as a server without messages makes them."""
        found: dict[int, m.Answer] = {}
        end = self.now + after_s
        while True:
            for _, data in self.server.settle(self.now):
                answer = unpack(m.Answer, data)
                found[answer.id] = answer
            if self.now >= end:
                return found
            self.now = min(self.now + 0.5, end)

    def ask(self, request, client: str = "c"):
        request_id = self.send(request, client)
        answer = self.answers()[request_id]
        assert not answer.error, answer
        return answer.value

    def refusal(self, request) -> tuple[str, str]:
        request_id = self.send(request)
        answer = self.answers()[request_id]
        return answer.error, answer.value

    def register(self, name: str = "e0", epoch: int = 1) -> None:
        self.ask(m.RegisterEngine(name=name, url=f"http://{name}", tp=1, epoch=epoch))

    def publish(self, *engines: str) -> None:
        self.ask(m.Published(version=self.ledger.version, engines=engines or ("e0@1",)))

    def beat(self, holder: str = "e0", held=(), engine: EngineInfo | None = None) -> dict:
        return self.ask(m.Heartbeat(holder=holder, role="worker", held=tuple(held), engine=engine))

    def lease(self, count: int = 1, holder: str = "e0", wait_s: float = 0.0) -> list[Position]:
        work = self.ask(m.LeaseSegments(holder=holder, count=count, wait_s=wait_s))["work"]
        return [Position(*w["position"]) for w in work]

    def report(self, position: Position, versions: list[int], finish: str = "stop", holder: str = "e0") -> str:
        request = m.ReportSegment(holder=holder, position=position, segment=segment(versions, finish))
        return self.ask(request)["outcome"]

    def fill(self, groups: int) -> None:
        for position in self.lease(groups * 2):
            self.report(position, [self.ledger.version])
            request = m.ReportVerdict(
                holder="j", group=position.group, trajectory=position.trajectory, verdict=verdict(position.trajectory)
            )
            self.ask(request)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path / "ledger.db")
    yield desk
    desk.journal.close()


@pytest.fixture
def ready(desk: Desk) -> Desk:
    """With one engine that holds version 0."""
    desk.register()
    desk.publish()
    return desk


# Leases and heartbeats.


def test_lease_holds_prompt_and_completion_so_far(ready):
    first = ready.lease()[0]
    ready.report(first, [0, 0], "cut")
    work = ready.ask(m.LeaseSegments(holder="e0", count=1, wait_s=0.0))["work"][0]
    first_prompt = ready.ledger.prompt(0).tokens.tolist()
    assert work["input_tokens"].tolist() == [*first_prompt, 0, 1]
    assert (Position(*work["position"]).offset, work["max_new_tokens"]) == (2, 4)


def test_judge_gets_tokens_prefill_and_task(ready):
    ready.report(ready.lease()[0], [0, 0])
    work = ready.ask(m.LeaseGrading(holder="j", count=5, wait_s=0.0))["work"]
    assert [(w["tokens"].tolist(), w["finish"], w["task"]["kind"]) for w in work] == [([0, 1], "stop", "calls")]


def test_leases_of_a_holder_that_falls_silent_return(ready):
    ready.register("e1")
    ready.publish("e0@1", "e1@1")
    held = ready.lease(2)
    for _ in range(3):
        ready.answers(after_s=LEASE_S / 2)
        ready.beat("e1")
    assert ready.ledger.leases.held("e0") == []
    assert ready.lease(2, "e1") == held


def test_server_that_was_stopped_itself_takes_no_leases_back(ready):
    held = ready.lease(2)
    ready.now += 10 * LEASE_S  # one turn
    ready.answers()
    assert sorted(ready.ledger.leases.held("e0"), key=repr) == sorted(held, key=repr)


def test_worker_that_comes_back_late_learns_which_of_its_leases_are_not_its_own_any_more(ready):
    ready.register("e1")
    ready.publish("e0@1", "e1@1")
    held = ready.lease(2)
    ready.answers(after_s=LEASE_S - 1)
    ready.beat("e1")
    ready.answers(after_s=2.0)
    assert ready.lease(1, "e1") == held[:1]
    heard = ready.beat("e0", held, ENGINE)
    assert [Position(*p) for p in heard["cancel"]] == held[:1]


def test_lease_that_never_reached_its_holder_is_free_after_two_heartbeats(ready):
    lost = ready.lease(1)
    ready.beat("e0", [])
    assert ready.ledger.leases.held("e0") == lost
    ready.beat("e0", [])
    assert ready.ledger.leases.held("e0") == []


def test_restarted_server_takes_up_the_leases_that_heartbeats_list(ready):
    held = ready.lease(3)
    ready.restart()
    heard = ready.beat("e0", held, ENGINE)
    assert heard["cancel"] == []
    assert ready.report(held[0], [0]) == "recorded"
    assert held[1] not in ready.lease(9)


def test_long_poll_is_served_when_work_appears_and_ends_empty_when_it_does_not(ready):
    waiting = ready.send(m.LeaseGrading(holder="j", count=1, wait_s=5.0))
    assert waiting not in ready.answers(after_s=2.0)
    position = ready.lease()[0]
    report = ready.send(m.ReportSegment(holder="e0", position=position, segment=segment([0])))
    assert set(ready.answers()) == {waiting, report}
    empty = ready.send(m.LeaseGrading(holder="j", count=1, wait_s=5.0))
    assert ready.answers(after_s=5.0)[empty].value == {"work": []}


def test_request_sent_again_over_another_connection_is_answered_there_once(ready):
    request = m.LeaseGrading(holder="j", count=1, wait_s=5.0)
    request_id = ready.send(request)
    envelope = {"client": "c", "id": request_id, "op": "LeaseGrading", "fields": request}
    ready.server.receive(b"other route", pack(envelope), ready.now)
    ready.report(ready.lease()[0], [0])
    served = [route for route, data in ready.server.settle(ready.now) if unpack(m.Answer, data).id == request_id]
    leased = ready.ledger.leases.held("j")
    assert len(leased) == 1 and served in ([], [b"other route"])


# Engines.


def test_engine_without_the_published_version_gets_no_lease(desk):
    desk.register()
    assert desk.lease() == []
    desk.publish()
    assert desk.lease() != []


def test_restarted_engine_is_another_engine(ready):
    held = ready.lease()
    ready.register(epoch=2)
    assert ready.lease() == [] and ready.ledger.leases.held("e0") == []
    assert ready.ask(m.Fleet())["engines"][0]["version"] is None
    ready.publish("e0@2")
    assert ready.lease() == held


def test_push_that_ends_after_the_engine_has_restarted_does_not_count_for_it(desk):
    desk.register(epoch=1)
    desk.register(epoch=2)
    desk.publish("e0@1")
    assert desk.lease() == []


def test_condemned_engine_leaves_the_fleet_until_it_comes_back_with_another_epoch(ready):
    ready.lease()
    ready.ask(m.Condemn(engine="e0@1", reason="push failed"))
    assert ready.ask(m.Fleet())["engines"] == [] and ready.lease() == []
    assert ready.beat("e0", (), ENGINE)["condemned"] == "push failed"
    ready.register(epoch=2)
    assert [e["epoch"] for e in ready.ask(m.Fleet())["engines"]] == [2]
    assert ready.beat("e0")["condemned"] == ""


def test_engine_whose_worker_falls_silent_leaves_the_fleet(ready):
    ready.answers(after_s=LEASE_S + 1)
    assert ready.ask(m.Fleet())["engines"] == []
    ready.beat("e0", (), ENGINE)
    assert [e["version"] for e in ready.ask(m.Fleet())["engines"]] == [0]


# The trainer.


def test_take_waits_and_then_tells_what_is_waited_for(ready):
    ready.lease(1)
    request_id = ready.send(m.Take(step=0, wait_s=3.0))
    assert request_id not in ready.answers(after_s=2.0)
    waiting = ready.answers(after_s=1.0)[request_id].value["waiting"]
    assert "group 0 (admitted at version 0): 1 to_generate, 1 generating" in waiting["table"]
    assert "no judge is there" in waiting["table"] and not waiting["fleet_changed"]


def test_take_returns_at_once_when_an_engine_has_joined_that_the_trainer_has_not_seen(ready):
    ready.ask(m.Fleet())
    request_id = ready.send(m.Take(step=0, wait_s=30.0))
    assert request_id not in ready.answers(after_s=1.0)
    ready.send(m.RegisterEngine(name="e1", url="http://e1", tp=1, epoch=1))
    assert ready.answers()[request_id].value["waiting"]["fleet_changed"]
    ready.ask(m.Fleet())  # seen; a push to it may fail, and then it is not announced again and again
    request_id = ready.send(m.Take(step=0, wait_s=5.0))
    assert request_id not in ready.answers(after_s=4.0)
    assert ready.answers(after_s=1.0)[request_id].value["waiting"]["fleet_changed"]


def test_batch_is_served_again_after_a_restart_of_the_server(ready):
    ready.fill(groups=2)
    first = ready.ask(m.Take(step=0, wait_s=0.0))["batch"]
    ready.restart()
    again = ready.ask(m.Take(step=0, wait_s=0.0))["batch"]
    assert pack(first) == pack(again)


def test_answers_leave_only_after_the_commit(ready, monkeypatch):
    ready.send(m.ReportSegment(holder="e0", position=ready.lease()[0], segment=segment([0])))

    def full() -> int:
        raise JournalError("disk is full")

    monkeypatch.setattr(ready.journal, "commit", full)
    with pytest.raises(JournalError):
        ready.answers()
    ready.restart()
    assert ready.ledger.summary()["waiting_tokens"] == 0  # unacknowledged, so its worker reports it again


def test_wait_in_which_nothing_moves_ends_with_the_table(ready):
    ready.lease(1)
    request_id = ready.send(m.Take(step=0, wait_s=60.0))
    assert not ready.answers(after_s=STALL_S)[request_id].error
    ready.answers(after_s=1.0)
    error, text = ready.refusal(m.Take(step=0, wait_s=60.0))
    assert error == "stalled" and "nothing has moved for 61 s" in text and "no worker is there" in text


def test_wait_goes_on_as_long_as_anything_moves(ready):
    ready.ask(m.Take(step=0, wait_s=0.0))
    for _ in range(5):
        ready.answers(after_s=STALL_S / 2)
        ready.beat("e0", (), ENGINE)
        ready.report(ready.lease(1)[0], [0])
        assert not ready.answers()
        assert ready.ask(m.Take(step=0, wait_s=0.0))["waiting"]


def test_evaluation_is_leased_first_and_its_result_is_told_once(ready):
    ready.ask(m.StartEval(eval_id="e", split="heldout", completions=1))
    ready.ask(m.StartEval(eval_id="e", split="heldout", completions=1))
    asked = ready.send(m.AskEval(eval_id="e", wait_s=20.0))
    for position in ready.lease(2):
        assert position.group < 0
        ready.report(position, [0])
        ready.send(m.ReportVerdict(holder="j", group=position.group, trajectory=0, verdict=verdict(1.0)))
    result = ready.answers()[asked].value["result"]
    assert [p["prompt_id"] for p in result["prompts"]] == ["p100", "p101"]
    assert ready.refusal(m.StartEval(eval_id="x", split="nowhere", completions=1))[0] == "refused"


def test_run_that_is_over_leases_nothing_and_says_so(ready):
    ready.ask(m.Stop())
    assert ready.lease() == []
    assert ready.beat()["closing"]


# Bad messages.


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a msgpack message"),
        (b"\xc1\xff", "not a msgpack message"),
        (pack([1, 2]), "expected a Envelope"),
        (pack({"client": "c", "id": 1, "op": "Delete", "fields": {}}), "unknown request 'Delete'"),
        (pack({"client": "c", "id": 1, "op": "Take", "fields": {"step": "0", "wait_s": 0.0}}), "Take.step: expected int"),
        (pack({"client": "c", "id": 1, "op": "Take", "fields": {"step": 0}}), "field 'wait_s' of Take is missing"),
        (b"x" * (LONGEST_MESSAGE_BYTES + 1), "is longer than"),
    ],
)
def test_malformed_message_is_answered_and_changes_nothing(ready, data, message):
    before = repr(ready.ledger.state.comparable())
    ready.server.receive(b"route", data, ready.now)
    ((_, answer),) = ready.server.settle(ready.now)
    assert unpack(m.Answer, answer).error == "malformed" and message in unpack(m.Answer, answer).value
    assert repr(ready.ledger.state.comparable()) == before


def test_request_out_of_order_is_refused_with_the_reason(ready):
    assert ready.refusal(m.Advance(version=1, engines=("e0@1",))) == (
        "refused",
        "version 1 cannot follow: the batch of step 0 was never taken",
    )
    assert ready.refusal(m.RefuseGroup(group=0, kind="old", reason="x"))[0] == "refused"


# As a process.

WAIT_S = 60.0


def write_run_folder(folder: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(100)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0").save_pretrained(folder / "model")
    task = {"kind": "calls", "tests": [{"args": [], "expected": 1}]}
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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


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
        await client.report_segment("w", position.group, position.trajectory, position.offset, done)


def test_run_in_which_the_server_is_killed_again_and_again_loses_nothing(served):
    worker = Worker(served)
    worker.start()
    seen: list[int] = []
    with served.client("trainer") as trainer, served.client("judge") as judge:
        while not trainer.fleet():
            time.sleep(0.05)
        trainer.published(0, trainer.fleet())
        for step in range(3):
            while not isinstance(batch := trainer.take(step, wait_s=0.1), Batch):
                for work in judge.lease_grading("judge", 8, wait_s=0.0):
                    where = work.position
                    judge.verdict("judge", where.group, where.trajectory, verdict(float(where.trajectory)))
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
            while not trainer.fleet():  # the restarted server hears of it again
                time.sleep(0.05)
            trainer.advance(step + 1, trainer.fleet())
        counts = trainer.status()["ledger"]
        worker.over.set()
        worker.join(WAIT_S)
        trainer.stop()
    assert seen == list(range(6))
    assert counts["trained_tokens"] == 3 * 2 * 2 * 9 and counts["lost_tokens"] == {}
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(WAIT_S) == 0


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


def _dict(keys: RunKeys) -> dict[str, str]:
    return {name: getattr(keys, name) for name in keys.__slots__}


def test_port_in_use_and_broken_problems_are_clear_errors_at_the_start(tmp_path):
    run = write_run_folder(tmp_path)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        process = Process(run)
        process.kill()
        process.endpoint = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        process.start()
        _, said = process.process.communicate(timeout=WAIT_S)
        assert process.process.returncode == 2 and "choose another port" in said
    (tmp_path / "problems.jsonl").write_text('{"id": "p", "prompt"\n')
    process.endpoint = f"tcp://127.0.0.1:{free_port()}"
    process.start()
    _, said = process.process.communicate(timeout=WAIT_S)
    assert process.process.returncode == 2 and "problems.jsonl:1: broken JSON" in said


def test_client_of_a_server_that_is_not_there_ends_at_its_deadline(tmp_path):
    keys = RunKeys.create(tmp_path)
    began = time.monotonic()
    nobody = QueueClient(f"tcp://127.0.0.1:{free_port()}", keys, "c", timeout_s=0.5)
    with nobody as client, pytest.raises(QueueTimeout, match="did not answer Take within 1 s"):
        client.take(0, wait_s=0.2)
    assert time.monotonic() - began < 5.0


# Keys.


def test_keys_are_made_once_and_are_readable_by_nobody_else(tmp_path):
    keys = RunKeys.create(tmp_path)
    assert RunKeys.create(tmp_path) == keys == RunKeys.load(tmp_path)
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "keys").iterdir()} == {0o600}
    assert keys.engine_api_key not in repr(keys) and keys.server_secret not in repr(keys)
    (tmp_path / "keys").chmod(0o755)
    with pytest.raises(KeysError, match="chmod 700"):
        RunKeys.load(tmp_path)


def test_missing_keys_say_who_makes_them(tmp_path):
    with pytest.raises(KeysError, match="the launcher makes"):
        RunKeys.load(tmp_path)
