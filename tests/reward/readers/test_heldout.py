"""A share of the training problems is held out: always the same ones, and never a prompt that is trained on."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.schema import DataConfig, RunConfig
from reward.readers.heldout import is_held_out
from reward.readers.run_problems import run_problems
from rollout.prompts.problems import HELD_OUT, Problem, ProblemError


def problem(text: str, name: str = "p") -> Problem:
    messages = [{"role": "user", "content": text}]
    return Problem(where="x", id=name, messages=messages, raw=None, prefill="", task={}, metadata={})


@given(st.text(), st.text(), st.floats(0, 0.99))
def test_problems_that_ask_the_same_are_on_the_same_side(text: str, name: str, fraction: float) -> None:
    spaced = f"  {text.replace(' ', '  ')}\n"
    assert is_held_out(problem(text), fraction) == is_held_out(problem(spaced, name), fraction)


@given(st.text(), st.floats(0, 0.99), st.floats(0, 0.99))
def test_a_larger_share_holds_out_what_a_smaller_one_does(text: str, one: float, other: float) -> None:
    small, large = sorted((one, other))
    assert is_held_out(problem(text), large) or not is_held_out(problem(text), small)


@settings(deadline=None)
@given(st.sampled_from([0.05, 0.2, 0.5]), st.integers(0, 1000))
def test_the_share_is_the_one_asked_for(fraction: float, seed: int) -> None:
    count = 1000
    held_out = sum(is_held_out(problem(f"{seed}/{i}"), fraction) for i in range(count))
    assert abs(held_out - fraction * count) < 6 * (fraction * (1 - fraction) * count) ** 0.5


def sides(folder: Path, numbers: list[int], fraction: float = 0.3) -> dict[str, bool]:
    """Prompt -> whether it is held out. Every prompt is there twice, with two ids."""
    rows = [{"question": f"What is {i}?", "answer": str(i)} for i in numbers for _ in range(2)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = RunConfig(data=DataConfig(train=[str(folder / "train.jsonl")], heldout_fraction=fraction))
    found: dict[str, set[bool]] = {}
    for part, one in run_problems(config, None):
        found.setdefault(one.text, set()).add(part == HELD_OUT)
    assert all(len(both) == 1 for both in found.values())  # never trained and held out
    return {text: both.pop() for text, both in found.items()}


def test_a_problem_stays_on_its_side_when_others_are_added_or_removed(tmp_path: Path) -> None:
    before = sides(tmp_path, list(range(40)))
    after = sides(tmp_path, [99, *range(60, 10, -1)])
    assert set(before.values()) == {True, False}
    assert all(after[text] == before[text] for text in before.keys() & after.keys())


def test_a_share_that_holds_out_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match=r"data\.heldout_fraction=1e-09 of 6 problems holds out none: raise it"):
        sides(tmp_path, [1, 2, 3], fraction=1e-9)
