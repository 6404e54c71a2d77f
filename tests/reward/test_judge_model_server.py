"""A judge model that the run itself serves: tasks without a `url` ask it, and wait for it while it is away."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import reward.grading.services
from reward.grade import grade
from reward.grading.services import Services
from reward.kinds.endpoint import OwnServer
from reward.kinds.kind import Answer, Defaults
from reward.task import read_reward
from rollout.ledger.records import Verdict
from rollout.servers import JUDGE_MODEL, address_file
from tests.reward.graded import OnlyServices
from tests.rollout.fake_engine import OPINION
from tests.rollout.stage import LEAVING_S, WORKER, Stage, listener, wait_until
from trainer.prepare.warm_start import Demonstration, make_model, save, train_tokenizer

TASK = {"kind": "judge", "template": "A: {answer}", "score": r"(\d)", "scale": [0, 10], "max_tokens": 1}


class Run:
    """The server of the judge model, as a rank of the fleet, and what a judge asks it by."""

    def __init__(self, folder: Path, model: str = "model", program: tuple[str, ...] = ("-c", WORKER), **rollout: Any) -> None:
        self.stage = Stage(folder, judge_model=str(folder / model), engines=1, **rollout)
        self.address = address_file(self.stage.run, JUDGE_MODEL)
        self.keeper = self.stage.start_worker(rank=1, program=program)
        own = OwnServer(address=self.address.read_text, api_key=self.stage.keys.engine_api_key)
        self.services = Services(own)

    def graded(self, **task: Any) -> Verdict:
        asked = read_reward({**TASK, **task}, defaults=Defaults(judge_model=True))
        return grade(asked, Answer(completion="It is 42."), OnlyServices(self.services))

    def close(self) -> None:
        self.services.close()
        self.stage.close()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.setattr(reward.grading.services, "LONGEST_PAUSE_S", 0.5)
    run = Run(tmp_path)
    try:
        yield run
    finally:
        run.close()


@pytest.mark.slow
def test_server_of_the_judge_model_is_waited_for_restarted_and_ended_with_the_run(run: Run) -> None:
    assert not run.address.exists()
    assert (run.graded().reward, run.graded().reason) == (OPINION / 10, "")
    killed = listener(run.address.read_text())
    os.kill(killed, signal.SIGKILL)
    with ThreadPoolExecutor(4) as pool:
        verdicts = list(pool.map(lambda _: run.graded(), range(4)))
    assert [(verdict.reward, verdict.parts["unparsed"]) for verdict in verdicts] == [(OPINION / 10, 0.0)] * 4
    assert listener(run.address.read_text()) != killed
    assert "judge-model" in {holder["role"] for holder in run.stage.client.status()["holders"].values()}
    run.keeper.send_signal(signal.SIGTERM)
    assert run.keeper.wait(timeout=LEAVING_S) == 0 and not run.address.exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_real_engine_serves_a_judge_model_that_answers_chats(tmp_path: Path) -> None:
    tokenizer = train_tokenizer([Demonstration(prompt="Add 1 and 2.", prefill="", answer="3")])
    save(tmp_path / "judge", make_model(tokenizer), tokenizer)
    [eight] = tokenizer.encode("8")
    run = Run(tmp_path, "judge", ("-m", "rollout"), engine_start_s=300.0, request_s=60.0, max_total_tokens=4096)
    try:
        wait_until(run.address.exists, "the judge model's server", 300.0)
        always = {"extra": {"logit_bias": {str(eight): 100.0}}}  # whatever the weights are
        assert (run.graded(**always).reward, run.graded(**always).reason) == (0.8, "")
    finally:
        run.close()
