"""One confined process, seen from the judge: watches its clocks, moves its frames, keeps its output.

CPU time decides, not wall time. A job is ended when it has used its CPU seconds; when it has slept for too long (its wall time,
less its CPU time and the time it waited for a core); or when the host is so busy that a cap on wall time is reached, which says
nothing about the job (`Ending.STARVED`). CPU time is read from the kernel's clock of the process, by a process id that the kernel
vouches for, so a job can neither forge nor stop it. Memory is what the job uses, not what it reserves: the kernel's own count.
"""

import json
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from reward.jail.limits import OUTPUT_BYTES, Allowance, Cancelled, End, Ending, SandboxError

START_S = 30.0  # deadline for confining a job, on a busy host
EXIT_S = 10.0  # deadline for the report of a killed job; after it the zygote itself counts as dead
NAP_S = 0.05  # a new job is first read after this time: most have ended by then, and one read is cheaper than many
CLOCK_S = 0.1  # time between two checks of a job's clocks and memory
STARVED_FACTOR = 40.0  # the CPU limit times this is the cap on wall time, whatever the host does
STARVED_S = 10.0  # added to that cap
READ_BYTES = 1 << 16
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Exit(NamedTuple):
    """How a process ended."""

    status: int  # exit code, or minus the signal's number
    cpu_s: float
    peak_bytes: int


class ZygoteLike(Protocol):
    """What a job asks of its `Sandbox`."""

    cancelled: Callable[[], bool]
    has_worked: bool

    def refusal(self, what: str, message: dict[str, Any]) -> SandboxError: ...

    def open_control(self) -> socket.socket: ...

    def read_control(self) -> None: ...

    def kill(self, number: int) -> None: ...

    def forget(self, number: int) -> None: ...


