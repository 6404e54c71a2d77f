"""The worker's parts without a server: what ends a completion, how a segment finishes, what counts as idle."""

import json
from pathlib import Path

import numpy as np
import pytest

from conf.schema import ConfigError
from rollout.__main__ import own_address
from rollout.engine_answer import Generated
from rollout.ledger.records import Finish, Position, SegmentWork
from rollout.worker.meter import Meter
from rollout.worker.worker import CannotStart, finish_of, stop_token_ids


def write_model(folder: Path, config: dict, generation: dict | None = None) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_stop_tokens_of_generation_config_go_before_those_of_config(tmp_path: Path) -> None:
    assert stop_token_ids(write_model(tmp_path, {"eos_token_id": 1}, {"eos_token_id": [2, 3]})) == [2, 3]


def test_stop_token_of_config_serves_when_generation_config_names_none(tmp_path: Path) -> None:
    assert stop_token_ids(write_model(tmp_path, {"eos_token_id": 1}, {"temperature": 1.0})) == [1]


def test_model_without_a_stop_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CannotStart, match="eos_token_id"):
        stop_token_ids(write_model(tmp_path, {}))


@pytest.mark.parametrize(
    ("said", "offset", "tokens", "expected"),
    [
        ("stop", 0, 3, Finish.STOP),
        ("length", 0, 8, Finish.CUT),  # the segment is full, the completion is not
        ("length", 12, 8, Finish.LENGTH),  # the completion is full
        ("length", 0, 5, Finish.LENGTH),  # the engine has no room for more
        ("abort", 12, 5, Finish.CUT),
        ("abort", 0, 0, Finish.CUT),
    ],
)
def test_segment_is_cut_until_its_completion_is_full(said, offset: int, tokens: int, expected: Finish) -> None:
    work = SegmentWork(
        position=Position(group=0, trajectory=0, offset=offset),
        input_tokens=np.ones(4 + offset, dtype=np.int32),
        max_new_tokens=8,
    )
    ints = np.zeros(tokens, dtype=np.int32)
    generated = Generated(tokens=ints, logprobs=ints.astype(np.float32), versions=ints, finish=said)
    assert finish_of(work, generated, max_completion_tokens=20) is expected


def test_meter_counts_time_without_any_request_as_idle() -> None:
    now = 0.0
    meter = Meter(clock=lambda: now)
    now = 3.0  # idle 3
    first = meter.request_began()
    now = 4.0
    second = meter.request_began()
    now = 6.0
    meter.request_ended(first, tokens=10)
    now = 7.0
    meter.request_ended(second, tokens=5)
    now = 9.0  # idle 2
    sums = meter.sums()
    assert (sums["up_s"], sums["idle_s"], sums["generated_tokens"], sums["in_flight"]) == (9.0, 5.0, 15, 0)
    meter.request_began()
    now = 20.0
    assert meter.sums()["idle_s"] == 5.0


def test_tokens_that_died_with_an_engine_are_estimated_from_the_time_that_they_took() -> None:
    now = 0.0
    meter = Meter(clock=lambda: now)
    answered, abandoned = meter.request_began(), meter.request_began()
    now = 2.0
    meter.request_ended(answered, tokens=100)
    now = 5.0
    meter.request_ended(abandoned, tokens=None)
    sums = meter.sums()
    assert (sums["generated_tokens"], sums["abandoned_requests"], sums["abandoned_tokens"]) == (100, 1, 250)


def test_engine_listens_where_the_queue_server_is_reached() -> None:
    assert own_address("tcp://127.0.0.1:4000") == "127.0.0.1"


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4000", "tcp://:4000", "ipc:///tmp/x", "tcp://host"])
def test_endpoint_that_is_no_tcp_address_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="tcp://host:port"):
        own_address(endpoint)
