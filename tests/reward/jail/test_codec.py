"""The law of the codec: what goes in comes out, in value and in type."""

import json
import math
import time
from collections import Counter, OrderedDict, namedtuple
from enum import IntEnum

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward.jail.codec import (
    CodecError,
    decode,
    dumps,
    encode,
    equals,
    is_close,
    is_near,
    loads,
    matches,
    same,
    shorten,
    truth,
)

HASHABLE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers(),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=6,
)
PLAIN = st.recursive(
    HASHABLE,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner)
        | st.dictionaries(HASHABLE, inner, max_size=3)
        | st.sets(HASHABLE, max_size=3)
    ),
    max_leaves=12,
)


@given(PLAIN)
def test_plain_data_survives_the_wire_with_its_types(value: object) -> None:
    assert same(loads(dumps(value)), value)


@given(PLAIN)
def test_the_wire_is_strict_json(value: object) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    json.loads(dumps(value), parse_constant=refuse)


@given(PLAIN, PLAIN)
def test_sameness_is_symmetric(left: object, right: object) -> None:
    assert same(left, right) == same(right, left)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (1, True),
        (1, 1.0),
        (0, False),
        ((1,), [1]),
        ({1}, frozenset({1})),
        ({1}, {True}),
        ({1: 2}, {1.0: 2}),
        ("a", b"a"),
        (None, 0),
    ],
)
def test_values_that_only_compare_equal_are_not_the_same(left: object, right: object) -> None:
    assert not same(left, right)
    assert not same([left], [right])


def test_nan_is_nan() -> None:
    assert same(math.nan, math.nan)
    assert same({"x": [math.nan]}, {"x": [math.nan]})


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        *((1.0, 1.0000001, True), (1, 1.0, True), (1.0, 1, True), (1.0, 1.1, False), (True, 1.0, False)),
        *((1000000000, 1000000007, False), (1000000000.0, 1000000007, False), (1000000000, 1000000007.0, True)),
    ],
)
def test_a_tolerance_holds_for_expected_floats_only(left: object, right: object, equal: bool) -> None:
    assert same([left], [right], 1e-6) is equal


def test_an_int_too_big_for_a_float_is_compared_without_one() -> None:
    assert same(10**400, 10**400, 1e-6)
    assert not same(10**400, 1.0, 1e-6)


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


COLLIDING = [i * (2**61 - 1) for i in range(1, 30_000)]  # all with hash 0


@pytest.mark.timeout(5)
@pytest.mark.parametrize("tag", ["__set__", "__frozenset__", "__dict__"])
def test_members_with_one_hash_cost_the_judge_little(tag: str) -> None:
    wire = {tag: [[number, 1] for number in COLLIDING] if tag == "__dict__" else COLLIDING}
    expected: object = {"__set__": {1}, "__frozenset__": frozenset({1}), "__dict__": {1: 1}}[tag]
    assert not matches(wire, expected)
    assert not matches(wire, 5)
    assert not matches([wire], [{1: 2}])


@pytest.mark.timeout(5)
def test_a_complex_number_is_two_real_ones_and_no_set_is_built_of_its_parts() -> None:
    for wire in ({"__complex__": [{"__set__": COLLIDING}]}, {"__complex__": [{"__dict__": [[n, n] for n in COLLIDING]}, 1]}):
        for judge in (matches, equals):
            with pytest.raises(CodecError):
                judge(wire, 5)
        with pytest.raises(CodecError):
            truth(wire)
        with pytest.raises(CodecError):
            is_near(wire, 5, 1)
    assert decode(encode(complex("nan-infj"))).imag == float("-inf")


@pytest.mark.timeout(5)
def test_a_member_of_a_set_costs_the_judge_little_however_long_it_is() -> None:
    began_s = time.process_time()
    assert not matches({"__set__": [[0] * 500_000]}, {1})
    assert time.process_time() - began_s < 1.0


@given(st.floats(allow_nan=False), st.floats(allow_nan=False), st.floats(1e-12, 0.99))
def test_closeness_is_relative_to_the_expected_number_alone(got: float, expected: float, tolerance: float) -> None:
    bound = tolerance * max(1, abs(expected))
    near = got == expected or (math.isfinite(expected) and abs(got - expected) <= bound)
    assert is_close(got, expected, tolerance) is near


@pytest.mark.parametrize(
    "wire",
    [
        *(None, 5, "x", [], {}, {"__set__": 5}, {"__set__": [1, 1]}, {"__dict__": 3}, {"__dict__": [[1]]}, {"__any__": [1]}),
        *({"__set__": [[1]]}, {"__tuple__": {}}, {"__int__": "0x1"}, {"__dict__": [[1, 2], [1, 2]]}, {"a": 1, "__set__": [1]}),
    ],
)
@pytest.mark.parametrize("expected", [{1, 2}, frozenset({1, 2}), {1: 2, 3: 4}, {"a": 1}, (1, 2), [1, 2], "y", 7, None.__class__])
def test_forged_wire_matches_nothing(wire: object, expected: object) -> None:
    assert not matches(wire, expected)
