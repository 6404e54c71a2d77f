"""The judge's side of the sandbox: keeps one zygote warm and starts jobs in it.

    with Sandbox() as sandbox:
        job = sandbox.start(Limits(cpu_s=8.0), stdin=b"3 4\\n")
        job.send({"kind": "stdio", "code": "print(sum(map(int, input().split())))", "setup": "", "trim": False})
        end = job.wait_end(Allowance(cpu_s=8.0))

One thread uses one Sandbox. Isolation that cannot be had raises `SandboxUnavailable` with the reason.
"""

import fcntl
import itertools
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from reward import jail
from reward.jail.limits import (
    EXIT,
    NUMBER,
    SHORTAGES,
    Allowance,
    HostExhausted,
    Limits,
    SandboxError,
    SandboxUnavailable,
    ZygoteLost,
)
from reward.sandbox.host import Settings, find_bubblewrap, jail_settings, map_ids, package_paths
from reward.sandbox.job import EXIT_S, START_S, Exit, Job

log = logging.getLogger("reward")

JAIL = Path(jail.__path__[0])
REFUSED = "this host refuses the isolation that model-written code needs"
ADVICE = (
    "Allow unprivileged user namespaces (sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns; in a "
    "container: a seccomp profile that permits unshare and mount)"
)
_JAIL, _BUBBLEWRAP = JAIL / "zygote.py", JAIL / "bubblewrap.py"


