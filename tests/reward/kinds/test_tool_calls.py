"""Tool calls in the text of a model: those that can be read, and what is said of the others."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward.kinds.tool_calls import MOST_CALLS, ToolCall, read_calls

VALUES = st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3), max_leaves=5)


@given(st.lists(st.tuples(st.text(min_size=1), st.dictionaries(st.text(), VALUES, max_size=3)), max_size=4))
def test_calls_are_read_as_they_were_written_whatever_stands_between_them(calls: list[tuple[str, dict[str, object]]]) -> None:
    written = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    text = "I look it up." + "\nand ".join(f"<tool_call>\n{one}\n</tool_call>" for one in written)
    assert read_calls(text) == [ToolCall(name=name, arguments=arguments) for name, arguments in calls]


@given(st.text())
def test_any_text_is_read_without_an_error(text: str) -> None:
    assert read_calls(text) == [] or "<tool_call>" in text
    assert len(read_calls(f"<tool_call>{text}")) >= 1


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("print(1)", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("9" * 5000, "no JSON"),
        ('{"name": "python"}', "arguments"),
        ('{"name": "python", "arguments": "print(1)"}', "arguments"),
        ("[]", "arguments"),
    ],
)
def test_call_that_cannot_be_read_says_why(written: str, said: str) -> None:
    (call,) = read_calls(f"<tool_call>{written}</tool_call>")
    assert said in call.error and not call.name


def test_call_at_the_end_needs_no_closing_tag_and_there_is_a_limit() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}'
    assert read_calls(call) == [ToolCall(name="f")]
    assert len(read_calls(f"{call}</tool_call>" * 1000)) == MOST_CALLS
