"""One completion in, one verdict out: the weighted sum of the parts of a reward.

The verdict is taken by data only. The candidate's process gets inputs and never an expected value; what it prints or returns
comes back as data and is compared outside. So nothing that the code does in its process can pass a test but the right answer.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from reward.kinds.kind import Answer, Resources, Task
from rollout.ledger.records import Finish, Verdict

REASON_CHARACTERS = 500
TRUNCATED = "the completion reached its cap"


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
        verdicts = [Verdict(reward=0.0, parts=part.task.figures) for part in self.parts]
        return replace(_sum(self.parts, verdicts, truncated=False), reason=printable(reason)[:REASON_CHARACTERS], wall_s=wall_s)


def grade(reward: Reward, answer: Answer, resources: Resources) -> Verdict:
    """Grades one completion. Raises SandboxError only where the sandbox itself fails again and again, which is no verdict."""
    truncated = answer.finish is Finish.LENGTH
    verdicts = []
    for part in reward.parts:
        began_s = time.monotonic()
        if truncated and not part.task.grades_truncated:
            verdict = Verdict(reward=reward.truncated_reward, parts=part.task.figures, reason=TRUNCATED)
        else:
            verdict = part.task.grade(answer, resources)
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
