"""The kind `length`: 1 at a number of tokens, falling linearly to 0 at the limits on both sides.

{"kind": "length", "target": 300, "most": 600}                  1 up to 300 tokens, 0.5 at 450, 0 from 600 on
{"kind": "length", "target": 300, "most": 600, "least": 100}    0 up to 100 tokens too
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from reward.kinds.fields import read_count, refuse_unknown
from reward.kinds.kind import Answer, Defaults, Resources, Task, TaskError
from rollout.ledger.records import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthTask(Task):
    grades_truncated: ClassVar[bool] = True

    target: int
    most: int
    least: int | None

    def grade(self, answer: Answer, resources: Resources) -> Verdict:
        tokens = answer.count_tokens()
        reward = 1.0
        if tokens > self.target:
            reward = max(0.0, (self.most - tokens) / (self.most - self.target))
        elif self.least is not None and tokens < self.target:
            reward = max(0.0, (tokens - self.least) / (self.target - self.least))
        return Verdict(reward=reward, reason="" if reward == 1.0 else f"{tokens} tokens, and {self.target} are wanted")


def read_length_task(data: Mapping[str, Any], defaults: Defaults) -> LengthTask:
    refuse_unknown(data, "target", "most", "least")
    target, most = read_count(data.get("target"), "target"), read_count(data.get("most"), "most")
    least = None if data.get("least") is None else read_count(data["least"], "least", at_least=0)
    if most <= target:
        raise TaskError(f"task.most: {most} must be more than target, which is {target}")
    if least is not None and least >= target:
        raise TaskError(f"task.least: {least} must be less than target, which is {target}")
    return LengthTask(target=target, most=most, least=least)
