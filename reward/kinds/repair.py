"""The kind `repair`: write code, read which public test it fails, and try again; hidden tests decide.

    {"kind": "repair", "public": {"kind": "calls", ...}, "hidden": {"kind": "calls", ...}}

`public` and `hidden` are tasks of the kinds `calls`, `stdio` or `asserts`. A turn that fails a public test is answered with the
reason of the failure. A turn that passes them all, or the last one (`rollout.max_turns`), is graded by the hidden tests. The
figure `repairs` counts the turns that were answered. No state is kept between turns, so any judge can answer any turn.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from reward.kinds.asserts import read_asserts_task
from reward.kinds.calls import read_calls_task
from reward.kinds.code_task import CodeTask
from reward.kinds.fields import refuse_unknown
from reward.kinds.kind import Answer, Defaults, Reply, Resources, Task, TaskError
from reward.kinds.stdio import read_stdio_task
from rollout.ledger.records import Verdict

CODE_KINDS: Mapping[str, Callable[[Mapping[str, Any], Defaults], CodeTask]] = {
    "calls": read_calls_task,
    "stdio": read_stdio_task,
    "asserts": read_asserts_task,
}
FEEDBACK = "Your code fails a test: {reason}. Write the whole corrected code."


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairTask(Task):
    grades_code: ClassVar[bool] = True
    is_environment: ClassVar[bool] = True
    figures: ClassVar[Mapping[str, float]] = {"repairs": 0.0}

    public: CodeTask
    hidden: CodeTask

    def grade(self, answer: Answer, resources: Resources) -> Verdict | Reply:
        if not answer.episode.last:
            seen = self.public.grade(answer, resources)
            if seen.reason:
                feedback = FEEDBACK.format(reason=seen.reason)
                return Reply(messages=[{"role": "user", "content": feedback}], parts={"repairs": 1.0})
        return self.hidden.grade(answer, resources)


def read_repair_task(data: Mapping[str, Any], defaults: Defaults) -> RepairTask:
    refuse_unknown(data, "public", "hidden")
    return RepairTask(public=_read_tests(data, "public", defaults), hidden=_read_tests(data, "hidden", defaults))


def _read_tests(data: Mapping[str, Any], field: str, defaults: Defaults) -> CodeTask:
    task = data.get(field)
    if not isinstance(task, Mapping) or task.get("kind") not in CODE_KINDS:
        raise TaskError(f"task.{field}: must be a task of one of the kinds {', '.join(CODE_KINDS)}")
    try:
        return CODE_KINDS[task["kind"]](task, defaults)
    except TaskError as error:
        raise TaskError(f"task.{field}{str(error).removeprefix('task')}") from None
