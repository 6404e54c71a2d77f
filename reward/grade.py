"""One completion in, one verdict out.

The verdict is taken by data only. The candidate's process gets inputs and never an expected value; what it prints or returns
comes back as data and is compared here. So nothing that the code does in its process can pass a test but the right answer.

`grade` raises `SandboxError` where the sandbox fails, which is no verdict; whatever the completion does is a verdict.
"""

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from reward import codec
from reward.asserts import AssertsGrader
from reward.compare import same_output
from reward.extract import Extracted, extract
from reward.sandbox import OUTPUT_BYTES, Allowance, End, Ending, Job, Sandbox, SandboxError
from reward.task import AssertsTask, CallsTask, CallTest, StdioTask, StdioTest, Task
from reward.usage import (
    INFRASTRUCTURE_RETRIES,
    MIN_CPU_S,
    Spoilt,
    Usage,
    bad_end,
    json_object,
    left,
    limits,
    program,
    retry_or_raise,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a completion is worth, and why."""

    reward: float  # 0 to 1
    parts: dict[str, float]  # named figures for the metrics
    passed: int
    total: int
    reason: str  # empty where every test passed
    cpu_s: float
    wall_s: float
    retries: int = 0  # runs that were repeated because of the host
    timed_out: bool = False


def grade(task: Task, completion_text: str, *, prefill: str = "", sandbox: Sandbox) -> Verdict:
    """Grades one completion. Raises SandboxError only where the sandbox itself fails again and again."""
    began_s = time.monotonic()
    usage = Usage()
    extracted = extract(completion_text, prefill=prefill)
    passed = 0
    if extracted.reason:
        usage.fail(extracted.reason)
    elif isinstance(task, StdioTask):
        passed = _grade_stdio(task, extracted, sandbox, usage)
    elif isinstance(task, CallsTask):
        passed = _CallsGrader(task, extracted, sandbox, usage).run()
    elif isinstance(task, AssertsTask):
        passed = AssertsGrader(task, extracted, sandbox, usage).run()
    else:
        raise TypeError(f"no grader for {type(task).__name__}")
    return _verdict(task, passed, usage, time.monotonic() - began_s)


def _verdict(task: Task, passed: int, usage: Usage, wall_s: float) -> Verdict:
    total = len(task.tests)  # type: ignore[attr-defined]
    fraction = passed / total
    reward = fraction if task.credit == "fraction" else float(passed == total)
    return Verdict(
        reward=reward,
        parts={"tests_passed": fraction, "all_passed": float(passed == total)},
        passed=passed,
        total=total,
        reason="" if passed == total else (usage.reasons[0] if usage.reasons else "not every test ran"),
        cpu_s=usage.cpu_s,
        wall_s=wall_s,
        retries=usage.retries,
        timed_out=usage.timed_out,
    )


# --- stdio: one job a test ---------------------------------------------------------------------------------------------


def _grade_stdio(task: StdioTask, extracted: Extracted, sandbox: Sandbox, usage: Usage) -> int:
    passed = 0
    for index, test in enumerate(task.tests):
        if usage.cpu_s >= task.cpu_limit_s:
            usage.timed_out = True
            usage.fail(f"test {index}: the completion's {task.cpu_limit_s:g} CPU-seconds were used up")
            break
        if _passes_stdio(task, test, index, extracted, sandbox, usage):
            passed += 1
        elif task.credit == "all":
            break
    return passed


def _passes_stdio(task: StdioTask, test: StdioTest, index: int, extracted: Extracted, sandbox: Sandbox, usage: Usage) -> bool:
    stdin = test.input.encode("utf-8", "surrogatepass")
    while True:
        allowance = Allowance(cpu_s=min(task.test_cpu_limit_s, left(task, usage)))
        job = sandbox.start(limits(task, usage), stdin=stdin)
        try:
            job.send(program(task, extracted, "stdio"))
            end = job.wait_end(allowance)
        except SandboxError as error:
            retry_or_raise(error, usage)
            continue
        usage.cpu_s += end.cpu_s
        if end.ending in (Ending.ASLEEP, Ending.STARVED) and usage.retries < INFRASTRUCTURE_RETRIES:
            usage.retries += 1
            continue
        break
    if reason := bad_end(end, allowance, usage) or _reported_error(job.take_frame()):
        return usage.fail(f"test {index}: {reason}")
    output = end.output.decode("utf-8", "replace")
    if not same_output(output, test.output, task.tolerance):
        return usage.fail(f"test {index}: printed {codec.shorten(output)}, expected {codec.shorten(test.output)}")
    return True


def _reported_error(frame: bytes | None) -> str:
    """What the job says it died of. It may lie, but only to its cost: nothing said here makes a test pass."""
    if frame is None:
        return ""
    try:
        error = json_object(frame).get("error")
    except codec.CodecError:
        return ""
    return str(error)[:400] if error else ""


# --- calls: one job for all tests, and another after each that kills it ---------------------------------------------------


class _CallsGrader:
    """Loads the code once and asks for one result at a time."""

    def __init__(self, task: CallsTask, extracted: Extracted, sandbox: Sandbox, usage: Usage) -> None:
        self.task = task
        self.sandbox = sandbox
        self.usage = usage
        self.program = program(task, extracted, "calls", entry_point=task.entry_point)
        self.job: Job | None = None
        self.broken = False  # the code does not even load: no test can pass

    def run(self) -> int:
        passed = 0
        try:
            for index, test in enumerate(self.task.tests):
                if self._passes_with_retry(index, test):
                    passed += 1
                elif self.broken or self.task.credit == "all":
                    break
        finally:
            self._stop()
        return passed

    def _passes_with_retry(self, index: int, test: CallTest) -> bool:
        while True:
            try:
                return self._passes(index, test)
            except Spoilt as spoilt:
                if self.usage.retries >= INFRASTRUCTURE_RETRIES:
                    self.usage.timed_out = True
                    return self.usage.fail(f"test {index}: {spoilt.reason}")
                self.usage.retries += 1
            except SandboxError as error:
                self.job = None
                retry_or_raise(error, self.usage)

    def _passes(self, index: int, test: CallTest) -> bool:
        used_s = self.usage.cpu_s + (self.job.cpu_s() if self.job is not None else 0.0)
        if used_s >= self.task.cpu_limit_s:
            self.broken = self.usage.timed_out = True
            return self.usage.fail(f"test {index}: the completion's {self.task.cpu_limit_s:g} CPU-seconds were used up")
        if self.job is None and (reason := self._load()):
            self.broken = True
            return self.usage.fail(reason)
        if self.job is None:
            return False
        self.job.send({"args": test.args, "kwargs": test.kwargs})
        answer = self._wait(answer_bytes=2 * len(codec.dumps(test.expected)) + OUTPUT_BYTES)
        if isinstance(answer, str):
            return self.usage.fail(f"test {index}: {answer}")
        if "ok" not in answer:
            return self.usage.fail(f"test {index}: {str(answer.get('error', 'no result'))[:400]}")
        result, expected = answer["ok"], test.expected
        try:
            if codec.matches(result, expected, self.task.tolerance):
                return True
        except codec.CodecError as error:
            return self.usage.fail(f"test {index}: returned {error}")
        shown = f"returned {codec.shorten(result)}, expected {codec.shorten(codec.encode(expected))}"
        return self.usage.fail(f"test {index}: {shown}")

    def _load(self) -> str:
        """Starts a job and loads the code in it; why that failed, or nothing."""
        self.job = self.sandbox.start(limits(self.task, self.usage))
        self.job.send(self.program)
        answer = self._wait(answer_bytes=OUTPUT_BYTES)
        if isinstance(answer, str):
            return answer
        return str(answer.get("error", "the code did not load"))[:400] if "ok" not in answer else ""

    def _wait(self, *, answer_bytes: int) -> dict[str, Any] | str:
        """The job's answer, or why there will be none."""
        if self.job is None:
            return "there is no job"
        allowance = Allowance(
            cpu_s=min(self.task.test_cpu_limit_s, max(MIN_CPU_S, left(self.task, self.usage) - self.job.cpu_s())),
            answer_bytes=answer_bytes,
        )
        frame = self.job.wait_frame(allowance)
        if isinstance(frame, End):
            self.job = None
            self.usage.cpu_s += frame.cpu_s
            reason = bad_end(frame, allowance, self.usage) or "the program ended itself"
            if frame.ending in (Ending.ASLEEP, Ending.STARVED):
                raise Spoilt(reason)
            return reason
        try:
            answer = json_object(frame)
        except codec.CodecError as error:
            return f"answered with what is {error}"
        return answer

    def _stop(self) -> None:
        if self.job is not None:
            job, self.job = self.job, None
            with suppress(SandboxError):  # what it returned is already judged
                self.usage.cpu_s += job.stop().cpu_s
