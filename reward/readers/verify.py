"""Turns drafts into lines: every task must be readable, and if a draft has solutions one of them must pass in the sandbox.

Each round tries one task and one solution of every draft that has not passed yet, until one passes or none is left.
"""

import itertools
import json
from collections.abc import Iterable
from typing import Any

from reward.check import Attempt, as_answer, grade_all
from reward.grade import Reward
from reward.judge_stats import Figures
from reward.kinds.kind import Answer
from reward.readers.draft import Draft, RowRefused, Summary
from reward.task import TaskError, read_reward

NO_PASS = "no solution of its own passes"


def verify(drafts: Iterable[Draft], summary: Summary, *, slots: int, run_solutions: bool = True) -> list[dict[str, Any]]:
    """The lines of the drafts that pass, in order; the summary names the others. Raises SandboxUnavailable."""
    lines: dict[str, dict[str, Any]] = {}
    attempts: list[tuple[int, str]]
    waiting: dict[str, tuple[Draft, list[tuple[int, str]]]] = {}  # by id: the (task, solution) pairs still to try
    parsed: dict[str, list[Reward]] = {}
    for draft in drafts:
        if draft.id in parsed:
            summary.refuse(draft.id, RowRefused("an id that another problem has"))
            continue
        try:
            json.dumps([draft.id, draft.messages, draft.fields, draft.prefill], ensure_ascii=False).encode()
            parsed[draft.id] = [read_reward(task) for task in draft.tasks]
        except UnicodeEncodeError as error:
            half = error.object[error.start : error.end].encode("unicode_escape").decode()
            summary.refuse(draft.id, RowRefused("text that is not Unicode", f"half of a surrogate pair: {half[:20]}"))
            continue
        except TaskError as error:
            summary.refuse(draft.id, RowRefused("a task that cannot be graded", str(error)))
            continue
        lines[draft.id] = draft.line(draft.tasks[0], draft.solutions[0] if draft.solutions else None)
        if draft.solutions and run_solutions:
            waiting[draft.id] = (draft, list(itertools.product(range(len(draft.tasks)), draft.solutions)))
        else:
            summary.unverified += 1
    while waiting:
        tries = []
        for draft, attempts in waiting.values():
            index, solution = attempts[0]
            answer = Answer(completion=as_answer(solution))
            tries.append(Attempt(where=draft.id, reward=parsed[draft.id][index], answer=answer))
        for graded in grade_all(tries, slots, Figures()):
            draft, attempts = waiting[graded.where]
            index, solution = attempts.pop(0)
            if not graded.reason:
                lines[draft.id] = draft.line(draft.tasks[index], solution)
                summary.verified += 1
            elif attempts:
                continue
            else:
                del lines[draft.id]
                summary.refuse(draft.id, RowRefused(NO_PASS, graded.reason[:100]))
            del waiting[draft.id]
    return list(lines.values())
