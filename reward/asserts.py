"""Test code against a candidate, each in a jail of its own; the judge in between passes their messages on.

    tests' jail  ──ask──>  judge  ──ask──>  candidate's jail          (`reward.tester`)   (`reward.serve`)
                 <─reply─         <─reply──

The judge reads nothing of what the candidate says. Whatever ends the candidate ends the unit of tests, so its death is no
exception that a test could expect. The verdict comes from the tests' jail, over a channel that no print of theirs and nothing of
the candidate's can reach. Both sides have limits of their own.
"""

from contextlib import suppress
from typing import Any

from reward import codec
from reward.extract import Extracted
from reward.sandbox import Allowance, End, Ending, Job, Sandbox, SandboxError
from reward.task import AssertsTask, Unit
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
)

MESSAGES = 100_000  # of one unit of tests


class AssertsGrader:
    """Runs the units of tests in order, in the same two jails until one of them ends."""

    def __init__(self, task: AssertsTask, extracted: Extracted, sandbox: Sandbox, usage: Usage) -> None:
        self.task = task
        self.extracted = extracted
        self.sandbox = sandbox
        self.usage = usage
        self.candidate: Job | None = None
        self.tests: Job | None = None
        self.broken = False  # the code does not even load: no test can pass

    def run(self) -> int:
        passed = 0
        try:
            for index, unit in enumerate(self.task.tests):
                if reason := self._unit_with_retry(unit):
                    self.usage.fail(f"test {index}: {reason}")
                    if self.broken or self.task.credit == "all":
                        break
                else:
                    passed += 1
        finally:
            self._stop()
        return passed

    def _unit_with_retry(self, unit: Unit) -> str:
        while True:
            try:
                return self._unit(unit)
            except Spoilt as spoilt:
                self._stop()
                if self.usage.retries >= INFRASTRUCTURE_RETRIES:
                    self.usage.timed_out = True
                    return spoilt.reason
                self.usage.retries += 1
            except SandboxError as error:
                self.candidate = self.tests = None
                retry_or_raise(error, self.usage)

    def _unit(self, unit: Unit) -> str:
        """Why the unit does not pass, or nothing."""
        used_s = self.usage.cpu_s + (self.candidate.cpu_s() if self.candidate is not None else 0.0)
        if used_s >= self.task.cpu_limit_s:
            self.broken = self.usage.timed_out = True
            return f"the completion's {self.task.cpu_limit_s:g} CPU-seconds were used up"
        if self.candidate is None and (reason := self._load()):
            self.broken = True
            self._stop()
            return reason
        if self.tests is None:
            return "there is no job"
        self.tests.send({"run": unit.code, "inline": unit.inline})
        for _ in range(MESSAGES):
            said = self._wait(self.tests)
            if isinstance(said, str):
                self._stop()
                return f"the tests: {said}"
            if said.startswith(b'{"done"'):
                return self._outcome(said)
            if self.candidate is None:
                return "there is no job"
            self.candidate.send_frame(said)
            reply = self._wait(self.candidate)
            if isinstance(reply, str):
                self._stop()
                return reply
            self.tests.send_frame(reply)
        self._stop()
        return f"more than {MESSAGES} messages between the tests and the code"

    def _outcome(self, said: bytes) -> str:
        done = json_object(said)["done"]
        return "" if done["passed"] is True else str(done["error"])[:400] or "it failed"

    def _load(self) -> str:
        """Starts both jobs; why that failed, or nothing."""
        self.candidate = self.sandbox.start(limits(self.task, self.usage))
        self.candidate.send(program(self.task, self.extracted, "serve"))
        names = self._object(self.candidate)
        if isinstance(names, str):
            return names
        self.tests = self.sandbox.start(limits(self.task, self.usage))
        head: dict[str, Any] = {"kind": "tests", "entry_point": self.task.entry_point, "named": list(self.task.named)}
        self.tests.send({**head, "setup": self.task.setup, "names": names})
        ready = self._object(self.tests)
        return ready if isinstance(ready, str) else ""

    def _object(self, job: Job) -> dict[str, Any] | str:
        """What a job says once it is loaded, or why it is not."""
        frame = self._wait(job)
        if isinstance(frame, str):
            return frame
        try:
            message = json_object(frame)
        except codec.CodecError as error:
            return f"answered with what is {error}"
        if "ok" not in message:
            return str(message.get("error", "the code did not load"))[:400]
        return message["ok"] if isinstance(message["ok"], dict) else {}

    def _wait(self, job: Job) -> bytes | str:
        """The job's next frame, or why there will be none."""
        spent_s = job.cpu_s() if job is self.candidate else 0.0
        allowance = Allowance(cpu_s=min(self.task.test_cpu_limit_s, max(MIN_CPU_S, left(self.task, self.usage) - spent_s)))
        frame = job.wait_frame(allowance)
        if not isinstance(frame, End):
            return frame
        if job is self.candidate:
            self.candidate = None
            self.usage.cpu_s += frame.cpu_s
        else:
            self.tests = None
        reason = bad_end(frame, allowance, self.usage) or "the program ended itself"
        if frame.ending in (Ending.ASLEEP, Ending.STARVED):
            raise Spoilt(reason)
        return reason

    def _stop(self) -> None:
        candidate, tests = self.candidate, self.tests
        self.candidate = self.tests = None
        with suppress(SandboxError):  # the verdict does not depend on it
            if tests is not None:
                tests.stop()
            if candidate is not None:
                self.usage.cpu_s += candidate.stop().cpu_s
