"""Grades a completion by one task in one sandbox, as a judge would."""

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from reward.grade import Part, Reward
from reward.grade import grade as grade_reward
from reward.kinds.kind import Answer, Task
from reward.sandbox.sandbox import Sandbox
from rollout.ledger.records import Verdict


@dataclass(frozen=True)
class OneSandbox:
    """The resources of a judge that has nothing but this sandbox."""

    lent: Sandbox

    def sandbox(self) -> AbstractContextManager[Sandbox]:
        return contextlib.nullcontext(self.lent)

    def waiting(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def cancelled(self) -> bool:
        return self.lent.cancelled()


def grade(task: Task, completion: str, *, sandbox: Sandbox, **answer: Any) -> Verdict:
    reward = Reward(parts=[Part(name="task", weight=1.0, task=task)])
    return grade_reward(reward, Answer(completion=completion, **answer), OneSandbox(sandbox))
