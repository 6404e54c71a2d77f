"""What is packed comes back; whatever else comes is refused with the field's name."""

from contextlib import suppress
from dataclasses import replace

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rollout.ledger.changes import CHANGES, Durable, Extended, Graded, Published, Totals
from rollout.ledger.records import Finish, Position, Prompt, Segment, Verdict, Waiting
from rollout.ledger.wire import WireError, decode, pack, unpack, unpack_plain
from rollout.queue import messages as m
from tests.rollout.builders import prompt, segment

LOGPROBS = st.floats(-100, 0, width=32)


@st.composite
def segments(draw):
    n = draw(st.integers(0, 20))
    return Segment(
        tokens=draw(arrays(np.int32, n)),
        logprobs=draw(arrays(np.float32, n, elements=LOGPROBS)),
        versions=np.sort(draw(arrays(np.int32, n, elements=st.integers(0, 1000)))),
        finish=draw(st.sampled_from(Finish)),
        engine=draw(st.text(max_size=5)),
    )


@settings(deadline=None)
@given(segments())
def test_segment_comes_back_bit_for_bit(sent):
    got = unpack(Segment, pack(sent))
    for name in ("tokens", "logprobs", "versions"):
        assert getattr(got, name).tobytes() == getattr(sent, name).tobytes()
        assert getattr(got, name).dtype == getattr(sent, name).dtype
    assert (got.finish, got.engine) == (sent.finish, sent.engine)
    assert isinstance(got.finish, Finish)


@pytest.mark.parametrize(
    "sent",
    [
        m.TakeAnswer(groups=None, waiting=Waiting(table="t", fleet_changed=True)),
        m.Heartbeat(holder="w", role="worker", held=(Position(group=-1, trajectory=0, offset=3),)),
        Durable(totals=Totals(version=3, engines=("a@1",), dropped_groups={"no_signal": 2}), forgotten=(1, -2)),
        Published(version=1, engines=()),
        Verdict(reward=0.5, parts={"tests": 0.5}, reason="1 of 2"),
    ],
)
def test_record_comes_back_equal(sent):
    assert unpack(type(sent), pack(sent)) == sent


def test_every_request_answer_and_change_is_made_of_types_that_travel():
    for kind in (*m.REQUESTS.values(), *(k.answer for k in m.REQUESTS.values()), *CHANGES.values()):
        with pytest.raises(WireError, match="expected"):
            decode(kind, "no record")


def test_opaque_task_survives_with_any_keys():
    task = {"kind": "calls", "tests": [{"~": None, "x": [1, 2.5, True, {"a": "ä"}]}]}
    sent = prompt()
    got = unpack(type(sent), pack({"id": "a", "tokens": sent.tokens, "task": task, "prefill": "", "metadata": {}}))
    assert got.task == task


WHOLE_NUMBERS = st.integers() | st.integers(62, 20_000).flatmap(lambda bits: st.integers(-(2**bits), 2**bits))
ANY_TEXT = st.text(st.characters())  # lone surrogates too
PLAIN = st.recursive(
    st.none() | st.booleans() | WHOLE_NUMBERS | st.floats(allow_nan=False) | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(ANY_TEXT, inner, max_size=4),
    max_leaves=10,
)


@settings(deadline=None)
@given(WHOLE_NUMBERS)
def test_any_integer_that_python_has_comes_back(number):
    got = unpack_plain(pack([number, {"a": number}]))
    assert got == [number, {"a": number}] and type(got[0]) is int


@settings(deadline=None)
@given(task=st.dictionaries(ANY_TEXT, PLAIN, max_size=4), prefill=ANY_TEXT)
def test_any_plain_data_comes_back_in_a_prompt(task, prefill):
    sent = replace(prompt(), task=task, metadata=task, prefill=prefill)
    got = unpack(Prompt, pack(sent))
    assert (got.task, got.metadata, got.prefill) == (task, task, prefill)


@settings(deadline=None)
@given(reason=ANY_TEXT, parts=st.dictionaries(ANY_TEXT, st.floats(allow_nan=False), max_size=3))
def test_any_text_comes_back_in_a_verdict(reason, parts):
    sent = Graded(3, 1, Verdict(reward=0.5, parts=parts, reason=reason))
    assert unpack(Graded, pack(sent)) == sent


