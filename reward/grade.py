"""One completion in, one verdict out.

The verdict is taken by data only. The candidate's process gets inputs and never an expected value; what it prints or returns
comes back as data and is compared here. So nothing that the code does in its process can pass a test but the right answer.

`grade` raises `SandboxError` where the sandbox fails, which is no verdict; whatever the completion does is a verdict.
"""

import time
from contextlib import suppress
from dataclasses import dataclass

from reward.jail import codec
from reward.jail.limits import Allowance, Ending, SandboxError
from reward.kinds.asserts import AssertsGrader
from reward.kinds.calls import CallsGrader, NotData, of_call_test, of_claims
from reward.kinds.compare import same_output
from reward.kinds.extract import Extracted, extract
from reward.kinds.usage import INFRASTRUCTURE_RETRIES, Usage, bad_end, json_object, left, limits, program, retry_or_raise
from reward.sandbox.sandbox import Sandbox
from reward.task import AssertsTask, CallsTask, StdioTask, StdioTest, Task


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
        units = [of_call_test(test, task) for test in task.tests]
        passed = CallsGrader(task, units, extracted, sandbox, usage, entry_point=task.entry_point).run()
    elif isinstance(task, AssertsTask):
        passed = _grade_asserts(task, extracted, sandbox, usage)
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


def _grade_asserts(task: AssertsTask, extracted: Extracted, sandbox: Sandbox, usage: Usage) -> int:
    """By data alone where the tests are plain comparisons and results are data; in a jail of their own otherwise."""
    if task.called:
        units = [of_claims(unit.claims) for unit in task.tests]
        grader = CallsGrader(task, units, extracted, sandbox, usage, entry_point=task.called, objects_fail=False)
        with suppress(NotData):
            return grader.run()
    return AssertsGrader(task, extracted, sandbox, usage).run()


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
