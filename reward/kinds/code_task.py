"""What all kinds that grade code share: their fields, taking code out of a completion, and counting the tests that pass."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from reward.kinds.extract import Extracted, extract
from reward.kinds.fields import read_positive, read_text, refuse_unknown
from reward.kinds.interface import defines
from reward.kinds.kind import Answer, Defaults, Resources, Task, TaskError
from reward.kinds.thoughts import KNOWN, Tags
from reward.kinds.usage import Usage
from reward.sandbox.sandbox import Sandbox
from rollout.ledger.records import Verdict

CREDITS = ("all", "fraction")
FIELDS = frozenset(("kind", "tests", "setup", "cpu_limit_s", "test_cpu_limit_s", "memory_limit_mb", "credit"))
LEAST_MEMORY_MB = 16  # Python itself needs some


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTask(Task):
    """Code that a model wrote, and tests that it must pass."""

    grades_code: ClassVar[bool] = True
    figures: ClassVar[Mapping[str, float]] = {"tests_passed": 0.0, "all_passed": 0.0, "timed_out": 0.0, "retries": 0.0}

    tests: Sequence[Any]
    setup: str  # code that runs before the candidate's: imports, helpers of the prompt
    cpu_limit_s: float  # for all tests of a completion together
    test_cpu_limit_s: float  # for one test
    memory_limit_mb: int
    credit: str  # all | fraction
    reasoning: tuple[Tags, ...] = KNOWN

    def grade(self, answer: Answer, resources: Resources) -> Verdict:
        usage = Usage(cpu_limit_s=self.cpu_limit_s, memory_bytes=self.memory_limit_mb << 20)
        extracted = extract(answer.completion, prefill=answer.prefill, defines=self.defines, tags=self.reasoning)
        passed = 0
        if extracted.reason:
            usage.fail(extracted.reason)
        else:
            with resources.sandbox() as sandbox:
                passed = self.count_passed(extracted, sandbox, usage)
        return self._verdict(passed, usage)

    @property
    def defines(self) -> str:
        """The function or class that the tests ask for, where they name one."""
        return ""

    @abstractmethod
    def count_passed(self, extracted: Extracted, sandbox: Sandbox, usage: Usage) -> int:
        """Runs the tests and says how many passed; notes in `usage` why others did not."""

    def program(self, extracted: Extracted, kind: str, **more: str) -> dict[str, Any]:
        """The message that makes a job load the candidate's code."""
        return {"kind": kind, "setup": self.setup, "code": extracted.code, "trim": extracted.open_ended, **more}

    def _verdict(self, passed: int, usage: Usage) -> Verdict:
        fraction, all_passed = passed / len(self.tests), passed == len(self.tests)
        return Verdict(
            reward=fraction if self.credit == "fraction" else float(all_passed),
            parts={
                "tests_passed": fraction,
                "all_passed": float(all_passed),
                "timed_out": float(usage.timed_out),
                "retries": float(usage.retries),
            },
            reason="" if all_passed else (usage.reasons[0] if usage.reasons else "not every test ran"),
            cpu_s=usage.cpu_s,
        )


def read_shared(data: Mapping[str, Any], defaults: Defaults, *more_fields: str) -> dict[str, Any]:
    """The fields that all these tasks have, `tests` unread. Raises TaskError, also for a field that is neither one of these nor
    one of `more_fields`."""
    refuse_unknown(data, *FIELDS, *more_fields)
    if not isinstance(data.get("tests"), list) or not data["tests"]:
        raise TaskError("task.tests: must be a list of at least one test: a problem without tests cannot be graded")
    setup = read_text(data.get("setup", ""), "task.setup")
    try:
        compile(setup, "setup.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise TaskError(f"task.setup: must be Python code: {error}") from None
    if (credit := data.get("credit", defaults.credit)) not in CREDITS:
        raise TaskError(f"task.credit: {credit!r} is not known: use one of {', '.join(CREDITS)}")
    cpu_limit_s = read_positive(data.get("cpu_limit_s", defaults.cpu_limit_s), "cpu_limit_s")
    test_cpu_limit_s = read_positive(data.get("test_cpu_limit_s", cpu_limit_s), "test_cpu_limit_s")
    memory_limit_mb = int(read_positive(data.get("memory_limit_mb", defaults.memory_limit_mb), "memory_limit_mb"))
    if memory_limit_mb < LEAST_MEMORY_MB:
        raise TaskError(f"task.memory_limit_mb: {memory_limit_mb} is too little for Python: give at least {LEAST_MEMORY_MB}")
    return {
        "setup": setup,
        "cpu_limit_s": cpu_limit_s,
        "test_cpu_limit_s": min(test_cpu_limit_s, cpu_limit_s),
        "memory_limit_mb": memory_limit_mb,
        "credit": credit,
        "reasoning": defaults.reasoning,
    }


def read_tolerance(data: Mapping[str, Any]) -> float | None:
    if data.get("tolerance") is None:
        return None
    if (tolerance := read_positive(data["tolerance"], "tolerance")) >= 1:
        raise TaskError(f"task.tolerance: {tolerance:g} is relative too, so that 0 would pass for any number: give less than 1")
    return tolerance


def read_entry_point(name: object, setup: str) -> str:
    """A function's name, or a method's as `Solution.solve` or `Solution().solve`. The setup must not define it."""
    name = name.replace("().", ".") if isinstance(name, str) else name
    if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")) or name.count(".") > 1:
        raise TaskError(f"task.entry_point: {name!r} must name a function, or a method as in 'Solution.solve'")
    if defines(setup, name):
        raise TaskError(f"task.setup: it defines {name} itself, so an answer without code would pass: leave that out")
    return name


def read_object(test: object, where: str, *, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> dict[str, Any]:
    """A test that is an object with these fields."""
    if not isinstance(test, dict):
        raise TaskError(f"{where}: must be an object, got {type(test).__name__}")
    for name in required:
        if name not in test:
            raise TaskError(f"{where}.{name}: is missing")
    if unknown := sorted(set(test) - {*required, *optional}):
        raise TaskError(f"{where}.{unknown[0]}: no such field: a test has {', '.join((*required, *optional))}")
    return test
