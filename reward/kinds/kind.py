"""What every kind of reward is: a task, read from the `task` object of a problem, that grades completions.

A new kind is one file in this folder and one line in the table of `reward/task.py`. Its file holds a `Task` and a function that
reads one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

from reward.kinds.endpoint import Endpoint
from reward.kinds.functions.pool import FunctionPool
from reward.kinds.thoughts import KNOWN, Tags
from reward.sandbox.sandbox import Sandbox
from rollout.ledger.records import I32, Finish, Verdict

T = TypeVar("T")


class TaskError(ValueError):
    """A task that cannot be graded. The message says where it is wrong, what is wrong, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What a task gets from the run where it says nothing itself."""

    cpu_limit_s: float = 8.0
    memory_limit_mb: int = 1024
    credit: str = "all"
    truncated_reward: float = 0.0
    max_completion_tokens: int = 0  # 0: unknown
    penalises_overlong: bool = False  # whether algo.overlong_buffer_fraction lowers the rewards of the run already
    judge_model: bool = False  # whether the run serves one
    functions: frozenset[str] | None = None  # those that a task may name; None: any
    reasoning: tuple[Tags, ...] = KNOWN  # the tags around reasoning, which is no part of an answer
    parts: Mapping[str, Any] = field(default_factory=dict)  # further parts of every reward, by name


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a model wrote, and what it was asked."""

    completion: str
    prefill: str = ""  # the beginning of the answer, which the prompt already held
    prompt: str = ""  # what the problem asks, without the chat template
    metadata: Mapping[str, Any] = field(default_factory=dict)  # the problem's
    finish: Finish = Finish.STOP
    tokens: int | None = None  # how many were sampled; None where only the text is known, as in a file
    episode: "Episode" = field(default_factory=lambda: Episode())

    @property
    def text(self) -> str:
        return self.prefill + self.completion

    def count_tokens(self) -> int:
        """The tokens of the completion. Raises TaskError where only its text is known."""
        if self.tokens is None:
            raise TaskError("task: the number of tokens of this completion is not known: give it as `tokens` beside `completion`")
        return self.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """The turns before the one that has just ended."""

    key: str = ""  # no other episode of the run has it
    turns: Sequence[str] = ()  # what the model wrote, without what the prompt already held
    observations: Sequence[I32] = ()  # the tokens that followed each of them
    ends: Sequence[int] = ()  # the token that ended each of them
    last: bool = True  # no further turn may follow: `rollout.max_turns`, or the completion reached its cap
    prefill: str = ""  # the beginning of each turn but the first


class EpisodeLost(Exception):
    """The environment of an episode cannot be rebuilt, so the episode begins again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What an environment answers to a turn; the model then takes another turn."""

    messages: Sequence[Mapping[str, Any]]
    parts: Mapping[str, float] = field(default_factory=dict)  # figures, which are summed over the episode


class Resources(Protocol):
    """What a judge lends to a task while it grades one completion."""

    @property
    def functions(self) -> FunctionPool:
        """Runs users' functions."""
        ...

    def sandbox(self, packages: Sequence[str] = ()) -> AbstractContextManager[Sandbox]:
        """Lends one of the judge's warm sandboxes, with these packages, or with those of the setting `reward.packages`. It may
        take a while until one is free."""
        ...

    def waiting(self) -> AbstractContextManager[None]:
        """To be held while the task waits for something outside of the judge, such as a service: the judge then grades another
        completion in the meantime. Do not hold it together with a sandbox."""
        ...

    def ask(self, endpoint: Endpoint, data: Mapping[str, Any], read: Callable[[Any], T]) -> T:
        """What `read` makes of a service's answer; the judge grades another completion in the meantime. Waits for as long as the
        service cannot be reached. Raises Cancelled, and ContractError if no answer to this item is what `read` accepts."""
        ...

    def observe(self, messages: Sequence[Mapping[str, Any]], end: int) -> I32:
        """The tokens of these messages, behind a turn that the token `end` has ended. Raises ValueError where
        the chat template refuses them."""
        ...

    def cancelled(self) -> bool:
        """Whether the verdict is no longer wanted. A task that waits should look about once per second, and raise Cancelled."""
        ...


class Task(ABC):
    """How the completions of one problem are graded."""

    __slots__ = ()

    grades_truncated: ClassVar[bool] = False
    """Whether it grades a completion that reached its cap. Otherwise such a completion gets `reward.truncated_reward`."""

    grades_code: ClassVar[bool] = False
    """Whether the answer is a program, which runs in a sandbox."""

    figures: ClassVar[Mapping[str, float]] = {}
    """The parts that each of its verdicts has, with their values for a completion that was not graded."""

    is_environment: ClassVar[bool] = False
    """Whether it may answer with a `Reply`. A reward has at most one such part."""

    @abstractmethod
    def grade(self, answer: Answer, resources: Resources) -> "Verdict | Reply":
        """A verdict, whatever the completion is. Its reason is empty where nothing failed. Raises SandboxError where the sandbox
        itself fails again and again."""
