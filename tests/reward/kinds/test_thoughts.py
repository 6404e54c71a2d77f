"""Reasoning is cut before an answer is graded, by the tags of the usual model families or by the tags that a rule names."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward.kinds.extract import extract
from reward.kinds.thoughts import KNOWN, Tags, answer_after, read_tags

PLAIN = st.text("abc \n<>/", max_size=20)


@pytest.mark.parametrize("tags", KNOWN, ids=lambda tags: tags.opening)
def test_reasoning_of_every_known_family_is_cut(tags: Tags) -> None:
    assert answer_after(f"\n{tags.opening}\nIs it 41?\n{tags.closing}42", KNOWN) == "42"
    assert answer_after(f"Is it 41?\n{tags.closing}42", KNOWN) == "42"
    assert extract(f"{tags.opening}\n```\nx = 1\n```\n{tags.closing}\n```\nx = 2\n```").code == "x = 2\n"


@pytest.mark.parametrize("tags", KNOWN, ids=lambda tags: tags.opening)
def test_reasoning_that_never_closes_leaves_no_answer(tags: Tags) -> None:
    assert answer_after(f"{tags.opening} It is 42", KNOWN) is None
    assert tags.closing in extract(f"{tags.opening}\n```\nx = 1\n```").reason


@given(PLAIN, PLAIN)
def test_an_answer_is_what_follows_the_reasoning(thoughts: str, answer: str) -> None:
    assert answer_after(f"<think>{thoughts}</think>{answer}", KNOWN) == answer


@given(PLAIN)
def test_a_text_without_tags_is_all_answer(text: str) -> None:
    assert answer_after(text, KNOWN) == text


def test_a_rule_names_other_tags_or_none() -> None:
    text = "<plan>41</plan>42"
    assert answer_after(text, read_tags("auto")) == text
    assert answer_after(text, read_tags("<plan> </plan>")) == "42"
    assert answer_after("<think>41</think>42", read_tags("none")) == "<think>41</think>42"


@pytest.mark.parametrize("rule", ["", "thinking", "<a> <a>", "<a> <b> <c>"])
def test_a_rule_that_names_no_two_tags_is_refused(rule: str) -> None:
    with pytest.raises(ValueError, match="must be auto, none, or two different tags"):
        read_tags(rule)


def test_tags_in_the_middle_of_an_answer_are_part_of_it() -> None:
    assert answer_after("Use <think> and </think> as tags", KNOWN) == "Use <think> and </think> as tags"
