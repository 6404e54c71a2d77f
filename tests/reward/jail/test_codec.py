"""The law of the codec: what goes in comes out, in value and in type."""

import json
from collections import Counter, OrderedDict, namedtuple
from enum import IntEnum

import numpy as np
import pytest
from hypothesis import given

from reward.jail.codec import CodecError, decode, dumps, encode, loads, shorten
from tests.reward.jail.plain_data import PLAIN, same


@given(PLAIN)
def test_plain_data_survives_the_wire_with_its_types(value: object) -> None:
    assert same(loads(dumps(value)), value)


@given(PLAIN)
def test_the_wire_is_strict_json(value: object) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    json.loads(dumps(value), parse_constant=refuse)


class Colour(IntEnum):
    RED = 3


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Colour.RED, 3),
        (Point(1, 2), (1, 2)),
        (Counter("aab"), {"a": 2, "b": 1}),
        (OrderedDict(x=1), {"x": 1}),
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
    ],
)
def test_a_subclass_crosses_by_its_value(value: object, plain: object) -> None:
    assert same(decode(encode(value)), plain)


class AlwaysEqual(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


def test_an_object_that_equals_everything_crosses_as_the_number_it_is() -> None:
    assert not same(decode(encode(AlwaysEqual(4))), 5)


@pytest.mark.parametrize("value", [object(), len, iter([]), np.zeros(2), {"x": object()}, int])
def test_what_is_not_plain_data_is_refused(value: object) -> None:
    with pytest.raises(CodecError):
        dumps(value)


@pytest.mark.parametrize(
    "wire",
    [
        b"",
        b"\xff",
        b"{",
        b"[" * 100_000,
        b"[" * 500 + b"]" * 500,
        b'{"__tuple__": 3}',
        b'{"__set__": [[1]]}',
        b'{"__dict__": [[1]]}',
        b'{"__bytes__": "zz"}',
        b'{"__int__": "x"}',
        b'{"__complex__": [1, 2, 3]}',
        b'{"__dict__": [[[1], 2]]}',
    ],
)
def test_hostile_bytes_are_refused_with_one_kind_of_error(wire: bytes) -> None:
    with pytest.raises(CodecError):
        loads(wire)


def test_a_cycle_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(CodecError, match="deep"):
        dumps(loop)


def test_a_dict_that_looks_like_a_tag_stays_a_dict() -> None:
    assert loads(dumps({"__tuple__": [1]})) == {"__tuple__": [1]}


def test_huge_values_are_shortened_for_messages() -> None:
    assert len(shorten(encode(10**100_000))) <= 80
