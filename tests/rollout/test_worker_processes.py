"""Workers as processes, with the real queue server and fake engines: nothing that was finished is lost.

The test plays trainer and judge. The fake engine's pseudo-model is a function of tokens and version, so every token of a
batch is checked against it, however often its trajectory was cut, moved or met by a push.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rollout.engine_client import EngineClient
from rollout.ledger.records import Trajectory
from tests.rollout.stage import LEAVING_S, SEEN, WAIT_S, WORKER, Stage, leased, listener, wait_until


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
    stage.advance(1, [engine])
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


@pytest.mark.parametrize("stage", [{"max_turns": 3, "segment_tokens": 2}], indirect=True)
def test_episode_goes_on_after_an_observation_in_whichever_engine_is_free(stage: Stage) -> None:
    for rank in range(2):
        stage.start_worker(rank=rank)
    engines = stage.fleet(2)
    stage.publish(engines)
    trajectories: list[Trajectory] = []
    for step in range(4):
        trajectories += stage.batch(step).trajectories
        stage.advance(step + 1, engines)
    episodes = [t for t in trajectories if t.turns > 1]
    assert episodes
    assert any(t.segments > t.turns for t in episodes)  # a turn that another engine may have continued
    for episode in episodes:
        unsampled = episode.tokens[~episode.sampled]
        assert unsampled[-3 * (episode.turns - 1) :].tolist() == SEEN.tolist() * (episode.turns - 1)


def test_killed_engine_is_restarted_and_its_trajectories_go_on(stage: Stage) -> None:
    stage.start_worker()
    (engine,) = stage.fleet(1)
    stage.slow_down(engine, 0.05)
    stage.publish([engine])
    wait_until(lambda: leased(stage), "leases")
    os.kill(listener(engine.url), signal.SIGKILL)
    wait_until(lambda: bool(stage.client.fleet()) and stage.client.fleet()[0].epoch != engine.epoch, "the engine's next start")
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
    engines = stage.fleet(1)
    stage.publish(engines)
    for step in range(stage.config.trainer.steps):
        stage.batch(step)
        stage.advance(step + 1, engines)
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
    wait_until(lambda: bool(stage.client.fleet()) and stage.client.fleet()[0].epoch != engine.epoch, "its next start")
    said = (stage.run / "logs" / "worker-0.log").read_text()
    assert "half of the weights are new" in said


@pytest.mark.slow
def test_engine_that_stays_silent_longer_than_a_push_is_restarted(stage: Stage) -> None:
    stage.start_worker()
    (engine,) = stage.fleet(1)
    stage.publish([engine])
    stage.ask(engine, EngineClient.pause)
    wait_until(lambda: bool(stage.client.fleet()) and stage.client.fleet()[0].epoch != engine.epoch, "its next start")


def test_engine_that_does_not_start_ends_the_worker_with_the_tail_of_its_log(stage: Stage) -> None:
    program = WORKER.replace("FAKE_LAUNCHER)", "('-c', 'print(3 * \"no GPU \"); raise SystemExit(3)'))")
    worker = stage.start_worker(program=("-c", program))
    assert worker.wait(timeout=WAIT_S) == 2
    said = (stage.run / "logs" / "worker-0.log").read_text()
    assert "exit code 3" in said and "no GPU no GPU no GPU" in said


def starts(stage: Stage) -> int:
    return (stage.run / "logs" / "engine-0.log").read_text().count("ended with exit code")


def test_engine_that_can_never_start_is_started_once(stage: Stage) -> None:
    program = WORKER.replace("FAKE_LAUNCHER)", "('-c', 'import a_package_that_is_missing'))")
    worker = stage.start_worker(program=("-c", program))
    assert worker.wait(timeout=WAIT_S) == 2
    assert "No module named 'a_package_that_is_missing'" in (stage.run / "logs" / "worker-0.log").read_text()
    assert starts(stage) == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", [{"wait_s": 400.0, "engine_start_s": 400.0, "engine_args": ["--a-typo=1"]}], indirect=True)
def test_sglang_with_an_argument_that_it_does_not_know_is_started_once(stage: Stage) -> None:
    worker = stage.start_worker(program=("-m", "rollout"))
    assert worker.wait(timeout=400) == 2
    assert "unrecognized arguments: --a-typo=1" in (stage.run / "logs" / "worker-0.log").read_text()
    assert starts(stage) == 1


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
    stage.advance(1, [engine])
    second = stage.batch(1, check)
    assert {int(v) for t in second.trajectories for v in t.versions[t.sampled]} == {0, 1}
    wait_until(lambda: leased(stage), "leases", stage.wait_s)
    time.sleep(1.0)  # some tokens
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(timeout=LEAVING_S) == 0
    assert stage.ledger("waiting_tokens") > 0 and stage.ledger("lost_tokens") == 0
