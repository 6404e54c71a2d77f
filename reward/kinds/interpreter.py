"""The kind `interpreter`: the model may run Python before it answers, and another kind grades the answer.

    {"kind": "interpreter", "answer": {"kind": "math", "answer": "57"}}

The model has one tool, `python`, whose argument `code` runs in the sandbox. It reads what the code prints, the value of a last
expression, and the error. Names live on from call to call, because each call first repeats the earlier calls of the episode,
silently. So no state is kept between turns, any judge can answer any turn, and `cpu_limit_s` is for all calls together. A turn
without a call is graded by `answer`, a task of the kind `math`, `calls`, `stdio` or `asserts`. The last turn
(`rollout.max_turns`) must be one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from reward.jail import codec
from reward.kinds.fields import read_positive, refuse_unknown
from reward.kinds.kind import Answer, Defaults, Reply, Resources, Task, TaskError
from reward.kinds.math import read_math_task
from reward.kinds.repair import CODE_KINDS
from reward.kinds.thoughts import Tags, answer_after
from reward.kinds.tool_calls import ToolCall, read_calls, tool_message
from reward.kinds.usage import Usage, bad_end, json_object, run_to_end
from rollout.ledger.records import Verdict

TOOL = "python"
ANSWER_KINDS: Mapping[str, Callable[[Mapping[str, Any], Defaults], Task]] = {"math": read_math_task, **CODE_KINDS}
MOST_CHARACTERS = 4000  # of one answer that the model reads
NO_ANSWER = "the last turn calls a tool and gives no answer (rollout.max_turns)"
PROGRAM = """
import ast, contextlib, io

def _run(cell, names):
    tree = ast.parse(cell, "cell.py")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell.py", "exec"), names)
    if last is not None and (value := eval(compile(ast.Expression(last.value), "cell.py", "eval"), names)) is not None:
        print(repr(value))

def _run_all(earlier, cell):
    names = {"__name__": "__main__"}
    for one in earlier:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(BaseException):
            _run(one, names)
    _run(cell, names)

"""


@dataclass(frozen=True, slots=True, kw_only=True)
class InterpreterTask(Task):
    is_environment: ClassVar[bool] = True
    grades_code: ClassVar[bool] = True
    figures: ClassVar[Mapping[str, float]] = {"tool_calls": 0.0, "tool_errors": 0.0}

    answer: Task
    cpu_limit_s: float
    memory_limit_mb: int
    reasoning: tuple[Tags, ...]

    def grade(self, answer: Answer, resources: Resources) -> Verdict | Reply:
        calls = self._calls(answer.text)
        if not calls:
            verdict = self.answer.grade(answer, resources)
            return verdict if isinstance(verdict, Reply) else replace(verdict, parts={**self.figures, **verdict.parts})
        if answer.episode.last:
            return Verdict(reward=0.0, parts={**self.answer.figures, **self.figures}, reason=NO_ANSWER)
        earlier = [code for said in answer.episode.turns for call in self._calls(said) if (code := code_of(call)) is not None]
        messages, errors = [], 0
        for call in calls:
            said, failed = self._run(call, earlier, resources)
            messages.append(tool_message(TOOL, said))
            errors += failed
        return Reply(messages=messages, parts={"tool_calls": float(len(calls)), "tool_errors": float(errors)})

    def _calls(self, text: str) -> Sequence[ToolCall]:
        return read_calls(answer_after(text, self.reasoning) or "")

    def _run(self, call: ToolCall, earlier: list[str], resources: Resources) -> tuple[str, bool]:
        """What the model is told, and whether it is an error. The code is added to the earlier calls."""
        code = code_of(call)
        if code is None:
            return call.error or f'there is one tool, {TOOL}, with one argument, as in {{"code": "print(6 * 7)"}}', True
        program = f"{PROGRAM}_run_all({earlier!a}, {code!a})\n"
        earlier.append(code)
        usage = Usage(cpu_limit_s=self.cpu_limit_s, memory_bytes=self.memory_limit_mb << 20)
        with resources.sandbox() as sandbox:
            job, end, allowance = run_to_end(
                sandbox,
                usage,
                {"kind": "stdio", "setup": "", "code": program, "trim": False},
                test_cpu_limit_s=self.cpu_limit_s,
            )
        error = bad_end(end, allowance, usage) or _reported_error(job.take_frame())
        said = "\n".join(filter(None, (end.output.decode("utf-8", "replace").strip(), error)))
        return _shortened(said) or "(nothing was printed)", bool(error)


def code_of(call: ToolCall) -> str | None:
    """The code of a call that can be run."""
    code = call.arguments.get("code")
    return code if call.name == TOOL and len(call.arguments) == 1 and isinstance(code, str) else None


def read_interpreter_task(data: Mapping[str, Any], defaults: Defaults) -> InterpreterTask:
    refuse_unknown(data, "answer", "cpu_limit_s", "memory_limit_mb")
    answer = data.get("answer")
    if not isinstance(answer, Mapping) or answer.get("kind") not in ANSWER_KINDS:
        raise TaskError(f"task.answer: must be a task of one of the kinds {', '.join(ANSWER_KINDS)}")
    try:
        graded = ANSWER_KINDS[answer["kind"]](answer, defaults)
    except TaskError as error:
        raise TaskError(f"task.answer{str(error).removeprefix('task')}") from None
    return InterpreterTask(
        answer=graded,
        cpu_limit_s=read_positive(data.get("cpu_limit_s", defaults.cpu_limit_s), "cpu_limit_s"),
        memory_limit_mb=int(read_positive(data.get("memory_limit_mb", defaults.memory_limit_mb), "memory_limit_mb")),
        reasoning=defaults.reasoning,
    )


def _shortened(text: str) -> str:
    half = MOST_CHARACTERS // 2
    return text if len(text) <= MOST_CHARACTERS else f"{text[:half]}\n...\n{text[-half:]}"


def _reported_error(frame: bytes | None) -> str:
    """The error that the job reports. It may lie, but only to the model that wrote it."""
    if frame is None:
        return ""
    try:
        return str(json_object(frame).get("error") or "")[:MOST_CHARACTERS]
    except codec.CodecError:
        return ""
