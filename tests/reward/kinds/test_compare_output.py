"""When printed output counts as the expected one."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward.kinds.compare_output import same_output


@pytest.mark.parametrize(
    ("got", "expected"), [("7", "7\n"), ("7 \r\n\r\n", "7"), ("a\n\n\n", "a"), ("", "\n"), ("a\tb", "a\tb  ")]
)
def test_line_ends_and_trailing_blanks_do_not_matter(got: str, expected: str) -> None:
    assert same_output(got, expected)


@pytest.mark.parametrize(
    ("got", "expected"), [("7", "8"), ("7\n8", "7 8"), (" 7", "7"), ("a\n\nb", "a\nb"), ("7.0", "7"), ("Yes", "YES"), ("", "7")]
)
def test_everything_else_matters(got: str, expected: str) -> None:
    assert not same_output(got, expected)


@pytest.mark.parametrize(
    ("got", "expected", "equal"),
    [
        ("0.3333333", "0.333333333", True),
        ("x 1", "x 1.0", True),
        ("x 1.0", "x 1", False),
        ("1e3", "1000", False),
        ("1000", "1e3", True),
        ("1000000000 0.5", "1000000007 0.5", False),
        ("1000000000.0 0.5", "1000000007.0 0.5", True),
        ("1_0", "10", False),
        ("nan", "1.0", False),
        ("inf", "1e999", False),
        ("1.1", "1.0", False),
        ("1 2", "1", False),
        ("٧", "7", False),
    ],
)
def test_a_tolerance_is_for_decimal_numbers(got: str, expected: str, equal: bool) -> None:
    assert same_output(got, expected, 1e-6) is equal


@pytest.mark.parametrize(("got", "tolerance"), [("1e300", 0.9), ("8", 0.5), ("-1e9", 0.999)])
def test_a_huge_number_is_not_near_because_it_is_huge(got: str, tolerance: float) -> None:
    assert not same_output(got, "4.0", tolerance)


@pytest.mark.parametrize("number", ["1", "1.", ".1", "1e1"])
def test_the_time_of_a_comparison_grows_with_the_length_and_no_faster(number: str) -> None:
    digits = number.replace("1", "1" * (1 << 20))
    began_s = time.perf_counter()
    assert not same_output(digits + "x", "1.5", 1e-6)
    assert time.perf_counter() - began_s < 5.0  # a quadratic comparison takes an hour


@given(st.integers(), st.integers(), st.floats(0, 1))
def test_an_expected_integer_is_exact_whatever_stands_beside_it(got: int, expected: int, beside: float) -> None:
    assert same_output(f"{got} {beside}", f"{expected} {beside}", 1e-6) is (got == expected)


@given(st.text(), st.sampled_from([None, 1e-6]))
def test_output_is_the_same_as_itself(text: str, tolerance: float | None) -> None:
    assert same_output(text, text, tolerance)


def test_a_tolerance_applies_to_numbers_between_brackets_and_commas() -> None:
    assert same_output("[0.3333333, (x=0.5)]", "[0.333333333, (x=0.5000001)]", 1e-6)
    assert not same_output("[0.4, (x=0.5)]", "[0.333333333, (x=0.5)]", 1e-6)
    assert not same_output("[1000000001]", "[1000000002]", 1e-6)
    assert not same_output("[0.5]", "(0.5000001)", 1e-6)