class Sandbox:
    """One warm zygote and the jobs that run in it."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self.kind = self.settings.kind
        self.zygotes_started = 0
        self.jobs_started = 0
        self.has_worked = False  # a job has been confined
        self.cancelled: Callable[[], bool] = _never  # asked while a job runs; may look at what another thread sets
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._jobs: dict[int, Job] = {}
        self._resident_bytes = 0  # memory of a job that has done nothing yet
        self._numbers = itertools.count(1)

    def __enter__(self) -> Self:
        self._warm_up()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, limits: Limits, *, stdin: bytes = b"", link: socket.socket | None = None) -> Job:
        """A new job that waits for its program. `link` is one end of a pair of sockets, for two jobs that talk to each other.
        Starts the zygote again if it was killed. Raises HostExhausted, after which the same may be tried again."""
        try:
            return self._start(limits, stdin, link)
        except ZygoteLost:
            return self._start(limits, stdin, link)
        except OSError as error:
            if error.errno not in SHORTAGES:
                raise
            raise HostExhausted(f"no job can be started: {error}") from error

    def close(self) -> None:
        """Ends the zygote and with it every job."""
        for job in list(self._jobs.values()):
            job.release()
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

    def _start(self, limits: Limits, stdin: bytes, link: socket.socket | None) -> Job:
        control = self._warm_up()
        number = next(self._numbers)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        stdin_fd = _sealed_file(stdin) if stdin else os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        output_fd, stdout_fd = os.pipe()
        os.set_blocking(output_fd, False)
        self._jobs[number] = job = Job(
            self, number, ours, output_fd, self._resident_bytes + limits.memory_bytes, limits.output_bytes
        )
        try:
            with theirs:
                fds = [stdin_fd, stdout_fd, theirs.fileno(), *([] if link is None else [link.fileno()])]
                socket.send_fds(control, [NUMBER.pack(number), limits.pack()], fds)
        except OSError as error:
            raise self._lost(error) from error
        finally:
            os.close(stdin_fd)
            os.close(stdout_fd)
        self.jobs_started += 1
        return job

    def kill(self, number: int) -> None:
        try:
            self.open_control().send(NUMBER.pack(number))
        except OSError as error:
            raise self._lost(error) from error

    def read_control(self) -> None:
        """One message from the zygote, to the job it is about."""
        try:
            data = self.open_control().recv(1 << 16)
        except OSError as error:  # a timeout too: it answers within EXIT_S or not at all
            raise self._lost(error) from error
        if not data:
            raise self._lost(ConnectionResetError("it is gone"))
        number, *found = EXIT.unpack(data)
        if (job := self._jobs.get(number)) is not None:
            job.exit = Exit(*found)

    def forget(self, number: int) -> None:
        self._jobs.pop(number, None)

    def open_control(self) -> socket.socket:
        if self._control is None:
            raise ZygoteLost("the sandbox is closed")
        return self._control

    def refusal(self, what: str, message: dict[str, Any]) -> SandboxError:
        """The error for the message of a jail that cannot be had. Where a job has run before, the host allows jails and only
        lacks something now."""
        reason = f"{what}: {message.get('failed', 'no reason is known')}"
        if self.has_worked and message.get("errno") in SHORTAGES:
            return HostExhausted(reason)
        return SandboxUnavailable(f"{reason}. {ADVICE}")

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
            if self.kind == "bubblewrap":
                self._try_one_job()
        return self._control

    def _try_one_job(self) -> None:
        """Refuses a host on which bubblewrap starts and no job can run: each would score 0."""
        try:
            job = self._start(Limits(), b"", None)
            job.send({"kind": "stdio", "code": "print(7)", "setup": "", "trim": False})
            end = job.wait_end(Allowance(cpu_s=START_S))
        except SandboxError as error:
            self.close()
            raise SandboxUnavailable(f"{REFUSED} under bubblewrap: {error}. {ADVICE}") from error
        if end.output != b"7\n":
            self.close()
            raise SandboxUnavailable(f"{REFUSED} under bubblewrap: a job that prints 7 printed {end.output!r:.80}. {ADVICE}")

    def _fall_back(self, refusal: SandboxUnavailable) -> socket.socket:
        if find_bubblewrap() is None:
            raise SandboxUnavailable(f"{refusal}, or install bubblewrap") from refusal
        self.kind = "bubblewrap"
        log.warning("each job starts a Python of its own under bubblewrap, which is slower: %s", refusal)
        return self._launch()

    def _launch(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(START_S)
        script = _BUBBLEWRAP if self.kind == "bubblewrap" else _JAIL
        keep_compiled = [] if self.settings.packages else ["-B"]  # compiling sympy takes seconds
        command = [sys.executable, "-s", "-S", "-P", *keep_compiled, "-X", "utf8", str(script), str(theirs.fileno())]
        search = [str(Path(path).parent) for path in package_paths(self.settings.packages)]
        environment = {
            "PYTHONHASHSEED": "0",  # sets of strings iterate alike in every job: same completion, same verdict
            "PYTHONPATH": ":".join(dict.fromkeys(search)),
            "MALLOC_ARENA_MAX": "1",  # a second arena costs a thread 64 MiB of its address space
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "LD_BIND_NOW": "1",  # binding a function when it is first called would be work, and a written page, in every job
        }
        with theirs:
            process = self._process = subprocess.Popen(
                [*command, json.dumps(jail_settings(self.settings, environment))],
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
                ours.send(json.dumps({"ids": map_ids(process.pid)}).encode())
            self._resident_bytes = self._expect(ours, "ready")
        except (OSError, SandboxError) as error:
            ours.close()
            self.close()
            if isinstance(error, SandboxError):
                raise
            raise SandboxUnavailable(f"cannot set up the jail: {error}") from error
        ours.settimeout(EXIT_S)
        return ours

    def _expect(self, control: socket.socket, key: str) -> int:
        try:
            data = control.recv(1 << 16)
        except TimeoutError:
            raise SandboxError(f"the zygote was not {key} within {START_S:.0f} s: is this host overloaded?") from None
        message = json.loads(data) if data else {"failed": self._last_words()}
        if key not in message:
            raise self.refusal(REFUSED, message)
        return int(message[key])

    def _last_words(self) -> str:
        """What a zygote that ended by itself had to say. One that was killed says nothing about this host."""
        if self._process is None or self._process.stderr is None:
            raise ZygoteLost("the sandbox is closed")
        words = self._process.stderr.read().decode(errors="replace").strip()[-500:]
        if self._process.wait(EXIT_S) < 0:
            raise ZygoteLost("the zygote was killed while it started")
        return words or "it ended without a word"


def _never() -> bool:
    return False


def _sealed_file(content: bytes) -> int:
    """A file in memory that can be read and nothing else, whoever holds it."""
    fd = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return fd
