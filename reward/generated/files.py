"""The files of generated problems: train, held-out, and demonstrations; and the command that writes them."""

import argparse
import json
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

HELDOUT_ONE_IN = 12
DEMONSTRATIONS = 22_400
CLEAN_SHARE = 0.5

DrawProblems = Callable[..., Iterator[tuple[Any, dict[str, Any]]]]
DrawDemonstrations = Callable[[random.Random, list[tuple[Any, dict[str, Any]]], int], Iterator[dict[str, str]]]


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> int:
    count = 0
    with path.open("w") as file:
        for line in lines:
            file.write(json.dumps(line) + "\n")
            count += 1
    return count


def generate(
    folder: Path,
    *,
    seed: int,
    train: int,
    heldout: int,
    demonstrations: int,
    draw_problems: DrawProblems,
    draw_demonstrations: DrawDemonstrations,
) -> dict[str, int]:
    """Write the three files and return the number of lines in each."""
    rng = random.Random(f"generated problems {seed}")
    folder.mkdir(parents=True, exist_ok=True)
    training = list(draw_problems(rng, train, heldout=False))
    return {
        "train.jsonl": write_lines(folder / "train.jsonl", (problem for _, problem in training)),
        "heldout.jsonl": write_lines(
            folder / "heldout.jsonl", (problem for _, problem in draw_problems(rng, heldout, heldout=True))
        ),
        "demonstrations.jsonl": write_lines(folder / "demonstrations.jsonl", draw_demonstrations(rng, training, demonstrations)),
    }


def command(program: str, draw_problems: DrawProblems, draw_demonstrations: DrawDemonstrations) -> None:
    """The command line of a module that generates problems."""
    parser = argparse.ArgumentParser(prog=program, description="Write generated problems.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the three JSONL files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", type=int, default=4000, help="problems to train on")
    parser.add_argument("--heldout", type=int, default=256, help="held-out problems")
    parser.add_argument("--demonstrations", type=int, default=DEMONSTRATIONS, help="answers to learn from")
    arguments = parser.parse_args()
    counts = generate(
        arguments.out,
        seed=arguments.seed,
        train=arguments.train,
        heldout=arguments.heldout,
        demonstrations=arguments.demonstrations,
        draw_problems=draw_problems,
        draw_demonstrations=draw_demonstrations,
    )
    for name, count in counts.items():
        print(f"{arguments.out / name}: {count} lines")
