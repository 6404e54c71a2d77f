r"""The kind `math`: the final answer of a completion must be the ground truth.

{"kind": "math", "answer": "\\frac{1}{2}", "format": "auto", "tolerance": 1e-6}

`answer` may be the answer alone, or a worked solution that ends in `\boxed{…}` (MATH) or `#### 42` (GSM8K). Numbers, letters and
answers that are written alike are compared here, exactly. All others are compared as mathematics in the sandbox
(`reward/jail/math_equality.py`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from reward.jail.codec import shorten
from reward.jail.limits import SandboxError
from reward.jail.math_equality import PACKAGES
from reward.kinds.code_task import read_tolerance
from reward.kinds.fields import read_positive, read_text, refuse_unknown
from reward.kinds.final_answer import FORMATS, boxed, final_answer, option_letter
from reward.kinds.kind import Answer, Defaults, Resources, Task, TaskError
from reward.kinds.numerals import Numeral, read_numeral, without_unit
from reward.kinds.thoughts import Tags, answer_after, never_ends
from reward.kinds.usage import Usage, bad_end, json_object, run_to_end
from rollout.ledger.records import Verdict

FIELDS = ("answer", "format", "tolerance", "cpu_limit_s", "memory_limit_mb")
MAX_ANSWER_CHARACTERS = 1000
MOST_CPU_S = 4.0  # where the task does not say otherwise; a comparison takes some ms, and simplifying a long term a second

_ALIKE = (
    (
        re.compile(r"(?<!\\)\\[!,;: ]|~|\\left(?![a-z])|\\right(?![a-z])|\\displaystyle|\\?\$|\^\s*(?:\\circ|\{\s*\\circ\s*\})"),
        "",
    ),
    (re.compile(r"\\[dtc]frac(?![a-z])"), r"\\frac"),
    (re.compile(r"\\(?:text|mbox|textbf|textit|textrm|mathrm|mathbf)\s*\{([^{}]*)\}"), r"\1"),
    (re.compile(r"(?<!\d)\s+|\s+(?!\d)"), ""),
    (re.compile(r"^\(([A-Za-z])\)$"), r"\1"),
)
_WORDS = re.compile(r"\\text\s*\{[^{}]*\}|[A-Za-z][A-Za-z' -]+[A-Za-z]")
_NAME = re.compile(r"\s*([A-Za-z](?:_\w|_\{\w+\})?)\s*=(?!=)\s*(.+)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class MathTask(Task):
    figures: ClassVar[Mapping[str, float]] = {"answered": 0.0, "timed_out": 0.0, "retries": 0.0}

    truth: str
    numeral: Numeral | None  # the number that the truth is
    form: str
    tolerance: float | None  # between two numbers, relative and absolute; None: exact
    cpu_limit_s: float
    memory_limit_mb: int
    reasoning: tuple[Tags, ...]

    def grade(self, answer: Answer, resources: Resources) -> Verdict:
        usage = Usage(cpu_limit_s=self.cpu_limit_s, memory_bytes=self.memory_limit_mb << 20)
        text = answer_after(answer.text, self.reasoning)
        found = final_answer(text or "", self.form)
        if text is None:
            usage.fail(never_ends(answer.text, self.reasoning))
        elif not found:
            usage.fail(f"no answer in the format {self.form!r}")
        elif len(found) > MAX_ANSWER_CHARACTERS:
            usage.fail(f"the answer has {len(found):,} characters, and more than {MAX_ANSWER_CHARACTERS:,} are not read")
        elif not self._is_right(found, resources, usage):
            usage.fail(f"answered {shorten(found)}, expected {shorten(self.truth)}")
        return Verdict(
            reward=float(not usage.reasons),
            parts={"answered": float(bool(found)), "timed_out": float(usage.timed_out), "retries": float(usage.retries)},
            reason=usage.reasons[0] if usage.reasons else "",
            cpu_s=usage.cpu_s,
        )

    def _is_right(self, found: str, resources: Resources, usage: Usage) -> bool:
        if self.form == "letter":
            return found == self.truth
        found, truth = _without_name(found, self.truth)
        numeral = read_numeral(found)
        if self.numeral is not None and (numeral is not None or self.form == "number"):
            return numeral is not None and self.numeral.equals(numeral, self.tolerance)
        if _written_alike(found, truth):
            return True
        return not _is_words(truth) and self._equal_as_mathematics(found, truth, resources, usage)

    def _equal_as_mathematics(self, found: str, truth: str, resources: Resources, usage: Usage) -> bool:
        program = {"kind": "math", "truth": without_unit(truth), "answer": without_unit(found)}
        with resources.sandbox(PACKAGES) as sandbox:
            job, end, allowance = run_to_end(sandbox, usage, program, test_cpu_limit_s=self.cpu_limit_s)
        if reason := bad_end(end, allowance, usage):
            return usage.fail(f"comparing {shorten(found)} with {shorten(truth)}: {reason}")
        if (frame := job.take_frame()) is None:
            raise SandboxError(f"a job that compares answers ended with status {end.status} and said nothing")
        said = json_object(frame)
        if unread := said.get("unread"):
            usage.fail(f"{shorten(found if unread == 'answer' else truth)} cannot be read as mathematics")
        return said.get("equal") is True


def read_math_task(data: Mapping[str, Any], defaults: Defaults) -> MathTask:
    refuse_unknown(data, *FIELDS)
    if (form := data.get("format", "auto")) not in FORMATS:
        raise TaskError(f"task.format: {form!r} is not known: use one of {', '.join(FORMATS)}")
    truth = _read_truth(data.get("answer"), form)
    cpu_limit_s = data.get("cpu_limit_s", min(defaults.cpu_limit_s, MOST_CPU_S))
    memory_limit_mb = data.get("memory_limit_mb", defaults.memory_limit_mb)
    numeral = read_numeral(_without_name(truth, "")[0])
    if form == "number" and numeral is None:
        raise TaskError(f"task.answer: {shorten(truth)} is not a number, so no answer in the format 'number' can be right")
    return MathTask(
        truth=truth,
        numeral=numeral,
        form=form,
        tolerance=read_tolerance(data),
        cpu_limit_s=read_positive(cpu_limit_s, "cpu_limit_s"),
        memory_limit_mb=int(read_positive(memory_limit_mb, "memory_limit_mb")),
        reasoning=defaults.reasoning,
    )


def _read_truth(value: object, form: str) -> str:
    text = str(value) if isinstance(value, int | float) and not isinstance(value, bool) else read_text(value, "task.answer")
    truth = (boxed(text) or text.rpartition("####")[2]).strip().strip("$").strip()
    if form == "letter":
        truth = option_letter(truth)
    if not truth:
        raise TaskError(f"task.answer: {shorten(text)} holds no answer" + " that is a letter from A to Z" * (form == "letter"))
    if len(truth) > MAX_ANSWER_CHARACTERS:
        raise TaskError(f"task.answer: has {len(truth):,} characters, and more than {MAX_ANSWER_CHARACTERS:,} are not compared")
    return truth


def _without_name(found: str, truth: str) -> tuple[str, str]:
    """`x = 5` says 5 if the other one says so too, or is no equation."""
    named, truth_named = _NAME.fullmatch(found), _NAME.fullmatch(truth)
    if named and truth_named:
        return (named[2], truth_named[2]) if named[1] == truth_named[1] else (found, truth)
    return (
        named[2] if named and "=" not in truth else found,
        truth_named[2] if truth_named and "=" not in found else truth,
    )


def _written_alike(found: str, truth: str) -> bool:
    """Whether they differ in nothing but spaces, sizes, fonts, degrees and currencies, or in the case of words."""
    bare, bare_truth = _bare(found), _bare(truth)
    return bare == bare_truth or (_is_words(truth) and bare.casefold() == bare_truth.casefold())


def _bare(text: str) -> str:
    for pattern, replacement in _ALIKE:
        text = pattern.sub(replacement, text.strip().rstrip("."))
    return text


def _is_words(text: str) -> bool:
    return _WORDS.fullmatch(text.strip().rstrip(".")) is not None
