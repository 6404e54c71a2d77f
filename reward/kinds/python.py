"""The kind `python`: a function of the user's own.

    {"kind": "python", "function": "my_rewards:brevity", "deadline_s": 10, "jail": false}

The function is given what it names of `prompt`, `completion`, `answer` (without reasoning), `prefill`, `metadata`, `finish` and
`tokens`. It returns a finite number, or a number and a dict of further figures. It runs in a process of the judge's pool, or with
`"jail": true` in the sandbox. A call that fails gives 0 and the reason, and the part `function_failed` counts it.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from conf.schema import ConfigError
from conf.user_code import NAME
from reward.jail import codec
from reward.jail.limits import End
from reward.kinds.fields import read_count, read_flag, read_positive, refuse_unknown
from reward.kinds.functions.returned import BadReward, Returned, read_returned
from reward.kinds.kind import Answer, Defaults, Resources, Task, TaskError
from reward.kinds.thoughts import Tags, answer_after
from reward.kinds.usage import Usage, bad_end, json_object
from reward.sandbox.sandbox import Sandbox
from rollout.ledger.records import Verdict

FIELDS = ("function", "deadline_s", "jail", "cpu_limit_s", "memory_limit_mb")
DEADLINE_S = 10.0
CALLER = """

def _call_with(given):
    import asyncio, inspect
    known = inspect.signature({function}).parameters.values()
    names = set(given) if any(one.kind is one.VAR_KEYWORD for one in known) else {{one.name for one in known}}
    found = {function}(**{{name: value for name, value in given.items() if name in names}})
    return asyncio.run(found) if inspect.iscoroutine(found) else found
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonTask(Task):
    grades_truncated: ClassVar[bool] = True
    figures: ClassVar[Mapping[str, float]] = {"function_failed": 0.0}

    function: str  # module:function
    deadline_s: float
    jail: bool
    cpu_limit_s: float  # in the jail
    memory_limit_mb: int  # in the jail
    reasoning: tuple[Tags, ...]

    def grade(self, answer: Answer, resources: Resources) -> Verdict:
        given = {
            "prompt": answer.prompt,
            "completion": answer.completion,
            "answer": answer_after(answer.text, self.reasoning),
            "prefill": answer.prefill,
            "metadata": answer.metadata,
            "finish": answer.finish.value,
            "tokens": answer.tokens,
        }
        found = self._in_sandbox(given, resources) if self.jail else self._in_pool(given, resources)
        return Verdict(
            reward=found.reward,
            parts={"function_failed": float(bool(found.error)), **found.parts},
            reason=f"{self.function}: {found.error}" if found.error else "",
            cpu_s=found.cpu_s,
        )

    def _in_pool(self, given: Mapping[str, Any], resources: Resources) -> Returned:
        functions = resources.functions
        with resources.waiting() if functions.is_quick() else nullcontext():
            return functions.call(self.function, given, deadline_s=self.deadline_s, cancelled=resources.cancelled)

    def _in_sandbox(self, given: Mapping[str, Any], resources: Resources) -> Returned:
        usage = Usage(cpu_limit_s=self.cpu_limit_s, memory_bytes=self.memory_limit_mb << 20)
        try:
            source = resources.functions.source(self.function) + CALLER.format(function=self.function.partition(":")[2])
            with resources.sandbox() as sandbox:
                found = self._run(source, codec.encode(given), sandbox, usage)
            return replace(read_returned(found), cpu_s=usage.cpu_s)
        except (BadReward, ConfigError, codec.CodecError) as error:
            return Returned(error=str(error), cpu_s=usage.cpu_s)

    def _run(self, source: str, given: Any, sandbox: Sandbox, usage: Usage) -> Any:
        """What the function returns. Raises BadReward, CodecError and SandboxError."""
        job = sandbox.start(usage.limits())
        program = {"kind": "calls", "setup": "", "code": source, "trim": False, "entry_point": "_call_with", "calls": 1}
        job.send(program, {"args": [given], "kwargs": {}})
        answer: dict[str, Any] = {}
        for _ in ("the program", "the call"):
            allowance = usage.allowance(self.cpu_limit_s, running_cpu_s=job.cpu_s())
            frame = job.wait_frame(allowance)
            if isinstance(frame, End):
                usage.add(frame)
                raise BadReward(bad_end(frame, allowance, usage) or "ended its process")
            answer = json_object(frame)
            if "ok" not in answer:
                break
        usage.add(job.stop())
        if "ok" not in answer:
            raise BadReward(str(answer.get("error", "no result"))[:400])
        return codec.decode(answer["ok"])


def read_python_task(data: Mapping[str, Any], defaults: Defaults) -> PythonTask:
    refuse_unknown(data, *FIELDS)
    return PythonTask(
        function=read_function(data.get("function"), "function", defaults),
        deadline_s=read_positive(data.get("deadline_s", DEADLINE_S), "deadline_s"),
        jail=read_flag(data.get("jail", False), "jail"),
        cpu_limit_s=read_positive(data.get("cpu_limit_s", defaults.cpu_limit_s), "cpu_limit_s"),
        memory_limit_mb=read_count(data.get("memory_limit_mb", defaults.memory_limit_mb), "memory_limit_mb", at_least=16),
        reasoning=defaults.reasoning,
    )


def read_function(name: object, field: str, defaults: Defaults) -> str:
    """The name of a user's function or class. Raises TaskError."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise TaskError(f"task.{field}: {name!r:.80} must be module:{field}, as in my_rewards:brevity")
    if defaults.functions is not None and name not in defaults.functions:
        raise TaskError(f"task.{field}: {name} is not named in reward.functions: add it there, so that the run keeps its code")
    return name
