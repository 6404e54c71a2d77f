"""What one completion has used, and the rules that all graders share: limits, retries, how an end is told."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from reward.jail import codec
from reward.jail.limits import OUTPUT_BYTES, Allowance, End, Ending, HostExhausted, Limits, SandboxError, SandboxUnavailable
from reward.sandbox.job import Job
from reward.sandbox.sandbox import Sandbox

INFRASTRUCTURE_RETRIES = 1
"""A run that was starved of CPU, or that slept for too long, is repeated this often. Then it counts as a failure, so code cannot
gain by faking starvation."""

MIN_CPU_S = 0.05  # every test gets at least this much, so that it does not fail because earlier tests used all CPU time
ASLEEP_SHARE = 0.5  # one job may sleep for this share of its CPU limit; all jobs of a completion may sleep twice as long
ASLEEP_S = 1.5  # added to that time, because the kernel does not count the waits for a core of threads that have ended


@dataclass(slots=True, kw_only=True)
class Usage:
    """What one completion has used so far, over all of its jobs."""

    cpu_limit_s: float
    memory_bytes: int
    cpu_s: float = 0.0
    tests_cpu_s: float = 0.0  # in a jail of their own
    asleep_s: float = 0.0
    retries: int = 0
    timed_out: bool = False
    reasons: list[str] = field(default_factory=list)

    def fail(self, reason: str) -> bool:
        self.reasons.append(reason)
        return False

    def used_up(self, *, running_cpu_s: float = 0.0) -> str:
        """Why the completion may run no further test, or nothing. A job that still runs has used `running_cpu_s`."""
        if max(self.cpu_s + running_cpu_s, self.tests_cpu_s) >= self.cpu_limit_s:
            reason = f"the completion's {self.cpu_limit_s:g} CPU-seconds were used up"
        elif self.asleep_s >= 2 * self.may_sleep_s:
            reason = f"the completion slept for {self.asleep_s:.3g} s in all"
        else:
            return ""
        self.timed_out = True
        return reason

    @property
    def may_sleep_s(self) -> float:
        """How long one job may sleep; all jobs of the completion may sleep twice as long."""
        return ASLEEP_SHARE * self.cpu_limit_s + ASLEEP_S

    def left_s(self) -> float:
        return max(MIN_CPU_S, self.cpu_limit_s - self.cpu_s)

    def add(self, end: End) -> None:
        self.cpu_s += end.cpu_s
        self.asleep_s += end.asleep_s

    def limits(self, *, output_bytes: int = OUTPUT_BYTES) -> Limits:
        """The limits of the next job."""
        return Limits(cpu_s=self.left_s(), memory_bytes=self.memory_bytes, output_bytes=output_bytes)

    def allowance(self, test_cpu_limit_s: float, *, running_cpu_s: float = 0.0, answer_bytes: int = OUTPUT_BYTES) -> Allowance:
        """The allowance of the next test, in a job that has used `running_cpu_s` so far."""
        return Allowance(
            cpu_s=min(test_cpu_limit_s, max(MIN_CPU_S, self.left_s() - running_cpu_s)),
            asleep_s=max(MIN_CPU_S, min(self.may_sleep_s, 2 * self.may_sleep_s - self.asleep_s)),
            answer_bytes=answer_bytes,
        )


class Spoilt(Exception):
    """The host, not the code, may have decided how a run ended."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def run_to_end(
    sandbox: Sandbox,
    usage: Usage,
    program: Mapping[str, Any],
    *,
    test_cpu_limit_s: float,
    stdin: bytes = b"",
    output_bytes: int = OUTPUT_BYTES,
) -> tuple[Job, End, Allowance]:
    """One job from start to end, repeated where the host may have starved it."""
    while True:
        allowance = usage.allowance(test_cpu_limit_s)
        job = sandbox.start(usage.limits(output_bytes=output_bytes), stdin=stdin)
        try:
            job.send(dict(program))
            end = job.wait_end(allowance)
        except SandboxError as error:
            retry_or_raise(error, usage)
            continue
        usage.add(end)
        if end.ending not in (Ending.ASLEEP, Ending.STARVED) or usage.retries >= INFRASTRUCTURE_RETRIES:
            return job, end, allowance
        usage.retries += 1


def json_object(frame: bytes) -> dict[str, Any]:
    """A frame of the job as an object, its values still in their JSON form."""
    try:
        message = json.loads(frame)
    except (ValueError, RecursionError) as error:
        raise codec.CodecError(f"not JSON: {error}") from None
    if not isinstance(message, dict):
        raise codec.CodecError("not an object")
    return message


def bad_end(end: End, allowance: Allowance, usage: Usage) -> str:
    """Why a job that ended so cannot have passed; nothing for a normal end."""
    if end.ending is Ending.CPU:
        usage.timed_out = True
        return f"used more than {allowance.cpu_s:.3g} CPU-seconds"
    if end.ending is Ending.ASLEEP:
        usage.timed_out = True
        return f"slept for {end.asleep_s:.3g} s, and more than {allowance.asleep_s:.3g} s are not allowed"
    if end.ending is Ending.STARVED:
        usage.timed_out = True
        return f"the host gave it {end.cpu_s:.2g} CPU-seconds in {end.wall_s:.3g} s"
    if end.ending is Ending.FLOOD:
        return "wrote more than the test asks for"
    if end.ending is Ending.MEMORY:
        return f"used more than {usage.memory_bytes >> 20} MiB of memory"
    if end.status < 0:
        return f"died of signal {-end.status}"
    return ""


def retry_or_raise(error: SandboxError, usage: Usage) -> None:
    if isinstance(error, SandboxUnavailable | HostExhausted) or usage.retries >= INFRASTRUCTURE_RETRIES:
        raise error
    usage.retries += 1
