"""Grades a completion by one task in one sandbox, as a judge would."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from reward.grade import Part, Reward
from reward.grade import grade as grade_reward
from reward.grading.services import Services
from reward.kinds.endpoint import Endpoint
from reward.kinds.functions.pool import FunctionPool
from reward.kinds.kind import Answer, Task
from reward.sandbox.sandbox import Sandbox
from rollout.ledger.records import I32, Verdict


@dataclass(frozen=True)
class OneSandbox:
    """The resources of a judge that has nothing but this sandbox."""

    lent: Sandbox

    def sandbox(self, packages: Sequence[str] = ()) -> AbstractContextManager[Sandbox]:
        return contextlib.nullcontext(self.lent)

    def waiting(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    @property
    def functions(self) -> FunctionPool:
        raise AssertionError("this task runs no function")

    def observe(self, messages: Sequence[Mapping[str, Any]], end: int) -> I32:
        raise AssertionError("this task has one turn")

    def cancelled(self) -> bool:
        return self.lent.cancelled()

    def ask(self, endpoint: Endpoint, data: Mapping[str, Any], read: Callable[[Any], Any]) -> Any:
        raise AssertionError(f"{endpoint.url} is asked where a sandbox is enough")


@dataclass(frozen=True)
class OnlyServices:
    """The resources of a judge that asks services and never needs a sandbox."""

    services: Services

    def sandbox(self) -> AbstractContextManager[Sandbox]:
        raise AssertionError("a sandbox is lent where a service is enough")

    def waiting(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def cancelled(self) -> bool:
        return False

    def ask(self, endpoint: Endpoint, data: Mapping[str, Any], read: Callable[[Any], Any]) -> Any:
        return self.services.ask(endpoint, data, read, self.cancelled)


def grade(task: Task, completion: str, *, sandbox: Sandbox, **answer: Any) -> Verdict:
    reward = Reward(parts=[Part(name="task", weight=1.0, task=task)])
    return grade_reward(reward, Answer(completion=completion, **answer), OneSandbox(sandbox))
