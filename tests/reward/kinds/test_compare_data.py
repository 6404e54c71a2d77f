"""What counts as equal, and what a forged value can do: nothing."""

import math
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward.jail.codec import CodecError, decode, encode
from reward.kinds.compare_data import equals, is_close, is_near, matches, truth
from tests.reward.jail.plain_data import PLAIN, same


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


EASILY_EQUAL = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from([0.0, -0.0, 1.0, 2.5, 1e300])
    | st.sampled_from(["", "a", b"a"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.tuples(inner, inner)
        | st.dictionaries(st.integers(0, 2) | st.booleans() | st.sampled_from([1.0, "a"]), inner, max_size=2)
        | st.sets(st.integers(0, 2) | st.sampled_from([True, 1.0, "a", frozenset({1}), frozenset({1.0})]), max_size=2)
    ),
    max_leaves=5,
)


@given(EASILY_EQUAL, EASILY_EQUAL)
def test_equality_is_that_of_python(left: Any, right: Any) -> None:
    assert equals(encode(left), right) is (left == right)
    assert equals(encode(left), left)


@given(EASILY_EQUAL)
def test_truth_is_that_of_python(value: Any) -> None:
    assert truth(encode(value)) is bool(value)


@pytest.mark.parametrize(
    ("wire", "expected"),
    [
        ({"__set__": [1, 1]}, {1, 2}),
        ({"__dict__": [[1]]}, {1: 2}),
        ({"__any__": 1}, 1),
        ([1], (1,)),
        ({"__int__": "0x5"}, 6),
        (None, 0),
    ],
)
def test_forged_results_equal_nothing(wire: Any, expected: Any) -> None:
    assert not equals(wire, expected)


@pytest.mark.parametrize("number", [10**400, float("nan"), float("inf"), "x", None, [1.0]])
def test_what_is_no_number_is_near_to_nothing(number: Any) -> None:
    assert not is_near(encode(number), 1.5, 1e-6)
