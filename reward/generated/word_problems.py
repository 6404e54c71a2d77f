r"""Generated arithmetic word problems for the run `experiment=debug_math`, graded by the kind `math`.

    python -m reward.generated.word_problems --out DIR [--seed 0]

writes the same three files as `reward/generated/code_problems.py`, whose rules for train, held-out and noisy lines hold here too:

    prompt       Ann has 12 apples. Ann buys 7 apples. Ann makes it 3 times as many. How many apples now?
    completion   12+7=19, 19*3=57, so \boxed{57}.<eos>

A noisy demonstration may do another operation, or compute a step wrongly and go on from there.
"""

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from reward.generated.files import CLEAN_SHARE, HELDOUT_ONE_IN, command

NAMES = ("Ann", "Ben", "Cem", "Dan", "Eve", "Finn", "Gia", "Hugo")
ITEMS = ("apples", "books", "coins", "eggs", "nuts", "pens", "stamps", "toys")
SAYINGS = {
    "+": ("{name} buys {k} {items}.", "{name} finds {k} {items}."),
    "-": ("{name} loses {k} {items}.", "{name} gives away {k} {items}."),
    "*": ("{name} makes it {k} times as many.",),
}
MOST_STEPS = 3
LARGEST = 99
MISTAKE_SHARE = 0.6
SLIPS = (-10, -2, -1, 1, 2, 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """A number of things, and what happens to it. `steps`: operation, number, and which of its sayings is used."""

    name: str
    items: str
    start: int
    steps: tuple[tuple[str, int, int], ...]

    def prompt(self) -> str:
        told = [SAYINGS[operation][saying].format(name=self.name, items=self.items, k=k) for operation, k, saying in self.steps]
        return " ".join([f"{self.name} has {self.start} {self.items}.", *told, f"How many {self.items} now?"])

    def digest(self) -> str:
        return hashlib.sha256(self.prompt().encode()).hexdigest()

    @property
    def is_heldout(self) -> bool:
        return int(self.digest()[:8], 16) % HELDOUT_ONE_IN == 0

    def problem(self) -> dict[str, Any]:
        task = {"kind": "math", "answer": str(self.values()[-1])}
        return {"id": f"words-{self.digest()[:12]}", "prompt": self.prompt(), "task": task}

    def values(self, slips: tuple[int, ...] = ()) -> list[int]:
        """The number at the start and after each step; with `slips`, each step is off by so much."""
        values = [self.start]
        for index, (operation, k, _) in enumerate(self.steps):
            slip = slips[index] if slips else 0
            values.append(compute(values[-1], operation, k) + slip)
        return values


def compute(value: int, operation: str, k: int) -> int:
    return {"+": value + k, "-": value - k, "*": value * k}[operation]


def draw_story(rng: random.Random) -> Story:
    while True:
        steps = tuple(_draw_step(rng) for _ in range(rng.randint(2, MOST_STEPS)))
        story = Story(name=rng.choice(NAMES), items=rng.choice(ITEMS), start=rng.randint(2, 30), steps=steps)
        if all(0 <= value <= LARGEST for value in story.values()):
            return story


def _draw_step(rng: random.Random) -> tuple[str, int, int]:
    operation = rng.choice("+-+-*")
    return operation, rng.randint(2, 4 if operation == "*" else 20), rng.randrange(len(SAYINGS[operation]))


def draw_problems(rng: random.Random, count: int, *, heldout: bool) -> Iterator[tuple[Story, dict[str, Any]]]:
    seen: set[str] = set()
    while len(seen) < count:
        story = draw_story(rng)
        if story.is_heldout == heldout and story.digest() not in seen:
            seen.add(story.digest())
            yield story, story.problem()


def demonstrate(rng: random.Random, story: Story, *, noisy: bool) -> str:
    """The steps and the answer, with one mistake in a share of the noisy ones."""
    steps, slips = list(story.steps), [0] * len(story.steps)
    if noisy and rng.random() < MISTAKE_SHARE:
        at = rng.randrange(len(steps))
        if rng.random() < 0.3:
            steps[at] = (rng.choice("+-*".replace(steps[at][0], "")), *steps[at][1:])
        else:
            slips[at] = rng.choice(SLIPS)
    values = Story(name="", items="", start=story.start, steps=tuple(steps)).values(tuple(slips))
    told = [f"{values[i]}{operation}{k}={values[i + 1]}" for i, (operation, k, _) in enumerate(steps)]
    return ", ".join([*told, f"so \\boxed{{{values[-1]}}}."])


def draw_demonstrations(rng: random.Random, problems: list[tuple[Story, dict[str, Any]]], count: int) -> Iterator[dict[str, str]]:
    for number in range(count):
        story, problem = problems[number % len(problems)]
        yield {"prompt": problem["prompt"], "prefill": "", "answer": demonstrate(rng, story, noisy=number >= CLEAN_SHARE * count)}


if __name__ == "__main__":
    command("python -m reward.generated.word_problems", draw_problems, draw_demonstrations)
