"""Numbers as people write them, read exactly."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward.kinds.numerals import Numeral, read_numeral

DIGITS = st.integers(-(10**12), 10**12)


def read(text: str) -> Numeral:
    numeral = read_numeral(text)
    assert numeral is not None, text
    return numeral


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,234.50", "1234.5"),
        (r"\$1{,}000", "1000"),
        ("$18", "18"),
        (".5", "0.5"),
        ("007", "7"),
        ("+3", "3"),
        ("3.", "3"),
        (r"-\frac{1}{2}", "-1/2"),
        (r"\frac{-1}{2}", "-1/2"),
        (r"\dfrac34", "3/4"),
        ("3/4", "3/4"),
        ("\u22123", "-3"),
        ("2 1/2", "5/2"),
        (r"2\frac{1}{2}", "5/2"),
        (r"-1\frac12", "-3/2"),
        ("1.5/2", "3/4"),
        ("12 apples", "12"),
        (r"5\text{ cm}^2", "5"),
        (r"90^\circ", "90"),
        (r"45^{\circ}", "45"),
        ("60\u00b0", "60"),
        (r"5\mbox{ inches}", "5"),
        ("16 square feet", "16"),
        (r"10\,000", "10000"),
        ("\u20ac5", "5"),
        ("**42**", "42"),
    ],
)
def test_what_does_not_change_a_number_is_dropped(text: str, value: str) -> None:
    assert read(text) == Numeral(Fraction(value), percent=False)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "2x",
        "2 pi",
        "5 million",
        "3 or 4",
        "1e9",
        "1/0",
        r"\frac{1}{0}",
        "1,00",
        "1 2",
        "\u0663",
        r"2\pi",
        "5 m",
        "one",
        "(3)",
        "3,4",
        r"\text{5}",
        "9" * 300,
        "nan",
        "inf",
        "1_000",
        "0x10",
        "--1",
        "1.2.3",
        r"\sqrt{4}",
        "5 squared",
    ],
)
def test_anything_else_is_not_read_as_a_number(text: str) -> None:
    assert read_numeral(text) is None


@given(DIGITS, st.integers(1, 10**6))
def test_a_fraction_equals_itself_in_every_notation(top: int, bottom: int) -> None:
    sign, size = "-" * (top < 0), abs(top)
    forms = [f"{top}/{bottom}", f"\\frac{{{top}}}{{{bottom}}}", f"{sign}\\dfrac{{{size}}}{{{bottom}}}"]
    forms.append(f"{sign}{size // bottom}\\frac{{{size % bottom}}}{{{bottom}}}")
    assert {read(form).value for form in forms} == {Fraction(top, bottom)}


@given(DIGITS, st.integers(0, 6))
def test_a_decimal_equals_its_fraction_and_commas_and_zeros_do_not_matter(digits: int, places: int) -> None:
    decimal = f"{digits / 10**places:,.{places}f}" if abs(digits) < 10**14 else str(digits)
    exact = f"{'-' * (digits < 0)}{abs(digits) // 10**places:,}" + (f".{abs(digits) % 10**places:0{places}d}" if places else "")
    fraction = read(f"\\frac{{{digits}}}{{{10**places}}}")
    assert read(exact).equals(fraction) and read(exact.replace(",", "")).equals(fraction)
    assert read(exact + ("0" if places else "")).equals(fraction) and read(f"\\${exact}").equals(fraction) and decimal


@given(DIGITS, DIGITS)
def test_two_numbers_are_equal_exactly_if_they_are_the_same(a: int, b: int) -> None:
    assert read(str(a)).equals(read(str(b))) == (a == b)


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        ("50%", "50", True),
        ("50%", "0.5", True),
        ("50\\%", "50 percent", True),
        ("50%", "5000%", False),
        ("50%", "0.5%", False),
        ("50%", "5", False),
    ],
)
def test_a_percentage_equals_its_number_and_its_share_and_no_other_percentage(a: str, b: str, equal: bool) -> None:
    assert read(a).equals(read(b)) == read(b).equals(read(a)) == equal


def test_numbers_within_the_tolerance_are_equal_where_a_task_has_one() -> None:
    assert not read("3.1416").equals(read("3.14159"))
    assert read("3.1416").equals(read("3.14159"), tolerance=1e-4)
    assert not read("3.15").equals(read("3.14159"), tolerance=1e-4)
