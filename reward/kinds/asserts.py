"""The kind `asserts`: test code against a candidate, each in a jail of its own; the judge watches both.

    {"kind": "asserts", "entry_point": "f", "tests": ["assert f(2) == 4", "def check(candidate): …"]}

Where all tests are plain comparisons and results are data, the second jail is not needed: the calls are made as those of the kind
`calls`. Otherwise two jails are joined by a pair of sockets:

    judge  ──program──>  candidate's jail   (`jail/candidate_objects.py`)  <──asks, replies──>  tests' jail   (`jail/tester.py`)
           <──verdict─────────────────────────────────────────────────────────────

The verdict comes from the tests' jail, over a channel that no print of theirs and nothing of the candidate's can reach. Whatever
ends the candidate ends the unit of tests, so its death is no exception that a test could expect. Both have limits of their own.
"""

import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from reward.jail import codec
from reward.jail.limits import End, Ending, SandboxError
from reward.kinds import claims
from reward.kinds.calls import CallsGrader, NotData, of_claims
from reward.kinds.code_task import CodeTask, read_entry_point, read_shared
from reward.kinds.extract import Extracted
from reward.kinds.interface import LIBRARY, PACKAGES, read_interface
from reward.kinds.kind import Defaults, TaskError
from reward.kinds.units import Unit, read_unit
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


@dataclass(frozen=True, slots=True, kw_only=True)
class AssertsTask(CodeTask):
    tests: tuple[Unit, ...]
    entry_point: str  # what `check(candidate)` gets; may be empty where no test has a `check`
    called: str  # the function that all tests call, where all of them are plain comparisons
    taken: str = ""  # a name that the tests take from the candidate, where there is no entry point

    @property
    def defines(self) -> str:
        return (self.entry_point or self.called).partition(".")[0] or self.taken

    def count_passed(self, extracted: Extracted, sandbox: Sandbox, usage: Usage) -> int:
        if self.called:
            units = [of_claims(unit.claims) for unit in self.tests]
            with suppress(NotData):
                return CallsGrader(self, units, extracted, sandbox, usage, entry_point=self.called, objects_fail=False).run()
        return AssertsGrader(self, extracted, sandbox, usage).run()


def read_asserts_task(data: Mapping[str, Any], defaults: Defaults) -> AssertsTask:
    shared = read_shared(data, defaults, "entry_point")
    units = tuple(read_unit(test, f"task.tests[{index}]") for index, test in enumerate(data["tests"]))
    entry_point = read_entry_point(data["entry_point"], shared["setup"]) if data.get("entry_point") else ""
    called = ""
    if all(unit.claims for unit in units):
        called = claims.called((claim for unit in units for claim in unit.claims), entry_point, shared["setup"])
    try:
        taken = "" if called else _read_taken(shared["setup"], units, entry_point)  # claims rarely need it
    except TaskError:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise TaskError(f"task.tests: not Python: {error}") from None
    return AssertsTask(tests=units, entry_point=entry_point, called=called, taken=taken, **shared)


