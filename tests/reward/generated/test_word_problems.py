"""What the math run learns from: word problems with right answers, and demonstrations of which some are wrong."""

import json
import random
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from reward.generated.files import generate
from reward.generated.word_problems import LARGEST, compute, demonstrate, draw_demonstrations, draw_problems, draw_story
from reward.kinds.final_answer import boxed

SEEDS = st.integers(0, 2**32)


@given(SEEDS)
def test_the_answer_is_what_the_told_steps_lead_to(seed: int) -> None:
    story = draw_story(random.Random(seed))
    value = story.start
    for operation, k, _ in story.steps:
        value = compute(value, operation, k)
        assert 0 <= value <= LARGEST
    assert story.problem()["task"] == {"kind": "math", "answer": str(value)}


@given(SEEDS)
def test_every_number_of_a_story_is_told(seed: int) -> None:
    story = draw_story(random.Random(seed))
    told = [int(word) for word in story.prompt().split() if word.isdigit()]
    assert told == [story.start, *(k for _, k, _ in story.steps)]


@given(SEEDS)
def test_a_clean_demonstration_ends_in_the_answer(seed: int) -> None:
    rng = random.Random(seed)
    story = draw_story(rng)
    assert boxed(demonstrate(rng, story, noisy=False)) == story.problem()["task"]["answer"]


def test_some_noisy_demonstrations_are_wrong_and_some_are_right() -> None:
    rng = random.Random(0)
    stories = [draw_story(rng) for _ in range(400)]
    right = sum(boxed(demonstrate(rng, s, noisy=True)) == s.problem()["task"]["answer"] for s in stories) / len(stories)
    assert 0.3 < right < 0.6


def test_train_and_heldout_problems_are_disjoint_and_the_same_for_the_same_seed(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        generate(
            tmp_path / folder,
            seed=1,
            train=60,
            heldout=20,
            demonstrations=100,
            draw_problems=draw_problems,
            draw_demonstrations=draw_demonstrations,
        )
    files = [sorted(tmp_path.glob(f"{folder}/*")) for folder in ("a", "b")]
    assert [file.read_text() for file in files[0]] == [file.read_text() for file in files[1]]
    ids = [{json.loads(line)["id"] for line in (tmp_path / "a" / f"{name}.jsonl").open()} for name in ("train", "heldout")]
    assert [len(found) for found in ids] == [60, 20] and not ids[0] & ids[1]
