"""The turns of an episode, as a judge sees them: what was said before, what is allowed, and an answer as tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from reward.kinds.kind import Episode, Reply
from rollout.ledger.records import I32, Finish, GradingWork, Observation

MOST_RESTARTS = 3  # an episode whose environment was lost more often gets no reward


class Renderer(Protocol):
    """What a judge asks of `rollout.prompts.suffix.SuffixRenderer`."""

    @property
    def prefill(self) -> str: ...

    def tokens(self, messages: Sequence[Mapping[str, Any]], end: int) -> I32: ...


class NoRoom(Exception):
    """An answer leaves no room for another turn. The message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """What a run allows an episode."""

    most: int = 1  # rollout.max_turns
    most_tokens: int = 0  # rollout.max_completion_tokens
    renderer: Renderer | None = None  # None where no turn follows another

    def episode(self, work: GradingWork) -> Episode:
        group, trajectory, _, attempt = work.position
        return Episode(
            key=f"{group}/{trajectory}/{attempt}",
            turns=work.turns[:-1],
            observations=work.observations,
            ends=work.ends[:-1],
            last=self.renderer is None or len(work.turns) >= self.most or work.finish is Finish.LENGTH,
            prefill=self.renderer.prefill if self.renderer else "",
        )

    def tokens(self, messages: Sequence[Mapping[str, Any]], end: int) -> I32:
        """Raises SuffixError, a ValueError, if the chat template refuses the messages."""
        if self.renderer is None:
            raise NoRoom("the run allows one turn only (rollout.max_turns)")
        return self.renderer.tokens(messages, end)

    def observation(self, work: GradingWork, reply: Reply, wall_s: float) -> Observation:
        """The answer to the turn that has just ended. Raises NoRoom, and SuffixError as `tokens` does."""
        tokens = self.tokens(reply.messages, work.ends[-1])
        if work.position.offset + len(tokens) >= self.most_tokens:
            raise NoRoom(
                f"an observation of {len(tokens)} tokens after {work.position.offset} leaves no room for another turn "
                f"(rollout.max_completion_tokens={self.most_tokens})"
            )
        return Observation(tokens=tokens, parts=reply.parts, wall_s=wall_s)