def plain_segment() -> dict:
    return unpack_plain(pack(segment([0, 1])))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": 1}, "unknown field 'extra'"),
        ({"tokens": [1, 2]}, r"Segment.tokens: expected an array of int32, got \[1, 2\]"),
        ({"tokens": np.zeros(2, np.float32)}, "expected an array of int32"),
        ({"tokens": np.zeros(3, np.int32)}, "lengths differ"),
        ({"versions": np.array([1, 0], np.int32)}, "must not decrease"),
        ({"logprobs": np.array([0, np.nan], np.float32)}, "not finite"),
        ({"finish": "ended"}, "expected one of stop, length, cut"),
        ({"engine": 5}, "Segment.engine: expected str, got 5"),
    ],
)
def test_wrong_field_is_refused_by_name(change, message):
    with pytest.raises(WireError, match=message):
        unpack(Segment, pack(plain_segment() | change))


def test_missing_field_is_refused_by_name():
    plain = plain_segment()
    del plain["engine"]
    with pytest.raises(WireError, match="field 'engine' of Segment is missing"):
        unpack(Segment, pack(plain))


def test_true_is_not_a_number():
    with pytest.raises(WireError, match=r"Take\.step: expected int, got True"):
        unpack(m.Take, pack({"step": True, "wait_s": 0.0}))
    with pytest.raises(WireError, match="expected int, got True"):
        unpack(Position, pack([True, 0, 0, 0]))


@given(
    runs=st.lists(st.tuples(st.integers(-5, 5), st.integers(1, 60)), min_size=1, max_size=12), kind=st.sampled_from(["i4", "?"])
)
def test_array_of_few_runs_comes_back_equal_and_short(runs, kind):
    array = np.concatenate([np.full(n, value, kind) for value, n in runs])
    data = pack(array)
    assert np.array_equal(unpack_plain(data), array) and unpack_plain(data).dtype == array.dtype
    if len(array) >= 64 and len(runs) <= 4:
        assert len(data) < 64


@pytest.mark.parametrize("runs", [[], [1], [0, 1], [2, 1, 0, 0], [1 << 30, 1], [-1, 1], [5] * 40])
def test_runs_that_make_no_array_are_refused(runs):
    with pytest.raises(WireError, match="an array"):
        unpack_plain(msgpack.packb(msgpack.ExtType(17, np.array(runs, "<i4").tobytes())))


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_random_bytes_are_a_wire_error_and_nothing_else(data):
    with pytest.raises(WireError):
        unpack(Segment, data)


@settings(deadline=None)
@given(cut=st.integers(0, 60), flipped=st.integers(0, 60))
def test_damaged_message_is_never_anything_but_a_record_or_a_wire_error(cut, flipped):
    data = bytearray(pack(Extended(group=1, trajectory=0, segment=segment([0, 1]))))
    data[flipped % len(data)] ^= 0x41
    with suppress(WireError):
        unpack(Extended, bytes(data[: len(data) - cut]))


@pytest.mark.parametrize("code", [0, 2, 5])
def test_unknown_extension_is_refused(code):
    with pytest.raises(WireError, match="unknown extension"):
        unpack_plain(msgpack.packb({"a": msgpack.ExtType(code, b"xyz")}))


@pytest.mark.parametrize("value", [np.zeros((2, 2), np.int32), np.zeros(2, np.int64), {1, 2}, object()])
def test_value_that_cannot_be_sent_is_refused(value):
    with pytest.raises(WireError):
        pack({"a": value})


@pytest.mark.parametrize(
    "array",
    [
        np.arange(40, dtype=np.int32),
        np.linspace(-1, 0, 40, dtype=np.float32),
        np.full(40, 3, np.int32),
        np.repeat(np.array([1, 2], np.int32), 30),
        np.arange(40, dtype=np.int32) % 7 > 3,
        np.ones(40, np.bool_),
        np.full(5, 3, np.int32),
    ],
)
def test_an_array_that_came_goes_on_as_the_same_bytes_and_a_part_of_it_as_the_part(array):
    came = pack(array)
    read = unpack_plain(came)
    assert pack(read) == came
    for part in (read[1:], read[::-1], read[::2]):
        assert unpack_plain(pack(part)).tolist() == part.tolist()
