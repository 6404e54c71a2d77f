"""One completion in, one verdict out.

The verdict is taken by data only. The candidate's process gets inputs and never an expected value; what it prints or returns
comes back as data and is compared outside. So nothing that the code does in its process can pass a test but the right answer.
"""

import time
from dataclasses import replace

from reward.kinds.kind import Answer, Task
from reward.sandbox.sandbox import Sandbox
from rollout.ledger.records import Verdict

REASON_CHARACTERS = 500


def grade(task: Task, completion: str, *, prefill: str = "", sandbox: Sandbox) -> Verdict:
    """Grades one completion. Raises SandboxError only where the sandbox itself fails again and again, which is no verdict."""
    began_s = time.monotonic()
    verdict = task.grade(Answer(completion=completion, prefill=prefill), sandbox)
    return replace(verdict, reason=printable(verdict.reason)[:REASON_CHARACTERS], wall_s=time.monotonic() - began_s)


def printable(text: str) -> str:
    """The text with everything escaped that is no printable character. A reason holds text of the candidate's, and a terminal
    obeys control characters, and no message can carry half of a surrogate pair."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
