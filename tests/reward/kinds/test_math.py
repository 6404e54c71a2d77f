"""Answers to mathematical problems: right ones in every notation, wrong ones, and hostile ones."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward.jail.math_equality import PACKAGES
from reward.sandbox.host import Settings
from reward.sandbox.sandbox import Sandbox
from reward.task import Task, TaskError, parse_task
from tests.reward.graded import grade


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(Settings(packages=PACKAGES)) as warm:
        yield warm


class NoSandbox(Sandbox):
    """For what must be decided without one."""

    def start(self, *_: object, **__: object) -> NoReturn:
        raise AssertionError("no sandbox is needed for this")


def task(answer: object, **fields: object) -> Task:
    return parse_task({"kind": "math", "answer": answer, **fields})


def box(answer: str) -> str:
    return f"Let us see. 3 + 4 = 7, so the answer is $\\boxed{{{answer}}}$."


IN_PROCESS_EQUAL = [
    ("72", "72"),
    ("1,234", "1234"),
    ("18", r"\$18"),
    ("18", "$18.00$"),
    ("0.5", r"\frac{1}{2}"),
    (r"\frac{1}{2}", r"\dfrac12"),
    ("2.5", r"2\frac{1}{2}"),
    ("50", r"50\%"),
    ("0.25", r"25\%"),
    ("10", r"10\text{ cm}"),
    ("12", "12 apples"),
    ("90", r"90^\circ"),
    ("5", "x = 5"),
    ("x=5", "5"),
    ("x = 5", "x=5.0"),
    ("-3", "\u22123"),
    (r"\text{Monday}", "monday"),
    (r"\text{Monday}", r"\text{ Monday}."),
    ("even", r"\text{Even}"),
    (r"\left(3, \frac{\pi}{2}\right)", r"(3,\frac{\pi}{2})"),
    (r"\text{(B)}", "B"),
    ("3 + 4i", "3+4i"),
    (r"\sqrt{2}", r"$\sqrt{2}$"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
]
IN_PROCESS_UNEQUAL = [
    ("72", "73"),
    ("72", "-72"),
    ("1234", "12.34"),
    ("0.333", r"\frac{1}{3}"),
    ("50", "5"),
    (r"25\%", r"2500\%"),
    (r"\text{Monday}", "Tuesday"),
    ("x = 5", "x = 6"),
    ("10", r"100\text{ mm}"),
    (r"\frac{3}{4}", r"\frac{4}{3}"),
]
PAIRS = [json.loads(line) for line in Path(__file__).with_name("math_pairs.jsonl").open()]
"""Pairs that need the sandbox. `benchmarks/rewards.py` reads them too."""


@pytest.mark.parametrize(("truth", "answer"), IN_PROCESS_EQUAL)
def test_same_numbers_and_texts_are_equal_without_a_sandbox(truth: str, answer: str) -> None:
    verdict = grade(task(truth), box(answer), sandbox=NoSandbox())
    assert (verdict.reward, verdict.reason, verdict.parts["answered"]) == (1.0, "", 1.0)


@pytest.mark.parametrize(("truth", "answer"), IN_PROCESS_UNEQUAL)
def test_other_numbers_and_texts_are_unequal_without_a_sandbox(truth: str, answer: str) -> None:
    verdict = grade(task(truth), box(answer), sandbox=NoSandbox())
    assert verdict.reward == 0.0
    assert verdict.reason.startswith("answered ")


@pytest.mark.parametrize(("truth", "answer"), [(pair["truth"], pair["answer"]) for pair in PAIRS if pair["equal"]])
def test_the_same_mathematics_in_another_form_is_equal(truth: str, answer: str, sandbox: Sandbox) -> None:
    assert grade(task(truth), box(answer), sandbox=sandbox).reward == 1.0


@pytest.mark.parametrize(("truth", "answer"), [(pair["truth"], pair["answer"]) for pair in PAIRS if not pair["equal"]])
def test_other_mathematics_and_answers_that_hedge_are_unequal(truth: str, answer: str, sandbox: Sandbox) -> None:
    verdict = grade(task(truth), box(answer), sandbox=sandbox)
    assert verdict.reward == 0.0
    assert verdict.reason


HOSTILE = [
    "9^{9^{9^{9}}}",
    "9**9**9**9",
    "100000000!",
    "(" * 400,
    "{" * 400 + "}" * 400,
    r"\frac{1}{" * 80 + "1" + "}" * 80,
    "1" * 5000,
    "1" * 900 + "!",
    r"\text{__import__('os').system('touch /tmp/x')}",
    "__import__('os')._exit(0)",
    r"\operatorname{eval}(1)",
    "\0",
    "\udc80",
    "\\",
    "$" * 99,
    r"\sum_{n=1}^{10^{100}} n^n",
    r"\int_0^1 e^{e^{e^{x^2}}} dx",
    r"\begin{pmatrix}" + "1&" * 300,
    "x" * 900,
    "+".join(f"x_{{{n}}}" for n in range(150)),
    "(x+1)^{100000}",
    r"\sin(" * 150 + ")" * 150,
    "%" * 500,
    "=" * 500,
    r"\boxed{\boxed{",
    "10^{-" + "9" * 50 + "}",
    "True",
    r"\top",
]


@pytest.mark.parametrize("answer", HOSTILE, ids=lambda answer: answer[:14].encode("unicode_escape").decode())
@pytest.mark.parametrize("truth", ["7", "x^2 + 1"])
def test_a_hostile_answer_is_a_verdict_within_its_limits(answer: str, truth: str, sandbox: Sandbox) -> None:
    verdict = grade(task(truth, cpu_limit_s=0.5), box(answer), sandbox=sandbox)
    assert verdict.reward == 0.0
    assert verdict.reason.isprintable()
    assert verdict.cpu_s < 1.5


def test_an_answer_that_computes_without_end_is_told_as_such(sandbox: Sandbox) -> None:
    verdict = grade(task("7", cpu_limit_s=0.5), box("9^{9^{9^{9}}}"), sandbox=sandbox)
    assert (verdict.parts["timed_out"], verdict.parts["answered"]) == (1.0, 1.0)
    assert "used more than 0.5 CPU-seconds" in verdict.reason


def test_many_boxes_are_one_answer_the_last() -> None:
    every = " ".join(f"\\boxed{{{n}}}" for n in range(1000))
    assert grade(task("7"), every, sandbox=NoSandbox()).reward == 0.0
    assert grade(task("999"), every, sandbox=NoSandbox()).reward == 1.0


def test_completion_without_an_answer_is_told_as_such() -> None:
    verdict = grade(task("7", format="boxed"), "it is 7", sandbox=NoSandbox())
    assert (verdict.reward, verdict.parts["answered"], verdict.reason) == (0.0, 0.0, "no answer in the format 'boxed'")


@pytest.mark.parametrize(
    ("answer", "fields", "right", "wrong"),
    [
        ("She has 3 + 4 = <<3+4=7>>7 eggs.\n#### 7", {}, "The answer is 7.", "The answer is 8."),
        (r"Thus $x = \boxed{\frac{1}{2}}$.", {}, "#### 0.5", "#### 0.2"),
        (42, {}, "so 42", "so 41"),
        (0.1, {}, box("1/10"), box("1/9")),
        ("(C)", {"format": "letter"}, "the answer is C.", "the answer is (A)."),
        ("3.14159", {"tolerance": 1e-3}, box("3.1416"), box("3.2")),
        ("5", {"format": "number"}, r"not \boxed{4} but 5", r"\boxed{5} or 4"),
    ],
)
def test_ground_truths_as_people_have_them(answer: object, fields: dict[str, object], right: str, wrong: str) -> None:
    assert grade(task(answer, **fields), right, sandbox=NoSandbox()).reward == 1.0
    assert grade(task(answer, **fields), wrong, sandbox=NoSandbox()).reward == 0.0


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ({}, r"task\.answer: must be a string, got NoneType"),
        ({"answer": "  "}, r"task\.answer: .* holds no answer"),
        ({"answer": "12", "format": "letter"}, r"task\.answer: .* no answer that is a letter from A to Z"),
        ({"answer": "x", "format": "number"}, r"task\.answer: .*x.* is not a number"),
        ({"answer": "1", "format": "digits"}, r"task\.format: 'digits' is not known: use one of auto, boxed, number, letter"),
        ({"answer": "1", "answers": ["2"]}, r"task\.answers: no such field in a 'math' task"),
        ({"answer": "1", "tolerance": -1}, r"task\.tolerance: must be a number above 0"),
        ({"answer": "1" * 2000}, r"task\.answer: has 2,000 characters"),
    ],
)
def test_task_that_cannot_be_graded_says_why(data: dict[str, object], error: str) -> None:
    with pytest.raises(TaskError, match=error):
        parse_task({"kind": "math", **data})


@given(st.integers(-(10**9), 10**9), st.integers(-(10**9), 10**9))
def test_numbers_are_right_exactly_if_they_are_equal(truth: int, answer: int) -> None:
    assert grade(task(truth), box(f"{answer:,}"), sandbox=NoSandbox()).reward == float(truth == answer)
    assert grade(task(truth), box(f"{truth:,}"), sandbox=NoSandbox()).reward == 1.0


@given(st.text(max_size=200))
def test_any_text_gets_a_verdict(text: str) -> None:
    assert grade(task("A", format="letter"), text, sandbox=NoSandbox()).reward in (0.0, 1.0)
    assert grade(task("7", format="number"), text, sandbox=NoSandbox()).reward in (0.0, 1.0)


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (f"<think>Perhaps {box('42')}</think>It is {box('41')}", 0.0),
        (f"<think>Perhaps {box('41')}</think>It is {box('42')}", 1.0),
        (f"<think>Perhaps {box('42')}</think>I do not know.", 0.0),
        (f"<think>Perhaps {box('42')}", 0.0),
    ],
)
def test_answer_within_the_reasoning_is_no_answer(completion: str, reward: float) -> None:
    assert grade(task("42"), completion, sandbox=NoSandbox()).reward == reward


def test_reasoning_that_never_ends_is_the_reason() -> None:
    assert "never ends" in grade(task("42"), f"<think>{box('42')}", sandbox=NoSandbox()).reason


@pytest.mark.parametrize("answer", ["9999999999", "8.5", "-8.5"])
def test_tolerance_is_relative_to_the_ground_truth_and_not_to_what_the_model_says(answer: str) -> None:
    assert grade(task("4.25", tolerance=0.9), box(answer), sandbox=NoSandbox()).reward == 0.0
    assert grade(task("4.25", tolerance=0.9), box("8"), sandbox=NoSandbox()).reward == 1.0
