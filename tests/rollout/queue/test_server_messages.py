"""Whatever reaches the queue server, it answers, and nothing is corrupted by it."""

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.ledger.changes import Extended
from rollout.ledger.ledger import Ledger
from rollout.ledger.records import Answered, EngineInfo, Position, Segment, Verdict
from rollout.ledger.wire import pack, unpack
from rollout.queue import messages as m
from rollout.queue.server import LONGEST_MESSAGE_BYTES
from tests.rollout.builders import observation, segment
from tests.rollout.ledger.ledger_world import comparable
from tests.rollout.queue.desk import ENGINE, Desk

NUMBERS = st.integers(-2, 6) | st.sampled_from([-(2**63), 2**31, 2**63 - 1, 2**64 - 1])
NAMES = st.sampled_from(["e0", "e0@1", "e1", "j", "", "@", "e0@2"]) | st.text(max_size=4)
WAITS = st.sampled_from([0.0, -1.0, 1e300, math.inf, math.nan])
POSITIONS = st.builds(Position, group=NUMBERS, trajectory=NUMBERS, offset=NUMBERS, attempt=st.just(0) | NUMBERS)
SEGMENTS = st.builds(
    lambda versions, finish, engine, first: segment(sorted(versions), finish, engine, first),
    st.lists(st.integers(-1, 3), max_size=9), st.sampled_from(["stop", "length", "cut"]), NAMES, st.integers(0, 3),
)  # fmt: skip
VERDICTS = st.builds(Verdict, reward=st.sampled_from([0.0, 1.0, -1e300]))
BY_TYPE: dict[Any, st.SearchStrategy] = {
    int: NUMBERS,
    str: NAMES | st.sampled_from(["bad_prompt", "unrunnable", "heldout", "worker"]),
    float: WAITS,
    Position: POSITIONS,
    Segment: SEGMENTS,
    Sequence[str]: st.lists(NAMES, max_size=3).map(tuple),
    Sequence[Answered]: st.lists(
        st.builds(Answered, POSITIONS, st.none() | VERDICTS, st.none() | st.just(observation(2))), max_size=3
    ).map(tuple),
    Sequence[Position]: st.lists(POSITIONS, max_size=3).map(tuple),
    EngineInfo | None: st.none() | st.just(ENGINE),
    Mapping[str, float]: st.dictionaries(NAMES, WAITS, max_size=2),
}


@st.composite
def requests(draw):
    """Any request with any values that have its fields' types."""
    kind = draw(st.sampled_from([kind for kind in m.REQUESTS.values() if kind is not m.StartEval]))
    hints = get_type_hints(kind)
    return kind(**{f.name: draw(BY_TYPE[hints[f.name]]) for f in fields(kind)})


def busy_desk(folder: str) -> Desk:
    """Work in every state, on one engine that holds version 0."""
    desk = Desk(Path(folder) / "ledger.db")
    desk.register()
    desk.publish()
    first, second, *_ = desk.lease(4)
    desk.report(first, [0, 0], "cut")
    desk.report(second, [0])
    desk.ask(m.LeaseGrading(holder="j", count=1, wait_s=0.0))
    return desk


def check(desk: Desk) -> None:
    """The ledger is what its journal says, its account is right, and it still works."""
    replayed = Ledger.replay(desk.rules, desk.journal.read())
    assert repr(comparable(replayed.state)) == repr(comparable(desk.ledger.state))
    counts = desk.ledger.summary()
    training = [index for index in (*desk.ledger.state.groups, *desk.ledger.state.taken) if index >= 0]
    segments = [c.segment for index in training for c in desk.journal.group(index) if isinstance(c, Extended)]
    recorded = sum(len(segment.tokens) for segment in segments)
    assert counts["trained_tokens"] + counts["waiting_tokens"] == recorded
    assert desk.ask(m.Status(), "checker")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a msgpack message"),
        (b"\xc1\xff", "not a msgpack message"),
        (b"\x91" * 5000, "not a msgpack message"),
        (pack([1, 2]), "expected a Envelope"),
        (pack({"client": "c", "id": 1, "op": "Delete", "fields": {}}), "unknown request 'Delete'"),
        (pack({"client": "c", "id": 1, "op": "Take", "fields": {"step": "0", "wait_s": 0.0}}), "Take.step: expected int"),
        (pack({"client": "c", "id": 1, "op": "Take", "fields": {"step": 0}}), "field 'wait_s' of Take is missing"),
        (b"x" * (LONGEST_MESSAGE_BYTES + 1), "is longer than"),
    ],
)
def test_malformed_message_is_answered_and_changes_nothing(ready, data, message):
    before = repr(comparable(ready.ledger.state))
    ready.server.receive(b"route", data, ready.now)
    ((_, answer),) = ready.server.settle(ready.now)
    assert unpack(m.Answer, answer).error == "malformed" and message in unpack(m.Answer, answer).value
    assert repr(comparable(ready.ledger.state)) == before


def test_request_out_of_order_is_refused_with_the_reason(ready):
    assert ready.refusal(m.Advance(version=1, engines=("e0@1",))) == (
        "refused",
        "version 1 cannot follow: the batch of step 0 was never taken",
    )
    assert ready.refusal(m.RefuseGroup(group=0, kind="old", reason="x"))[0] == "refused"


@settings(deadline=None, max_examples=40)
@given(messages=st.lists(st.binary(max_size=200), min_size=1, max_size=20))
def test_bytes_of_any_kind_are_answered_and_change_nothing(messages):
    with tempfile.TemporaryDirectory() as folder:
        desk = busy_desk(folder)
        before = repr(comparable(desk.ledger.state))
        for data in messages:
            desk.server.receive(b"route", data, desk.now)
        assert len(desk.server.settle(desk.now)) == len(messages)
        assert repr(comparable(desk.ledger.state)) == before
        check(desk)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_valid_messages_that_were_tampered_with_corrupt_nothing(data):
    with tempfile.TemporaryDirectory() as folder:
        desk = busy_desk(folder)
        for number, request in enumerate(data.draw(st.lists(requests(), min_size=1, max_size=8))):
            envelope = {"client": "c", "id": number, "op": type(request).__name__, "fields": request}
            message = bytearray(pack(envelope))
            for _ in range(data.draw(st.integers(1, 3))):
                message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
            cut = data.draw(st.sampled_from([None, None, len(message) // 2]))
            desk.server.receive(b"route", bytes(message[:cut]), desk.now)
            desk.server.settle(desk.now)
        check(desk)


@settings(deadline=None, max_examples=100)
@given(sent=st.lists(requests(), min_size=1, max_size=15), replayed=st.randoms(use_true_random=False))
def test_requests_of_any_values_in_any_order_also_replayed_corrupt_nothing(sent, replayed):
    with tempfile.TemporaryDirectory() as folder:
        desk = busy_desk(folder)
        for request in [*sent, *replayed.sample(sent, len(sent))]:
            desk.send(request)
            desk.answers()
        check(desk)
