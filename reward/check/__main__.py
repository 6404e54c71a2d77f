"""Grades a file of problems, with the solutions it holds or with a file of completions, and says what passed.

    python -m reward.check problems.jsonl                                  every problem's own `solution` must pass
    python -m reward.check problems.jsonl --solutions completions.jsonl    lines {"id": …, "completion": …}, any number per id

A line of completions may also hold `tokens`, their number, and `finish`, which is `stop` or `length`. Functions of the kind
`python` are those in the folder where the command is given.

The problems are rows as a run reads them (docs/problems.md), optionally with a `solution`: a whole program for the kinds that
grade code, a whole answer for the others. Each problem that is refused and each completion that fails is named with its file and
line. Ends with 0 if everything passed, 1 if something did not, CANNOT_READ if a file cannot be read, or if a task needs a sandbox
and this host has none.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from reward.check.grade_all import Attempt, GradedCompletion, as_answer, grade_all
from reward.grade import printable
from reward.grading.figures import Figures
from reward.jail.limits import SandboxUnavailable
from reward.kinds.kind import Answer
from reward.readers.draft import Options
from reward.readers.reading import Gradable, Reading
from reward.sandbox.host import Settings
from reward.task import Defaults
from rollout.ledger.records import Finish
from rollout.prompts.problems import Problem, ProblemError, parse_line

CANNOT_READ = 2


class CheckError(ValueError):
    """A file that cannot be used. The message says where, what is wrong, and what to do."""


def main(argv: list[str] | None = None) -> int:
    arguments = _arguments(argv)
    console = Console(stderr=True)
    defaults = Defaults(cpu_limit_s=arguments.cpu_limit_s, memory_limit_mb=arguments.memory_limit_mb, credit=arguments.credit)
    try:
        reading = Reading(source=arguments.problems, options=Options(task=arguments.task, defaults=defaults))
        problems = read_problems(reading)
        console.print(printable(str(reading)), markup=False, highlight=False, soft_wrap=True)
        attempts = list(_completions(arguments.solutions, problems) if arguments.solutions else _own_solutions(problems))
        began_s = time.monotonic()
        figures = Figures()
        results = grade_all(attempts, arguments.slots, figures, Settings(packages=tuple(arguments.packages)))
        graded = list(track(results, "grading", total=len(attempts), console=console))
    except (CheckError, SandboxUnavailable) as error:
        console.print(printable(str(error)), style="red", markup=False, highlight=False, soft_wrap=True)
        return CANNOT_READ
    failed = [one for one in graded if one.reason]
    for refusal in reading.refusals[: arguments.show]:
        console.print(f"refused  {refusal}", markup=False, highlight=False, soft_wrap=True)
    for one in failed[: arguments.show]:
        console.print(printable(f"failed   {one.where}: {one.reason}"), markup=False, highlight=False, soft_wrap=True)
    Console().print(_table(len(problems), len(reading.refusals), graded, len(failed), figures, time.monotonic() - began_s))
    return 1 if failed or reading.refusals or not graded else 0


def read_problems(reading: Reading) -> dict[str, Gradable]:
    """The problems by id. Raises CheckError."""
    try:
        problems = {found.problem.id: found for found in reading.problems({})}
    except ProblemError as error:
        raise CheckError(str(error)) from error
    if not reading.rows:
        raise CheckError(f"{reading.source}: holds no problems")
    return problems


def answer_to(problem: Problem, completion: str) -> Answer:
    return Answer(completion=completion, prefill=problem.prefill, prompt=problem.text, metadata=problem.metadata)


def _own_solutions(problems: dict[str, Gradable]) -> Iterator[Attempt]:
    if problems and not any(found.draft.solutions for found in problems.values()):
        raise CheckError("no problem holds a `solution`: give completions with --solutions FILE")
    for name, found in problems.items():
        for solution in found.draft.solutions[:1]:
            reward = found.rewards[0]
            answer = replace(answer_to(found.problem, as_answer(solution, reward)), prefill="")  # it is the whole answer
            yield Attempt(where=f"{found.problem.where} ({name})", reward=reward, answer=answer)


def _completions(path: Path, problems: dict[str, Gradable]) -> Iterator[Attempt]:
    for where, line in _lines(path):
        problem_id = _text(line, "id", where)
        if problem_id not in problems:
            raise CheckError(f"{where}: no problem has the id {problem_id!r}")
        found, completion = problems[problem_id], _text(line, "completion", where)
        answer = replace(answer_to(found.problem, completion), **_how_it_ended(line, where))
        yield Attempt(where=f"{where} ({problem_id})", reward=found.rewards[0], answer=answer)


def _how_it_ended(line: dict[str, Any], where: str) -> dict[str, Any]:
    tokens, finish = line.get("tokens"), line.get("finish", Finish.STOP)
    if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0):
        raise CheckError(f"{where}: `tokens` must be a whole number, got {tokens!r:.80}")
    if finish not in (Finish.STOP, Finish.LENGTH):
        raise CheckError(f"{where}: `finish` must be stop or length, got {finish!r:.80}")
    return {"tokens": tokens, "finish": Finish(finish)}


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a JSONL file, each with its file and line."""
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                value = parse_line(line, f"{path}:{number}")
                if not isinstance(value, dict):
                    raise CheckError(f"{path}:{number}: must be an object, got {type(value).__name__}")
                yield f"{path}:{number}", value
    except ProblemError as error:
        raise CheckError(str(error)) from error
    except (OSError, UnicodeDecodeError) as error:
        raise CheckError(f"cannot read {path}: {error}") from error


