"""One completion in, one verdict out: the weighted sum of the parts of a reward.

The verdict is taken by data only. The candidate's process gets inputs and never an expected value; what it prints or returns
comes back as data and is compared outside. docs/reward.md says what a test can still be made to believe.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from reward.kinds.kind import Answer, Reply, Resources, Task
from rollout.ledger.records import Finish, Verdict

REASON_CHARACTERS = 500
TRUNCATED = "the completion reached its cap"
NO_MORE_TURNS = "the environment asked for another turn, and none is left (rollout.max_turns)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a reward."""

    name: str
    weight: float
    task: Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """How the completions of one problem are graded: at least one part, each with its own name."""

    parts: Sequence[Part]
    truncated_reward: float = 0.0  # what a part gives for a truncated completion that it does not grade

    @property
    def grades_code(self) -> bool:
        return any(part.task.grades_code for part in self.parts)

    def ungraded(self, reason: str, *, wall_s: float) -> Verdict:
        """The verdict where the grader failed. It has the same figures as any other, all of them 0."""
        return self._without_grade(0.0, reason, truncated=False, wall_s=wall_s)

    def cut_short(self, reason: str, *, wall_s: float = 0.0) -> Verdict:
        """The verdict on an episode that reached a limit before its environment gave one."""
        return self._without_grade(self.truncated_reward, reason, truncated=True, wall_s=wall_s)

    def _without_grade(self, reward: float, reason: str, *, truncated: bool, wall_s: float) -> Verdict:
        verdicts = [Verdict(reward=reward, parts=part.task.figures) for part in self.parts]
        return replace(
            _sum(self.parts, verdicts, truncated=truncated), reason=printable(reason)[:REASON_CHARACTERS], wall_s=wall_s
        )


def grade(reward: Reward, answer: Answer, resources: Resources) -> Verdict:
    """Grades a completion that takes no further turn. Raises as `step` does."""
    found = step(reward, answer, resources)
    return found if isinstance(found, Verdict) else reward.cut_short(NO_MORE_TURNS)


def step(reward: Reward, answer: Answer, resources: Resources) -> Verdict | Reply:
    """Answers one turn: with a verdict, or with a reply after which the model takes another turn. A reward without an environment
    is the verdict of the first turn. Raises EpisodeLost, and SandboxError only where the sandbox itself fails again and again."""
    truncated = answer.finish is Finish.LENGTH
    verdicts = []
    for part in reward.parts:
        began_s = time.monotonic()
        if truncated and not part.task.grades_truncated:
            verdict = Verdict(reward=reward.truncated_reward, parts=part.task.figures, reason=TRUNCATED)
        else:
            found = part.task.grade(answer, resources)
            if isinstance(found, Reply):  # an environment is the first part
                return found
            verdict = found
        verdicts.append(replace(verdict, wall_s=time.monotonic() - began_s))
    return _sum(reward.parts, verdicts, truncated=truncated)


def _sum(parts: Sequence[Part], verdicts: Sequence[Verdict], *, truncated: bool) -> Verdict:
    figures = {part.name: verdict.reward for part, verdict in zip(parts, verdicts, strict=True)}
    figures["truncated"] = float(truncated)
    reasons = []
    for part, verdict in zip(parts, verdicts, strict=True):
        for name, value in verdict.parts.items():
            figures[f"{part.name}/{name}" if name in figures else name] = value
        if verdict.reason:
            reasons.append(f"{part.name}: {verdict.reason}" if len(parts) > 1 else verdict.reason)
    return Verdict(
        reward=sum(part.weight * verdict.reward for part, verdict in zip(parts, verdicts, strict=True)),
        parts=figures,
        reason=printable("; ".join(dict.fromkeys(reasons)))[:REASON_CHARACTERS],
        cpu_s=sum(verdict.cpu_s for verdict in verdicts),
        wall_s=sum(verdict.wall_s for verdict in verdicts),
    )


def printable(text: str) -> str:
    """The text with everything escaped that is no printable character. A reason holds text of the candidate's, and a terminal
    obeys control characters, and no message can carry half of a surrogate pair."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
