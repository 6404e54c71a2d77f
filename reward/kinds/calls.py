"""The kind `calls`: one function, called once per check; what it returns is compared here, outside of its jail.

    {"kind": "calls", "entry_point": "f", "tests": [{"args": [2], "expected": 4}]}

Values in `args`, `kwargs` and `expected` are plain data in the JSON form of `reward/jail/codec.py`. Results are compared with
their exact types, or with `"match": "json"` as JSON would have them, for problem sets whose expected values come from JSON.

A job loads the code once and is sent all the calls that are still to be made at once, so that neither side waits for the other
and most jobs are over before the judge looks; each result has a limit of its own all the same. After a call that kills the job,
another job makes the rest.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from reward.jail import codec
from reward.jail.limits import OUTPUT_BYTES, End, Ending, SandboxError
from reward.kinds.claims import Claim
from reward.kinds.code_task import CodeTask, read_entry_point, read_object, read_shared, read_tolerance
from reward.kinds.compare_data import in_json, matches
from reward.kinds.extract import Extracted
from reward.kinds.kind import Defaults, TaskError
from reward.kinds.usage import (
    INFRASTRUCTURE_RETRIES,
    Spoilt,
    Usage,
    bad_end,
    json_object,
    retry_or_raise,
)
from reward.sandbox.job import Job
from reward.sandbox.sandbox import Sandbox

MATCHES = ("exact", "json")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTest:
    """One call. `args` and `kwargs` stay in their JSON form: only a job ever decodes them."""

    args: list[Any]
    kwargs: dict[str, Any]
    expected: object


@dataclass(frozen=True, slots=True, kw_only=True)
class CallsTask(CodeTask):
    tests: tuple[CallTest, ...]
    entry_point: str  # a function, or a method as in Solution.solve
    match: str  # exact: in type too | json: as JSON would have both
    tolerance: float | None  # relative and absolute; None: exact

    @property
    def defines(self) -> str:
        return self.entry_point.partition(".")[0]

    def count_passed(self, extracted: Extracted, sandbox: Sandbox, usage: Usage) -> int:
        units = [of_call_test(test, self) for test in self.tests]
        return CallsGrader(self, units, extracted, sandbox, usage, entry_point=self.entry_point).run()


def read_calls_task(data: Mapping[str, Any], defaults: Defaults) -> CallsTask:
    shared = read_shared(data, defaults, "entry_point", "match", "tolerance")
    if (match := data.get("match", "exact")) not in MATCHES:
        raise TaskError(f"task.match: {match!r} is not known: use one of {', '.join(MATCHES)}")
    return CallsTask(
        tests=tuple(_read_test(test, f"task.tests[{index}]") for index, test in enumerate(data["tests"])),
        entry_point=read_entry_point(data.get("entry_point"), shared["setup"]),
        match=match,
        tolerance=read_tolerance(data),
        **shared,
    )


def _read_test(test: object, where: str) -> CallTest:
    fields = read_object(test, where, required=("expected",), optional=("args", "kwargs"))
    args, kwargs = fields.get("args", []), fields.get("kwargs", {})
    if not isinstance(args, list):
        raise TaskError(f"{where}.args: must be a list, got {type(args).__name__}")
    if not isinstance(kwargs, dict):
        raise TaskError(f"{where}.kwargs: must be an object, got {type(kwargs).__name__}")
    for name, value in (("args", args), *kwargs.items()):
        _decode(value, f"{where}.{name}")
    return CallTest(args=args, kwargs=kwargs, expected=_decode(fields["expected"], f"{where}.expected"))


def _decode(value: object, where: str) -> object:
    try:
        return codec.decode(value)
    except codec.CodecError as error:
        raise TaskError(f"{where}: {error}") from None


class NotData(Exception):
    """A call returned what no data can stand for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCheck:
    """One call and what its result has to be. `args` and `kwargs` are in their JSON form."""

    args: list[Any]
    kwargs: dict[str, Any]
    says: CallTest | Claim
    tolerance: float | None = None
    as_json: bool = False

    def holds(self, data: Any) -> bool:
        if isinstance(self.says, Claim):
            return self.says.holds(data)
        expected = self.says.expected
        if self.as_json:
            has_tolerance = self.tolerance is not None  # which applies to an expected 3.0, and to no expected 3
            data, expected = (
                in_json(data),
                codec.decode(in_json(codec.encode(expected), whole_floats=has_tolerance)),
            )
        return matches(data, expected, self.tolerance)


Unit = Sequence[CallCheck]
"""Checks that pass together or not at all."""


def of_call_test(test: CallTest, task: CallsTask) -> Unit:
    as_json = task.match == "json"
    return (CallCheck(args=test.args, kwargs=test.kwargs, says=test, tolerance=task.tolerance, as_json=as_json),)


