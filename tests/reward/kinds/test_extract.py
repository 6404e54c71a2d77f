"""Code out of completions, the way people expect."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward.kinds.extract import blocks, extract


@pytest.mark.parametrize("tag", ["", "python", "Python", "py", "python3", "{.python}", "python title=x"])
def test_a_block_is_found_whatever_its_python_tag(tag: str) -> None:
    assert extract(f"Here:\n```{tag}\nx = 1\n```\nDone.").code == "x = 1\n"


def test_the_last_block_wins() -> None:
    assert extract("```python\na = 1\n```\nBetter:\n```python\na = 2\n```").code == "a = 2\n"


def test_a_python_block_wins_over_a_later_example_of_its_output() -> None:
    assert extract("```python\nprint(3)\n```\nOutput:\n```\n3\n```").code == "print(3)\n"


def test_a_block_without_an_end_reaches_to_the_end() -> None:
    assert extract("```python\nx = 1\ny = 2").code == "x = 1\ny = 2\n"


def test_a_block_in_a_list_is_outdented() -> None:
    assert extract("1. so\n   ```python\n   def f():\n       return 1\n   ```").code == "def f():\n    return 1\n"


def test_a_longer_fence_holds_a_shorter_one() -> None:
    assert extract('````python\ns = """\n```\n"""\n````').code == 's = """\n```\n"""\n'


def test_tildes_are_a_fence() -> None:
    assert extract("~~~py\nx = 1\n~~~").code == "x = 1\n"


def test_thoughts_do_not_count() -> None:
    assert extract("<think>```python\nx = 0\n```</think>\nno code here").reason == "no code block"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        ("  \n", "empty"),
        ("x = 1", "no code block"),
        ("```bash\nls\n```", "bash"),
        ("```python\n```", "no code"),
        ("```python\nx = '\0'\n```", "null"),
        ("```python\n" + "x" * (1 << 20) + "\n```", "longer"),
    ],
)
def test_no_code_is_a_reason(text: str, reason: str) -> None:
    found = extract(text)
    assert not found.code
    assert reason in found.reason


@pytest.mark.parametrize(
    ("prefill", "completion", "code"),
    [
        ("def f(x):", "\n    return x", "def f(x):\n    return x"),
        ("def f(x):\n", "    return x\n```\nThis returns x.", "def f(x):\n    return x\n"),
        ("def f(x):\n", "    return x\n\n```python\nprint(f(1))\n```", "def f(x):\n    return x\n\n"),
        ("Sure.\n```python\ndef f(x):", "\n    return x\n```\nDone.\n```python\nf(1)\n```", "def f(x):\n    return x\n"),
        ("Sure.\n```python\ndef f(x):", "\n    return x", "def f(x):\n    return x\n"),
        ("def f(x):\n", "```python\ndef f(x):\n    return x\n```", "def f(x):\n    return x\n"),
    ],
)
def test_a_completion_goes_on_from_its_prefill(prefill: str, completion: str, code: str) -> None:
    assert extract(completion, prefill=prefill).code == code


@given(st.text(alphabet="`~ \n\tpython{}a\0<>/thik", max_size=200), st.sampled_from(["", "def f(x):\n", "```python\ndef f():\n"]))
def test_any_text_gives_code_or_a_reason(text: str, prefill: str) -> None:
    found = extract(text, prefill=prefill)
    assert bool(found.code) != bool(found.reason)


@given(st.lists(st.text(alphabet="abc \n", max_size=20), max_size=4))
def test_every_closed_block_is_found(bodies: list[str]) -> None:
    text = "\n".join(f"talk\n```python\n{body}\n```" for body in bodies)
    assert [block.code for block in blocks(text)] == [body + "\n" for body in bodies]