def _read_taken(setup: str, units: Sequence[Unit], entry_point: str) -> str:
    """A name that these tests take from the candidate. Each must take one: otherwise it passes whatever the answer is."""
    taken: set[str] = set()
    for index, unit in enumerate(units):
        names = read_interface(setup, unit.code, entry_point).names
        if not names or entry_point.partition(".")[0] in unit.defines:
            raise TaskError(f"task.tests[{index}]: defines all that it tests itself: it must not hold the solution")
        taken |= names
    return min(taken)


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
        self.used_too_much = False  # memory, which the kernel tells at the end

    def run(self) -> int:
        passed = 0
        try:
            for index in range(len(self.task.tests)):
                if reason := self._unit_with_retry(index):
                    self.usage.fail(f"test {index}: {reason}")
                    if self.broken or self.task.credit == "all":
                        break
                else:
                    passed += 1
        finally:
            self._stop()
        return 0 if self.used_too_much else passed

    def _unit_with_retry(self, index: int) -> str:
        while True:
            try:
                return self._unit(index)
            except Spoilt as spoilt:
                self._stop()
                if self.usage.retries >= INFRASTRUCTURE_RETRIES:
                    self.usage.timed_out = True
                    return spoilt.reason
                self.usage.retries += 1
            except SandboxError as error:
                self.candidate = self.tests = None
                retry_or_raise(error, self.usage)

    def _unit(self, index: int) -> str:
        """Why the unit does not pass, or nothing."""
        if reason := self.usage.used_up(running_cpu_s=self.candidate.cpu_s() if self.candidate is not None else 0.0):
            self.broken = True
            return reason
        if self.tests is None and (reason := self._load(self.task.tests[index:])):
            self.broken = True
            self._stop()
            return reason
        if self.tests is None:
            return "there is no job"
        said = self._wait(self.tests)
        if isinstance(said, str):
            return said
        done = json_object(said)["done"]
        if done.get("lost"):
            return self._lost(done["error"])
        return "" if done["passed"] is True else str(done["error"])[:400] or "it failed"

    def _lost(self, said: str) -> str:
        """Why the tests can go on no more with this candidate: what it says itself, if it did not even load."""
        candidate = self.candidate
        self._stop()
        if candidate is None or candidate.exit is None:
            return said
        if (frame := candidate.take_frame()) and (error := _error_in(frame)):
            return error
        status = candidate.exit.status
        return f"died of signal {-status}" if status < 0 and status != -9 else said  # 9 is how it is stopped

    def _load(self, units: Sequence[Unit]) -> str:
        """Starts both jobs, with all that they are to do; why that failed, or nothing."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self.candidate = self.sandbox.start(self.usage.limits(), link=ours)
            self.tests = self.sandbox.start(self.usage.limits(), link=theirs)
        setup, entry_point = self.task.setup, self.task.entry_point
        self.candidate.send(self.task.program(self.extracted, "candidate", entry_point=entry_point))
        orders = [{"run": unit.code, "inline": unit.inline, **_takes(setup, unit.code, entry_point)} for unit in units]
        tests = {"kind": "tests", "setup": setup, "entry_point": entry_point, "units": len(orders)}
        self.tests.send({**tests, **_takes(setup, "", entry_point)}, *orders)
        frame = self._wait(self.tests)
        if isinstance(frame, str):
            return frame
        message = json_object(frame)
        if isinstance(done := message.get("done"), dict):
            return self._lost(str(done["error"]))
        return "" if "ok" in message else str(message["error"])[:400]

    def _wait(self, tests: Job) -> bytes | str:
        """The next frame of the tests, or why there will be none: then neither job runs any more."""
        spent_s = self.candidate.cpu_s() if self.candidate is not None else 0.0
        allowance = self.usage.allowance(self.task.test_cpu_limit_s, running_cpu_s=spent_s)
        frame = tests.wait_frame(allowance, partner=self.candidate)
        if not isinstance(frame, End):
            return frame
        whose = "" if frame.of_partner else "the tests: "
        self._stop(frame.asleep_s)
        reason = bad_end(frame, allowance, self.usage) or "the program ended itself"
        if frame.ending in (Ending.ASLEEP, Ending.STARVED):
            raise Spoilt(reason)
        return whose + reason

    def _stop(self, asleep_s: float | None = None) -> None:
        candidate, tests = self.candidate, self.tests
        self.candidate = self.tests = None
        if tests is not None and candidate is not None:
            self.usage.asleep_s += tests.asleep_s(candidate) if asleep_s is None else asleep_s
        with suppress(SandboxError):  # the verdict does not depend on it
            if tests is not None:
                self.usage.tests_cpu_s += tests.stop().cpu_s
            if candidate is not None:
                end = candidate.stop()
                self.usage.cpu_s += end.cpu_s
                if end.ending is Ending.MEMORY:
                    self.used_too_much = True
                    self.usage.fail(bad_end(end, self.usage.allowance(self.task.test_cpu_limit_s), self.usage))


def _takes(setup: str, code: str, entry_point: str) -> dict[str, Any]:
    """What the tests' jail has to take from the candidate for some code."""
    found = read_interface(setup, code, entry_point)
    lists = {name: list(getattr(found, name)) for name in ("names", "operators", "in_place")}
    modules = {name: PACKAGES.get(name, name) for name in found.modules}
    return lists | {"modules": modules, "library": {name: LIBRARY[name] for name in found.library}}


def _error_in(frame: bytes) -> str:
    """What a candidate says that it failed of."""
    try:
        return str(json_object(frame).get("error", ""))[:400]
    except codec.CodecError as error:
        return f"answered with what is {error}"
