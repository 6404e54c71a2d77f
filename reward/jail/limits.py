"""The records of the sandbox: what a job may use, how it can end, and the errors after which there is no verdict."""

import errno
import math
import struct
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

OUTPUT_BYTES = 1 << 20
SHORTAGES = frozenset((errno.EAGAIN, errno.ENOMEM, errno.ENOSPC, errno.ENFILE, errno.EMFILE))
"""What the kernel answers while the host lacks something. It answers ENOSPC for good where namespaces are not allowed."""


class SandboxError(RuntimeError):
    """The sandbox, not the job, failed: no verdict can be taken from it."""


class ZygoteLost(SandboxError):
    """The zygote died, and its jobs with it."""


class SandboxUnavailable(SandboxError):
    """This host does not allow the isolation that model-written code needs."""


class HostExhausted(SandboxError):
    """The host has no memory, process or namespace left for a job now. This says nothing about the job: try again later."""


class Cancelled(Exception):
    """Nobody wants the result any more; the job has been ended."""


class Ending(StrEnum):
    """Why a job is over."""

    EXITED = "exited"  # by itself, or by a signal of its own making
    CPU = "cpu"  # it used its CPU seconds
    ASLEEP = "asleep"  # it slept for longer than it may
    STARVED = "starved"  # the host gave it no time to run
    FLOOD = "flood"  # it wrote more than is kept
    MEMORY = "memory"  # it used more memory than it may
    STOPPED = "stopped"  # the judge wanted no more of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one job may use in all. The kernel holds it to this, and the judge to the exact memory and output."""

    cpu_s: float = 8.0
    memory_bytes: int = 1 << 30
    disk_bytes: int = 64 << 20
    threads: int = 128
    output_bytes: int = OUTPUT_BYTES  # written to stdout

    def pack(self) -> bytes:
        """As a zygote gets them; CPU time in whole seconds, rounded up."""
        return _LIMITS.pack(math.ceil(self.cpu_s), self.memory_bytes, self.disk_bytes, self.threads)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        cpu_s, memory_bytes, disk_bytes, threads = _LIMITS.unpack(data)
        return cls(cpu_s=cpu_s, memory_bytes=memory_bytes, disk_bytes=disk_bytes, threads=threads)


_LIMITS = struct.Struct("<QQQQ")
NUMBER = struct.Struct("<I")  # a job's number, sent from judge to zygote: alone it means kill, with limits it means start
EXIT = struct.Struct("<IidQ")  # from zygote to judge: number, exit code or minus the signal, CPU seconds, peak bytes of memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """What a job may use until the judge has what it waits for."""

    cpu_s: float
    asleep_s: float = 5.0  # since the job's start: neither running nor waiting for a core
    answer_bytes: int = OUTPUT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a job ended."""

    ending: Ending
    status: int  # exit code, or minus the signal's number
    cpu_s: float
    wall_s: float
    asleep_s: float
    peak_bytes: int
    output: bytes  # what it wrote to stdout, at most Limits.output_bytes; nothing where it used too much memory
    of_partner: bool = False  # it is the end of the other one of two jobs that were waited for
