"""What every kind of reward is: a task, read from the `task` object of a problem, that grades completions.

A new kind is one file in this folder and one line in the table of `reward/task.py`. Its file holds a `Task` and a function that
reads one.
"""

from dataclasses import dataclass
from typing import Protocol

from reward.sandbox.sandbox import Sandbox
from rollout.ledger.records import Verdict


class TaskError(ValueError):
    """A task that cannot be graded. The message says where it is wrong, what is wrong, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """The limits and the credit of a task that does not set them itself."""

    cpu_limit_s: float = 8.0
    memory_limit_mb: int = 1024
    credit: str = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a model wrote, and the beginning of it that the prompt already held."""

    completion: str
    prefill: str = ""


class Task(Protocol):
    """How the completions of one problem are graded."""

    def grade(self, answer: Answer, sandbox: Sandbox) -> Verdict:
        """A verdict, whatever the completion is. Its reason is empty where nothing failed. Raises SandboxError where the sandbox
        itself fails again and again."""
        ...