def _text(line: dict[str, Any], key: str, where: str) -> str:
    value = line.get(key)
    if not isinstance(value, str):
        raise CheckError(f"{where}: `{key}` must be a string, got {value!r:.80}")
    return value


def _table(problems: int, refused: int, graded: list[GradedCompletion], failed: int, figures: Figures, wall_s: float) -> Table:
    table = Table(show_header=False)
    table.add_row("problems", f"{problems + refused}, of which {refused} refused")
    table.add_row("graded", f"{len(graded)} in {wall_s:.1f} s, {len(graded) / max(wall_s, 1e-9):.1f}/s")
    table.add_row("passed", f"{len(graded) - failed} ({(len(graded) - failed) / max(len(graded), 1):.1%})")
    table.add_row("failed", str(failed))
    verdicts = [one.verdict for one in graded if one.verdict is not None]
    for name in dict.fromkeys(name for verdict in verdicts for name in verdict.parts):
        values = [verdict.parts[name] for verdict in verdicts if name in verdict.parts]
        table.add_row(name, f"mean {sum(values) / len(values):.4g}, min {min(values):.4g}, max {max(values):.4g}")
    table.add_row("in detail", figures.line())
    return table


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m reward.check", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("problems", help="what an entry of data.train may be: a file, a folder, a pattern, hf://…")
    parser.add_argument("--task", type=json.loads, help="the task of rows that have none, in JSON, as data.task")
    parser.add_argument("--solutions", type=Path, help='JSONL of {"id", "completion"}; without it the problems\' own solutions')
    parser.add_argument(
        "--slots", type=int, default=len(os.sched_getaffinity(0)), help="sandboxes at once (default: one per CPU core)"
    )
    parser.add_argument("--credit", default="all", choices=("all", "fraction"))
    parser.add_argument(
        "--cpu-limit-s", type=float, default=8.0, help="CPU seconds for one completion, if its task sets no limit"
    )
    parser.add_argument("--memory-limit-mb", type=int, default=1024)
    parser.add_argument("--packages", nargs="*", default=[], help="installed packages that completions may import, such as numpy")
    parser.add_argument("--show", type=int, default=10, help="how many refused problems and failed completions are listed")
    arguments = parser.parse_args(argv)
    if arguments.slots < 1:
        parser.error(f"--slots {arguments.slots}: must be at least 1")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
