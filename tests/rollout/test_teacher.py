"""Workers ask a teacher's server about what they sampled. Whatever it does, each token gets its own log-prob. None is lost."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from rollout.engine_answer import AnswerError, read_scored
from rollout.exit_codes import CANNOT_START
from rollout.ledger.records import Trajectory
from tests.rollout.fake_engine import VOCABULARY, prompt_logprob
from tests.rollout.stage import LEAVING_S, Stage, check_fake, leased, listener, wait_until

REQUEST_S = 1.5
GARBAGE = (
    b"<html>bad gateway</html>",
    b"[]",
    b"{}",
    json.dumps({"meta_info": {"input_token_logprobs": [[None, 1, None], [-1.0, 2, None]]}}).encode(),
    b'{"meta_info": {"input_token_logprobs": [[null, 1, null], [NaN, 2, null]]}}',
)


class FaultyTeacher(BaseHTTPRequestHandler):
    """A teacher that can be told to be slow, or to answer nonsense. Like SGLang, it shows the last token as token 0."""

    fault: ClassVar[str] = ""
    word: ClassVar[str] = "t"  # the fake tokenizer reads token 7 as t7
    most_tokens: ClassVar[int] = 1 << 20
    answers: ClassVar[Iterator[int]] = count()

    def do_GET(self) -> None:
        self.answer(200, json.dumps({"max_req_input_len": self.most_tokens}).encode())

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tokens, start = request["input_ids"], request["logprob_start_len"]
        scored: list[list[Any]] = [
            [
                None if at == start else prompt_logprob(tokens, at),
                tokens[at] % (VOCABULARY - 1),
                f"{self.word}{tokens[at] % (VOCABULARY - 1)}",
            ]
            for at in range(start, len(tokens))
        ]
        body = json.dumps({"output_ids": [], "meta_info": {"input_token_logprobs": scored}}).encode()
        if self.fault == "slow":
            time.sleep(2 * REQUEST_S)
        elif self.fault == "garbage":
            body = GARBAGE[next(self.answers) % len(GARBAGE)]
        elif self.fault:
            return self.answer(int(self.fault), b"no")
        self.answer(200, body)

    def answer(self, status: int, body: bytes) -> None:
        try:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)
        except OSError:  # it was asked by one that no longer waits
            pass

    def log_message(self, *_: object) -> None:
        pass


class Server:
    """The faulty teacher on a port of its own. It may die and come back."""

    def __init__(self) -> None:
        self.handler = type("Handler", (FaultyTeacher,), {})
        self.port = 0
        self.begin()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def begin(self) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), self.handler)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def end(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def break_by(self, fault: str) -> None:
        if fault == "dead":
            self.end()
        else:
            self.handler.fault = fault

    def mend(self, fault: str) -> None:
        if fault == "dead":
            self.begin()
        else:
            self.handler.fault = ""


@pytest.fixture
def teacher() -> Iterator[Server]:
    server = Server()
    yield server
    server.end()


@pytest.fixture
def stage(tmp_path: Path, teacher: Server) -> Iterator[Stage]:
    stage = Stage(tmp_path, teacher=teacher.url, request_s=REQUEST_S)
    try:
        yield stage
    finally:
        stage.close()


def check_taught(trajectory: Trajectory) -> None:
    check_fake(trajectory)
    tokens = trajectory.tokens.tolist()
    wanted = [prompt_logprob(tokens, at) if sampled else 0 for at, sampled in enumerate(trajectory.sampled)]
    assert trajectory.teacher.tolist() == np.array(wanted, dtype=np.float32).tolist()


def begin(stage: Stage) -> None:
    stage.start_worker()
    stage.publish(stage.fleet(1))


def said(stage: Stage) -> str:
    return (stage.run / "logs" / "worker-0.log").read_text()


SLOW = pytest.mark.slow


@pytest.mark.parametrize("fault", [*(pytest.param(one, marks=SLOW) for one in ("slow", "dead", "garbage")), "500"])
def test_run_waits_for_a_teacher_that_fails_and_goes_on_when_it_is_back(stage: Stage, teacher: Server, fault: str) -> None:
    begin(stage)
    stage.batch(0, check_taught)
    wait_until(lambda: stage.ledger("waiting_tokens") > 0, "segments of the next batch")
    teacher.break_by(fault)
    stage.advance(1, stage.client.fleet())
    wait_until(lambda: "the teacher does not answer" in said(stage), "the worker's message")
    wait_until(lambda: leased(stage) == 4, "segments that wait for the teacher")
    waiting = stage.ledger("waiting_tokens")
    time.sleep(3 * stage.config.rollout.lease_s)
    assert leased(stage) == 4 and stage.ledger("waiting_tokens") == waiting  # held, neither lost nor reported without log-probs
    teacher.mend(fault)
    stage.batch(1, check_taught)
    assert stage.ledger("lost_tokens") == 0


@pytest.mark.slow
def test_worker_that_ends_while_the_teacher_is_dead_hands_its_leases_back(stage: Stage, teacher: Server) -> None:
    worker = stage.start_worker()
    fleet = stage.fleet(1)
    teacher.break_by("500")
    stage.publish(fleet)
    wait_until(lambda: "the teacher does not answer" in said(stage), "the worker's message")
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(timeout=LEAVING_S) == 0
    assert leased(stage) == 0 and stage.ledger("waiting_tokens") == 0
    teacher.mend("500")
    stage.start_worker(rank=1)
    stage.publish(stage.fleet(1))
    stage.batch(0, check_taught)


@pytest.mark.slow
def test_completion_that_the_teacher_will_never_score_drops_its_group(stage: Stage, teacher: Server) -> None:
    begin(stage)
    stage.batch(0, check_taught)
    teacher.break_by("400")
    wait_until(lambda: stage.ledger("dropped_groups") > 0, "a dropped group")
    teacher.mend("400")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"word": "x"},
            "the teacher has another tokenizer than model.path: token 0 is 'x0' to the teacher and 't0' to the model",
        ),
        ({"most_tokens": 91}, "takes 91 tokens at most, but data.max_prompt_tokens + rollout.max_completion_tokens = 92"),
        ({"fault": "401"}, "the teacher cannot be used"),
    ],
)
def test_teacher_that_does_not_fit_the_model_ends_the_run_at_its_start(
    stage: Stage, teacher: Server, changed: dict[str, Any], message: str
) -> None:
    for name, value in changed.items():
        setattr(teacher.handler, name, value)
    assert stage.start_worker().wait(timeout=30) == CANNOT_START
    assert message in said(stage)


@pytest.mark.slow
def test_server_that_the_run_starts_for_its_teacher_is_restarted_when_it_dies(tmp_path: Path) -> None:
    stage = Stage(tmp_path, teacher=str(tmp_path / "model"), teacher_on="engine", engines=1)
    try:
        stage.start_worker(rank=0)
        keeper = stage.start_worker(rank=1)
        stage.publish(stage.fleet(1))
        stage.batch(0, check_taught)
        address = (stage.run / "teacher_address").read_text()
        os.kill(listener(address), signal.SIGKILL)
        stage.advance(1, stage.client.fleet())
        stage.batch(1, check_taught)
        assert stage.ledger("lost_tokens") == 0
        keeper.send_signal(signal.SIGTERM)
        assert keeper.wait(timeout=LEAVING_S) == 0 and not (stage.run / "teacher_address").exists()
    finally:
        stage.close()


def test_log_probs_of_other_tokens_are_refused() -> None:
    def answer(*scored: list[Any]) -> dict[str, Any]:
        return {"meta_info": {"input_token_logprobs": [[None, 4, None], *scored]}}

    assert read_scored(answer([-0.5, 5, None], [-1.0, 6, "six"]), [5, 6]).logprobs.tolist() == [-0.5, -1.0]
    for wrong in (
        [[-0.5, 5, None]],
        [[-0.5, 5, None], [-1.0, 7, None]],
        [[-0.5, 5, None], [float("nan"), 6, None]],
        [[1.0, 5, None]],
    ):
        with pytest.raises(AnswerError):
            read_scored(answer(*wrong), [5, 6])