def of_claims(claims: Sequence[Claim]) -> Unit:
    return [
        CallCheck(args=codec.encode(claim.args), kwargs={k: codec.encode(v) for k, v in claim.kwargs.items()}, says=claim)
        for claim in claims
    ]


class CallsGrader:
    """Takes the results of all units in order."""

    def __init__(
        self,
        task: CodeTask,
        units: Sequence[Unit],
        extracted: Extracted,
        sandbox: Sandbox,
        usage: Usage,
        *,
        entry_point: str,
        objects_fail: bool = True,  # otherwise NotData is raised
    ) -> None:
        self.task = task
        self.units = units
        self.sandbox = sandbox
        self.usage = usage
        self.objects_fail = objects_fail
        self.program = task.program(extracted, "calls", entry_point=entry_point)
        self.job: Job | None = None
        self.broken = False  # the code does not even load: no test can pass
        self.used_too_much = False  # memory, which the kernel tells at the end

    def run(self) -> int:
        passed = 0
        try:
            for index in range(len(self.units)):
                if self._passes_with_retry(index):
                    passed += 1
                elif self.broken or self.task.credit == "all":
                    break
        finally:
            self._stop()
        return 0 if self.used_too_much else passed

    def _passes_with_retry(self, index: int) -> bool:
        while True:
            try:
                return self._passes(index)
            except Spoilt as spoilt:
                if self.usage.retries >= INFRASTRUCTURE_RETRIES:
                    self.usage.timed_out = True
                    return self.usage.fail(f"test {index}: {spoilt.reason}")
                self.usage.retries += 1
            except SandboxError as error:
                self.job = None
                retry_or_raise(error, self.usage)

    def _passes(self, index: int) -> bool:
        if reason := self.usage.used_up(running_cpu_s=self.job.cpu_s() if self.job is not None else 0.0):
            self.broken = True
            return self.usage.fail(f"test {index}: {reason}")
        if self.job is None and (reason := self._load(index)):
            self.broken = True
            return self.usage.fail(reason)
        failed = ""
        for check in self.units[index]:
            if reason := self._why_not(check):
                failed = failed or f"test {index}: {reason}"
            if self.job is None or (failed and self.task.credit == "all"):
                break
        return not failed or self.usage.fail(failed)

    def _load(self, index: int) -> str:
        """Starts a job for the units from `index` on and loads the code in it; why that failed, or nothing."""
        self.job = self.sandbox.start(self.usage.limits())
        calls = [{"args": check.args, "kwargs": check.kwargs} for unit in self.units[index:] for check in unit]
        self.job.send({**self.program, "calls": len(calls)}, *calls)
        answer = self._wait(answer_bytes=OUTPUT_BYTES)
        if isinstance(answer, str):
            return answer
        return str(answer.get("error", "the code did not load"))[:400] if "ok" not in answer else ""

    def _why_not(self, check: CallCheck) -> str:
        """Why the next answer does not satisfy the check, or nothing."""
        is_there = self.job is not None and self.job.has_frame()
        answer = self._wait(answer_bytes=OUTPUT_BYTES if is_there else 2 * len(codec.dumps(check.says.expected)) + OUTPUT_BYTES)
        if isinstance(answer, str):
            return answer
        if "ok" not in answer:
            if answer.get("not_data") and not self.objects_fail:
                raise NotData
            return str(answer.get("error", "no result"))[:400]
        try:
            if check.holds(answer["ok"]):
                return ""
        except codec.CodecError as error:
            return f"returned {error}"
        return f"returned {codec.shorten(answer['ok'])}, expected {codec.shorten(codec.encode(check.says.expected))}"

    def _wait(self, *, answer_bytes: int) -> dict[str, Any] | str:
        """The job's answer, or why there will be none."""
        if self.job is None:
            return "there is no job"
        allowance = self.usage.allowance(self.task.test_cpu_limit_s, running_cpu_s=self.job.cpu_s(), answer_bytes=answer_bytes)
        frame = self.job.wait_frame(allowance)
        if isinstance(frame, End):
            self.job = None
            self.usage.add(frame)
            reason = bad_end(frame, allowance, self.usage) or "the program ended itself"
            if frame.ending in (Ending.ASLEEP, Ending.STARVED):
                raise Spoilt(reason)
            return reason
        try:
            return json_object(frame)
        except codec.CodecError as error:
            return f"answered with what is {error}"

    def _stop(self) -> None:
        if self.job is not None:
            job, self.job = self.job, None
            with suppress(SandboxError):  # what it returned is already judged
                end = job.stop()
                self.usage.add(end)
                if end.ending is Ending.MEMORY:
                    self.used_too_much = True
                    self.usage.fail(bad_end(end, self.usage.allowance(self.task.test_cpu_limit_s), self.usage))