class Job:
    """One confined process and the channel to it."""

    def __init__(
        self, zygote: ZygoteLike, number: int, channel: socket.socket, output_fd: int, memory_bytes: int, output_bytes: int
    ) -> None:
        self.exit: Exit | None = None  # what the zygote says of its end
        self._zygote = zygote
        self._number = number
        self._channel: socket.socket | None = channel
        self._output_fd: int | None = output_fd
        self._memory_bytes = memory_bytes
        self._output_bytes = output_bytes
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._output = bytearray()
        self._pid = 0  # on this host; known once the job is confined
        self._is_new = True
        self._started_s = self._confined_s = time.monotonic()
        self._left_s = 0.0  # when it was last waited for
        channel.setblocking(False)

    @property
    def is_over(self) -> bool:
        return self.exit is not None

    def send(self, *messages: dict[str, Any]) -> None:
        """Sends a frame each. What does not fit now is written while something is waited for."""
        for message in messages:
            data = _dumps(message).encode("ascii")
            self._outgoing += struct.pack("<I", len(data)) + data
        self._write_frames()

    def wait_frame(self, allowance: Allowance, *, partner: "Job | None" = None) -> bytes | End:
        """The job's next frame, as it came; or how the job ended instead. With a `partner`, which it talks to meanwhile and
        which has the same allowance, that may also be how the partner had to be ended; then neither runs any more. A partner
        that ends by itself is for the job to notice."""
        if (frame := self.take_frame()) is not None:
            return frame
        ending, culprit = self._watch(allowance, frame=True, partner=partner)
        frame = self.take_frame()
        if frame is not None and ending is None:
            return frame
        end = culprit._finish(ending or Ending.EXITED)
        if partner is None:
            return end
        (self if culprit is partner else partner).stop()
        return replace(end, of_partner=culprit is partner)

    def wait_end(self, allowance: Allowance) -> End:
        """Waits for the job to end by itself, or ends it."""
        ending, _ = self._watch(allowance, frame=False)
        return self._finish(ending or Ending.EXITED)

    def stop(self) -> End:
        return self._finish(Ending.STOPPED)

    def has_frame(self) -> bool:
        """Whether a frame has already arrived."""
        return len(self._incoming) >= 4 and len(self._incoming) >= 4 + self._frame_bytes()

    def take_frame(self) -> bytes | None:
        """A frame that has already arrived."""
        if not self._pid or not self.has_frame():
            return None
        length = self._frame_bytes()
        frame = bytes(self._incoming[4 : 4 + length])
        del self._incoming[: 4 + length]
        return frame

    def cpu_s(self) -> float:
        """CPU seconds used so far, from the kernel's clock of the process."""
        if self.exit is not None:
            return self.exit.cpu_s
        try:
            return time.clock_gettime((~self._pid << 3) | 2) if self._pid else 0.0  # MAKE_PROCESS_CPUCLOCK(pid, CPUCLOCK_SCHED)
        except OSError:  # over, and not yet reported
            return 0.0

    def asleep_s(self, partner: "Job") -> float:
        """How long it and the job that it talks to have both slept since they were confined."""
        return _asleep_s([self, partner])

    def release(self) -> None:
        """Gives up what is held here for the job."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._output_fd is not None:
            os.close(self._output_fd)
            self._output_fd = None

    def _watch(self, allowance: Allowance, *, frame: bool, partner: "Job | None" = None) -> tuple[Ending | None, "Job"]:
        """Waits for a job, and leaves out of its sleep how long it had to wait for the judge since the last time."""
        jobs = [self] if partner is None else [self, partner]
        for job in jobs:
            if job._left_s:
                job._confined_s += time.monotonic() - job._left_s
        try:
            return self._pump(jobs, allowance, frame=frame)
        finally:
            for job in jobs:
                job._left_s = time.monotonic()

    def _pump(self, jobs: "list[Job]", allowance: Allowance, *, frame: bool) -> tuple[Ending | None, "Job"]:
        """Moves bytes until a frame has come (if asked for) or a job is over; None, or why it has to be ended; and which."""
        cpu_began_s = [job.cpu_s() for job in jobs]
        self._nap(jobs)
        self._await_confinement(jobs)
        began_s = time.monotonic()
        looked_s = 0.0
        while True:
            if self.is_over:
                self._drain(time.monotonic() + EXIT_S)  # it may have said more than one thing before its end
            if (frame and self.has_frame()) or self.is_over:
                return None, self
            for job, before_s in zip(jobs, cpu_began_s, strict=True):
                if job.cpu_s() - before_s > allowance.cpu_s:
                    return Ending.CPU, job
            if self._zygote.cancelled():
                for job in jobs:
                    job._finish(Ending.STOPPED)
                raise Cancelled
            if _asleep_s(jobs, beyond_s=allowance.asleep_s) > allowance.asleep_s:
                return Ending.ASLEEP, jobs[-1]
            if time.monotonic() - began_s > STARVED_FACTOR * allowance.cpu_s + STARVED_S:
                return Ending.STARVED, jobs[-1]
            _move(jobs, CLOCK_S)
            for job in jobs:
                if len(job._output) > job._output_bytes or job._said_bytes() > allowance.answer_bytes:
                    return Ending.FLOOD, job
            if time.monotonic() - looked_s > CLOCK_S:
                looked_s = time.monotonic()
                for job in jobs:
                    if job._resident_bytes() > job._memory_bytes:
                        return Ending.MEMORY, job

    def _nap(self, jobs: "list[Job]") -> None:
        """Lets a job that has just been started run undisturbed, until it is over or NAP_S have passed."""
        until_s = time.monotonic() + NAP_S
        while self._is_new and not self.is_over and (left_s := until_s - time.monotonic()) > 0:
            _move(jobs, left_s, reads=False)
        self._is_new = False

    def _await_confinement(self, jobs: "list[Job]") -> None:
        """The first frame is the jail's own, sent before any foreign code; with it comes the process id on this host."""
        deadline_s = time.monotonic() + START_S
        for job in jobs:
            while not job._pid:
                if job.is_over and job._channel is not None:
                    job._move_frames()  # what it said before its end
                else:
                    _move(jobs, 1.0)
                if not job._pid and (job.is_over or time.monotonic() > deadline_s):
                    job._finish(Ending.STOPPED)
                    raise SandboxError("a job ended before it was confined")

    def _read_output(self) -> None:
        if self._output_fd is None:
            return
        try:
            data = os.read(self._output_fd, READ_BYTES)
        except BlockingIOError:
            return
        self._output += data
        if not data:
            os.close(self._output_fd)
            self._output_fd = None

    def _move_frames(self) -> None:
        if self._channel is None:
            return
        self._write_frames()
        if not self._pid:
            self._receive_first()
            return
        try:
            data = self._channel.recv(READ_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        self._incoming += data
        if not data:
            self._channel.close()
            self._channel = None

    def _write_frames(self) -> None:
        try:
            if self._outgoing and self._channel is not None:
                del self._outgoing[: self._channel.send(self._outgoing[: 1 << 16], socket.MSG_NOSIGNAL)]
        except BlockingIOError:
            pass
        except ConnectionError:
            self._outgoing.clear()

    def _receive_first(self) -> None:
        """The jail's own frame, with the process id that the kernel adds. What comes after it is received without ancillary
        data: a job must not be able to hand the judge open files."""
        if self._channel is None:
            return
        try:
            header, ancillary, _, _ = self._channel.recvmsg(4, socket.CMSG_SPACE(struct.calcsize("3i")))
            self._incoming += header
            self._incoming += self._channel.recv(self._frame_bytes()) if header else b""
        except BlockingIOError:
            return
        except ConnectionError:
            header = b""
        if not header:
            self._channel.close()
            self._channel = None
            return
        self._channel.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
        self._pid = _peer_process(ancillary)
        self._confined_s = time.monotonic()
        message = json.loads(self.take_frame() or b"{}")
        if "confined" not in message or not self._pid:
            self._finish(Ending.STOPPED)
            raise self._zygote.refusal("a job could not be confined", message)
        self._zygote.has_worked = True

    def _frame_bytes(self) -> int:
        """The announced length of the next frame; 0 where none has begun."""
        return int(struct.unpack("<I", self._incoming[:4])[0]) if len(self._incoming) >= 4 else 0

    def _said_bytes(self) -> int:
        """What it has said, or says that it will, beyond what one read may bring along."""
        return max(self._frame_bytes(), len(self._incoming) - 2 * READ_BYTES)

    def _finish(self, ending: Ending) -> End:
        """Makes sure that the job is dead, collects what it left, and gives up everything held for it."""
        asleep_s = _asleep_s([self])
        try:
            if self.exit is None:
                self._zygote.kill(self._number)
            deadline_s = time.monotonic() + EXIT_S
            while self.exit is None:
                if time.monotonic() > deadline_s:
                    raise SandboxError(f"the zygote did not report a killed job within {EXIT_S:.0f} s")
                self._zygote.read_control()
            self._drain(deadline_s)
        finally:
            self._zygote.forget(self._number)
            self.release()
        if ending is Ending.EXITED and len(self._output) > self._output_bytes:
            ending = Ending.FLOOD
        if ending in (Ending.EXITED, Ending.STOPPED) and self.exit.peak_bytes > self._memory_bytes:
            ending = Ending.MEMORY
        return End(
            ending=ending,
            status=self.exit.status,
            cpu_s=self.exit.cpu_s,
            wall_s=time.monotonic() - self._started_s,
            asleep_s=asleep_s,
            peak_bytes=self.exit.peak_bytes,
            output=b"" if ending is Ending.MEMORY else bytes(self._output[: self._output_bytes]),
        )

    def _drain(self, deadline_s: float) -> None:
        """Reads what a dead job left in its pipes."""
        self._outgoing.clear()
        while self._output_fd is not None and len(self._output) <= self._output_bytes and time.monotonic() < deadline_s:
            self._read_output()
        while (
            self._channel is not None
            and len(self._incoming) <= max(OUTPUT_BYTES, 4 + self._frame_bytes())
            and time.monotonic() < deadline_s
        ):
            self._move_frames()

    def _resident_bytes(self) -> int:
        """The memory that the job uses now; 0 once it is over."""
        if not self._pid:
            return 0
        try:
            with open(f"/proc/{self._pid}/statm") as file:
                return int(file.read().split()[1]) * PAGE_BYTES
        except (OSError, IndexError):
            return 0

    def _delayed_s(self) -> float:
        """How long the job has waited for a core: the longest wait of its threads. 0 where the kernel does not say."""
        longest_ns = 0
        try:
            for task in os.listdir(f"/proc/{self._pid}/task"):
                with open(f"/proc/{self._pid}/task/{task}/schedstat") as file:
                    longest_ns = max(longest_ns, int(file.read().split()[1]))
        except (OSError, IndexError, ValueError):
            pass
        return longest_ns / 1e9


def _asleep_s(jobs: list[Job], *, beyond_s: float = CLOCK_S) -> float:
    """How long these jobs, which wait for one another, have neither run nor waited for a core since they were confined. It is 0
    where it cannot be more than `beyond_s`, because asking the kernel costs more."""
    wall_s = time.monotonic() - min(job._confined_s for job in jobs)
    idle_s = wall_s - sum(job.cpu_s() for job in jobs)
    return idle_s - sum(job._delayed_s() for job in jobs) if idle_s > beyond_s else 0.0


def _move(jobs: list[Job], timeout_s: float, *, reads: bool = True) -> None:
    """Waits for one event of these jobs or of their zygote, and handles what there is. Without `reads` it is none that a job
    says something."""
    zygote = jobs[0]._zygote
    control = zygote.open_control()
    poll = select.poll()
    poll.register(control, select.POLLIN)
    handlers: dict[int, Callable[[], None]] = {control.fileno(): zygote.read_control}
    for job in jobs:
        if job._channel is not None and (reads or job._outgoing):
            handlers[job._channel.fileno()] = job._move_frames if reads else job._write_frames
            poll.register(job._channel, (select.POLLIN if reads else 0) | (select.POLLOUT if job._outgoing else 0))
        if job._output_fd is not None and reads:
            handlers[job._output_fd] = job._read_output
            poll.register(job._output_fd, select.POLLIN)
    for fd, _ in poll.poll(timeout_s * 1000):
        handlers[fd]()


_dumps = json.JSONEncoder(separators=(",", ":")).encode


def _peer_process(ancillary: list[tuple[int, int, bytes]]) -> int:
    for level, kind, body in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            return int(struct.unpack("3i", body)[0])
    return 0
