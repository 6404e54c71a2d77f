"""What the debug run learns from: problems that are right, disjoint, and answered in two styles that agree."""

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reward.generated import files
from reward.generated.code_problems import (
    CONDITIONS,
    ENTRY_POINT,
    Spec,
    body,
    draw_demonstrations,
    draw_input,
    draw_problems,
    draw_spec,
    mutate,
    one_liner,
    sentence,
    solution,
    stepwise,
)

COUNTS = {"train": 60, "heldout": 12, "demonstrations": 300}
generate = partial(files.generate, draw_problems=draw_problems, draw_demonstrations=draw_demonstrations)


def run(code: str, value: Any) -> Any:
    """The code is this project's own."""
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    return namespace[ENTRY_POINT](value)


def drawn(seed: int) -> tuple[random.Random, Spec]:
    rng = random.Random(seed)
    return rng, draw_spec(rng)


@given(st.integers(0, 2**32), st.booleans())
@settings(max_examples=200, deadline=None)
def test_both_styles_compute_the_same_with_and_without_comments(seed: int, explain: bool) -> None:
    rng, spec = drawn(seed)
    for _ in range(3):
        value = draw_input(rng, spec)
        expected = run(solution(spec), value)
        for style in (one_liner, stepwise):
            assert run(spec.signature + body(style(spec), explain=explain), value) == expected


@given(st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_a_mutation_is_another_specification_of_the_same_signature_that_still_runs(seed: int) -> None:
    rng, spec = drawn(seed)
    mutated = mutate(rng, spec)
    assert mutated != spec and mutated.signature == spec.signature and mutated.steps
    for style in (one_liner, stepwise):
        try:
            run(mutated.signature + body(style(mutated)), draw_input(rng, spec))
        except ZeroDivisionError:  # a constant one too small is an honest mistake
            assert any(step.constant == 0 for step in mutated.steps)


@given(st.integers(0, 2**32))
@settings(deadline=None)
def test_an_explained_answer_is_longer_by_comments_only(seed: int) -> None:
    _, spec = drawn(seed)
    for style in (one_liner, stepwise):
        plain, explained = body(style(spec)), body(style(spec), explain=True)
        assert len(explained) > len(plain)
        assert [line for line in explained.split("\n") if not line.lstrip().startswith("#")] == plain.split("\n")


def test_a_sentence_says_every_step() -> None:
    rng = random.Random(0)
    for _ in range(300):
        spec = draw_spec(rng)
        said = sentence(spec).lower()
        assert all(step.say().lower() in said for step in spec.steps)
        assert ("keep" in said) == (spec.family == "list" and spec.steps[0].table is CONDITIONS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated")
    counts = generate(folder, seed=0, **COUNTS)
    assert counts == {f"{name}.jsonl": count for name, count in COUNTS.items()}
    return folder


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_solution_passes_its_8_to_18_distinct_tests(folder: Path) -> None:
    for problem in read(folder / "train.jsonl") + read(folder / "heldout.jsonl"):
        tests = problem["task"]["tests"]
        assert 8 <= len(tests) == len({json.dumps(test["args"]) for test in tests}) <= 18
        assert problem["task"]["kind"] == "calls" and problem["task"]["entry_point"] == ENTRY_POINT
        assert problem["solution"].startswith(problem["prefill"])
        for test in tests:
            result = run(problem["solution"], *test["args"])
            assert result == test["expected"] and type(result) is type(test["expected"])


def test_answering_always_the_same_or_the_input_itself_passes_nowhere(folder: Path) -> None:
    for problem in read(folder / "train.jsonl"):
        expected = [json.dumps(test["expected"]) for test in problem["task"]["tests"]]
        assert len(set(expected)) > 1
        assert any(test["args"][0] != test["expected"] for test in problem["task"]["tests"])


def test_no_specification_is_both_in_train_and_held_out_whatever_the_seed(folder: Path, tmp_path: Path) -> None:
    generate(tmp_path, seed=1, **COUNTS)
    train = {problem["id"] for seed in (folder, tmp_path) for problem in read(seed / "train.jsonl")}
    heldout = {problem["id"] for seed in (folder, tmp_path) for problem in read(seed / "heldout.jsonl")}
    assert len(train) > COUNTS["train"] and not train & heldout
    assert len({problem["id"] for problem in read(folder / "heldout.jsonl")}) == COUNTS["heldout"]


def test_the_same_seed_writes_the_same_files(folder: Path, tmp_path: Path) -> None:
    generate(tmp_path, seed=0, **COUNTS)
    for name in ("train.jsonl", "heldout.jsonl", "demonstrations.jsonl"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_demonstrations_are_clean_first_and_then_often_wrong(folder: Path) -> None:
    """They go with train problems in turn; the noisy half is wrong about as often as a bug is drawn."""
    problems = read(folder / "train.jsonl")
    passes = []
    for number, demonstration in enumerate(read(folder / "demonstrations.jsonl")):
        problem = problems[number % len(problems)]
        assert demonstration["prompt"] == problem["prompt"]
        code = demonstration["prefill"] + demonstration["answer"]
        passes.append(all(_passes(code, test) for test in problem["task"]["tests"]))
    half = len(passes) // 2
    assert all(passes[:half])
    assert 0.4 < sum(passes[half:]) / half < 0.75


def _passes(code: str, test: dict[str, Any]) -> bool:
    try:
        return run(code, *test["args"]) == test["expected"]
    except ZeroDivisionError:
        return False
