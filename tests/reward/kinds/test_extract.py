"""Code out of completions, the way people expect."""

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward.kinds.extract import blocks, extract

CODE = "def f(x):\n    return x\n"


@pytest.mark.parametrize(
    "tag",
    [
        "",
        "python",
        "Python",
        "py",
        "python3",
        "{.python}",
        "python title=x",
        "python3.11",
        "py3.12",
        "python:solution.py",
        "python,linenos",
        'python{title="a"}',
        "ipython",
        "solution.py",
    ],
)
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


@pytest.mark.parametrize(
    "opening", ["<answer>```python", "Here is the code: ```python", "- ```python", "1. ```py", "**Solution:** ```Python3"]
)
@pytest.mark.parametrize("closing", ["```</answer>", "```", "```.", "``` That is it.", "```**Explanation**", "```<|im_end|>"])
def test_fence_may_share_its_line_with_other_text(opening: str, closing: str) -> None:
    assert extract(f"Text.\n{opening}\n{CODE}{closing}\nAnd more text.").code == CODE


@pytest.mark.parametrize("line", ["Use ``` for code", "a ~~~ b", "see `x` and ```", "x = 1 ```", "write ```json"])
def test_fence_within_a_line_of_prose_opens_nothing(line: str) -> None:
    assert extract(f"{line}\n\n```python\n{CODE}```\n").code == CODE


def test_code_of_a_list_item_is_outdented() -> None:
    indented = "".join(f"  {line}" for line in CODE.splitlines(keepends=True))
    assert extract(f"Steps:\n- ```python\n{indented}  ```\n").code == CODE


def test_a_longer_fence_holds_a_shorter_one() -> None:
    assert extract('````python\ns = """\n```\n"""\n````').code == 's = """\n```\n"""\n'


def test_tildes_are_a_fence() -> None:
    assert extract("~~~py\nx = 1\n~~~").code == "x = 1\n"


EXAMPLE = 'def f(x):\n    """Add one.\n\n    ```{tag}\n    f(2) == 3\n    ```\n    """\n    return x + 1\n'


@pytest.mark.parametrize("tag", ["", "python", "text"])
def test_a_fenced_example_in_a_docstring_does_not_end_the_code(tag: str) -> None:
    code = EXAMPLE.format(tag=tag)
    assert extract(f"```python\n{code}```\nDone.").code == code
    assert extract(code[9:], prefill=code[:9]).code == code
    assert extract(code[9:] + "```\nDone.", prefill=code[:9]).code == code
    assert extract(code[9:] + "```\nDone.", prefill="```python\n" + code[:9]).code == code


@given(st.integers(0, 12), st.integers(0, 12))
def test_a_fence_closes_a_block_unless_it_is_indented_by_four_more(opening: int, closing: int) -> None:
    found = blocks(f"{' ' * opening}```\nx\n{' ' * closing}```\ny")
    assert found[0].closed == (closing <= opening + 3)


THINKING = "I try\n```python\nx = 0\n```\nfirst."
ANSWER = "```python\nx = 1\n```"


@pytest.mark.parametrize(
    "text",
    [
        f"<think>\n{THINKING}\n</think>\n\n{ANSWER}",
        f"<think>{THINKING}</think>{ANSWER}",
        f"{THINKING}\n</think>\n\n{ANSWER}",
        f"{THINKING} </think> So:\n{ANSWER}",
        f"I try\n```python\nx =\n</think>\n{ANSWER}",
        f"<think>\n{THINKING}\n</think>\n{ANSWER}\nNo `</think>` is in it.",
        "<think>\n\n</think>\n\n```\nx = 1\n```",
        f"{THINKING}\n</think>\n```\nx = 1\n```",
    ],
)
def test_thoughts_do_not_count(text: str) -> None:
    assert extract(text).code == "x = 1\n"


@pytest.mark.parametrize("text", [f"<think>{THINKING}</think>\nno code here", f"{THINKING}\n</think>\n\nno code here"])
def test_thoughts_without_an_answer_are_no_code(text: str) -> None:
    assert extract(text).reason == "no code block"


@pytest.mark.parametrize("prefill", ["", "<think>\n"])
def test_thoughts_that_never_end_are_no_answer(prefill: str) -> None:
    assert "never ends" in extract(f"<think>{THINKING}"[len(prefill) :], prefill=prefill).reason


@pytest.mark.parametrize("prefill", ["<think>\n", "<think>\n\n</think>\n\n"])
def test_a_prefill_may_open_the_thoughts_or_skip_them(prefill: str) -> None:
    completion = ANSWER if "</think>" in prefill else f"{THINKING}\n</think>\n{ANSWER}"
    assert extract(completion, prefill=prefill).code == "x = 1\n"


@pytest.mark.parametrize(
    "code",
    [
        "tag = '</think>'\n",
        'text = """<think>\n</think>\n"""\n',
        "# </think>\nx = 1\n",
    ],
)
@pytest.mark.parametrize("before", ["", "Here:\n", "<think>\nWell.\n</think>\n"])
@pytest.mark.parametrize("after", ["", "\nIt handles `</think>`.", "\nDone </think> and shown."])
def test_a_program_and_the_prose_behind_it_may_hold_the_tag_that_ends_thoughts(code: str, before: str, after: str) -> None:
    assert extract(f"{before}```python\n{code}```{after}").code == code


def test_an_example_of_its_use_may_follow_the_answer() -> None:
    text = "```python\ndef f(x):\n    return x\n```\nUse it:\n```python\nprint(f(2))\n```"
    assert extract(text, defines="f").code == "def f(x):\n    return x\n"
    assert extract(text).code == "print(f(2))\n"


@pytest.mark.parametrize("code", ["async def f(x): pass", "class f:\n    pass", "f = lambda x: x", "f: Any = g"])
def test_a_block_defines_a_name_in_whatever_way(code: str) -> None:
    assert extract(f"```python\n{code}\n```\n```python\nf == 1\nff = 2\n```", defines="f").code == code + "\n"


def test_of_several_answers_the_last_counts() -> None:
    assert extract("```python\nf = 1\n```\n```python\nf = 2\n```\n```python\ng = 3\n```", defines="f").code == "f = 2\n"


PIECES = (
    "```",
    "~~~",
    " " * 50,
    "a",
    "\n",
    "```python\n",
    "</think>",
    "<think>",
    "def f",
    "f =",
    "\t",
    "```\n</think>\n",
    "{",
    "::",
)


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("start", ["", "```python\n", "<think>"])
def test_the_time_grows_with_the_length_and_no_faster(piece: str, start: str) -> None:
    def seconds(size: int) -> float:
        text = start + piece * (size // len(piece)) + "!"
        best = math.inf
        for _ in range(3):
            began_s = time.process_time()
            extract(text, defines="f")
            extract(text, prefill="def f(x):\n", defines="f")
            best = min(best, time.process_time() - began_s)
        return best

    assert seconds(1 << 17) < 10 * seconds(1 << 15) + 0.05  # four times the length; a quadratic one would take sixteen times


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
