"""Which part of a completion is its final answer."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward.kinds.final_answer import FORMATS, boxed, final_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{1} is wrong and \boxed{\frac{1}{2}} is right", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\text{a \} b}}", r"\text{a \} b}"),
        (r"\boxed{1 + \boxed{5}}", "5"),
        (r"\fbox{7}", "7"),
        (r"\boxed 7.", "7"),
        (r"The answer is 3. \boxed{4}", "4"),
        ("The answer is 5, because 3+2=5 and 7 is no answer.", "5"),
        ("The final answer is: **42**. I hope it is correct.", "42"),
        ("The answer is $\\frac{3}{4}$ of 12.", r"\frac{3}{4}"),
        ("The answer is $18 per day.", "$18 per day"),
        ("Answer:\n 12 apples\n", "12 apples"),
        ("She sells 9 * 2 = 18.\n#### 1,234\n", "1,234"),
        ("first the answer is 1. No, the answer is 2.", "2"),
        ("so she has 10-5=5 apples left.", "5"),
        ("it falls to -3.5 degrees", "-3.5"),
        ("about 3/4 of them", "3/4"),
        ("it is 1,000,000.", "1,000,000"),
        ("I do not know.", ""),
        ("", ""),
    ],
)
def test_answer_is_the_last_box_or_what_follows_the_last_cue_or_the_last_number(text: str, answer: str) -> None:
    assert final_answer(text, "auto") == answer


@pytest.mark.parametrize("text", [r"the answer is 5", r"\boxed{5", "boxed{5}", r"\boxed"])
def test_without_a_closed_box_there_is_no_boxed_answer(text: str) -> None:
    assert final_answer(text, "boxed") == ""


@pytest.mark.parametrize(("text", "number"), [(r"\boxed{3} or 4", "4"), ("#### 3\n(2 of 9)", "9"), ("none", "")])
def test_in_the_format_number_only_the_last_number_counts(text: str, number: str) -> None:
    assert final_answer(text, "number") == number


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("Answer: (B) dog", "B"),
        ("A cat is an animal.\nThe answer is C.", "C"),
        (r"\boxed{\text{D}}", "D"),
        (r"\boxed{D) 12}", "D"),
        ("A: no. B: no.\n\n**E**", "E"),
        ("Option (A) fails, so it must be (C), as shown.", "C"),
        ("A dog barks", ""),
        ("I do not know", ""),
        ("the answer is Dog", ""),
    ],
)
def test_an_option_letter_stands_alone(text: str, letter: str) -> None:
    assert final_answer(text, "letter") == letter


@given(st.text(alphabet="x {}\\$.,0123\n", max_size=40).filter(lambda t: t.count("{") == t.count("}") == 0 and "\\" not in t))
def test_whatever_stands_before_the_last_box_changes_nothing(before: str) -> None:
    assert boxed(f"{before} \\boxed{{{before}}} {before} \\boxed{{a{{b}}c}} {before}") == "a{b}c"


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{" * 150_000,
        "\\boxed{5} " * 100_000,
        "answer is " * 100_000,
        "1" * 1_000_000,
        "1," * 500_000,
        "$" * 1_000_000,
        "{" * 1_000_000,
        "(A" * 500_000,
        "\\frac{1}{" * 100_000,
        "111,111," * 100_000,
        "\n" * 1_000_000,
        "answer  *  " * 90_000,
    ],
    ids=lambda text: text[:12],
)
def test_time_is_linear_in_the_length_of_the_text(form: str, text: str) -> None:
    began_s = time.process_time()
    final_answer(text, form)
    assert time.process_time() - began_s < 2.0
