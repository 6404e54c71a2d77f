"""The kind `overlong`: the soft overlong punishment of DAPO (arXiv:2503.14476, equation 13).

    {"kind": "overlong", "buffer": 4096, "cap": 20480}    0 up to 16384 tokens, falling linearly to -1 at 20480

`cap` is `rollout.max_completion_tokens` where the task does not give it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from reward.kinds.fields import read_count, refuse_unknown
from reward.kinds.kind import Answer, Defaults, Resources, Task, TaskError
from rollout.ledger.records import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlongTask(Task):
    grades_truncated: ClassVar[bool] = True

    cap: int
    buffer: int

    def grade(self, answer: Answer, resources: Resources) -> Verdict:
        over = max(0, answer.count_tokens() - (self.cap - self.buffer))
        return Verdict(reward=-min(1.0, over / self.buffer), reason=f"{over} tokens lie in the buffer or beyond" if over else "")


def read_overlong_task(data: Mapping[str, Any], defaults: Defaults) -> OverlongTask:
    refuse_unknown(data, "buffer", "cap")
    if defaults.penalises_overlong:
        raise TaskError(
            "task.kind=overlong: algo.overlong_buffer_fraction lowers the reward of long completions already: "
            "set it to 0, or leave this part out"
        )
    cap = read_count(data.get("cap", defaults.max_completion_tokens), "cap")
    buffer = read_count(data.get("buffer"), "buffer")
    if buffer > cap:
        raise TaskError(f"task.buffer: {buffer} is more than cap, which is {cap}")
    return OverlongTask(cap=cap, buffer=buffer)
