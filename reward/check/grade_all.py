"""Grades many completions in sandboxes of this host, without a queue."""

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from reward.grade import Reward, grade
from reward.grading.figures import Figures
from reward.grading.resources import Lent, Sandboxes, Slots
from reward.grading.services import Services
from reward.jail.limits import SandboxError, SandboxUnavailable
from reward.kinds.functions.pool import FunctionPool
from reward.kinds.kind import Answer, TaskError
from reward.sandbox.host import Settings
from rollout.ledger.records import Verdict

FUNCTION_MEMORY_MB = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A completion that is to be graded."""

    where: str  # file, line and problem
    reward: Reward
    answer: Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class GradedCompletion:
    where: str
    verdict: Verdict | None  # None: it could not be graded
    reason: str  # empty where nothing failed


def grade_all(
    attempts: Sequence[Attempt], slots: int, figures: Figures, settings: Settings | None = None
) -> Iterator[GradedCompletion]:
    """Grades `slots` completions at once; results come in the order of the attempts."""
    sandboxes, services = Sandboxes(slots, settings), Services()
    functions = FunctionPool(Path.cwd(), slots, FUNCTION_MEMORY_MB)
    lent = Lent(
        sandboxes=sandboxes,
        functions=functions,
        services=services,
        slots=Slots(slots, most_waiting=0),
        cancelled=lambda: False,
    )

    def one(attempt: Attempt) -> GradedCompletion:
        try:
            verdict = grade(attempt.reward, attempt.answer, lent)
        except SandboxUnavailable:
            raise
        except TaskError as error:
            return GradedCompletion(where=attempt.where, verdict=None, reason=str(error))
        except SandboxError as error:
            return GradedCompletion(where=attempt.where, verdict=None, reason=f"no verdict: {error}")
        figures.add(verdict)
        return GradedCompletion(where=attempt.where, verdict=verdict, reason=verdict.reason)

    try:
        with ThreadPoolExecutor(slots) as pool:
            yield from pool.map(one, attempts)
    finally:
        sandboxes.close()
        services.close()
        functions.close()


def as_answer(solution: str, reward: Reward) -> str:
    """A solution as a model would give it. A program is in a block, whose fence is longer than any in the program."""
    if not reward.grades_code:
        return solution
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", solution))])
    return f"{fence}python\n{solution}\n{fence}"
