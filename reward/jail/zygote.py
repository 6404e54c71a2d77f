"""The zygote: a warm Python in namespaces of its own that forks one confined job after another.

Started by `reward.sandbox.sandbox` as a script, with a control socket and its settings as JSON:

    judge ── Popen ──> launcher            imports what jobs may want, leaves the host's namespaces, waits
                          └── fork ──> zygote     pid 1 of its pid namespace; read-only root without /proc; serves requests
                                          └── fork ──> job    fresh pid, mount and ipc namespaces, own tmpfs and uid, rlimits,
                                                              no capabilities, seccomp; then `reward.jail.harness`

The zygote never sees a program: it receives the job's file descriptors and limits, and answers with how the job ended. The
program goes over the job's own channel, which is read once the job is confined. Control messages, one packet each:

    to the zygote   NUMBER + limits with the job's files: start it      NUMBER: kill it
    from it         {"ready": …} or {"failed": reason} once, then EXIT for each job
"""

import ctypes
import fcntl
import gc
import importlib
import json
import os
import platform
import resource
import select
import signal
import socket
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

sys.path.insert(0, os.path.abspath(f"{__file__}/../../.."))
from reward.jail import candidate_objects, confine, harness, linux, math_equality, seccomp, tester, warm_up
from reward.jail.limits import EXIT, NUMBER, Limits

del sys.path[0]

STAGE = "/tmp"  # where the new root is put together; any directory that everyone can reach
DEVICES = ("null", "full", "random", "urandom")
MESSAGE_BYTES = 1 << 16
CHANNEL_AT = confine.JOB_FDS.index(harness.CHANNEL_FD)
FILES_SPACE = socket.CMSG_SPACE(4 * len(confine.JOB_FDS))
MAX_STEPS = 256  # kept, one for each set of limits
RESERVED_FDS = harness.LINK_FD + 2  # the job's files, and one that bubblewrap writes to
CONFINED = harness.frame({"confined": True})
RUNNERS = {
    "stdio": harness.run_script,
    "calls": harness.serve_calls,
    "candidate": candidate_objects.run,
    "tests": tester.run,
    "math": math_equality.run,
}
ENVIRONMENT = {"HOME": "/tmp", "TMPDIR": "/tmp", "PATH": "", "LANG": "C"}
OOM_SCORE = "500"  # when the host runs out of memory, its kernel takes a job before it takes a judge


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file or folder of the host, opened before the host goes out of sight."""

    path: str
    fd: int
    is_folder: bool
    is_device: bool
    flags: int


def main() -> None:
    control = take_control(sys.argv[1])
    settings = json.loads(sys.argv[2])
    try:
        preload(settings["modules"])
        virtual_bytes = measure_virtual_bytes()
        linux.unshare(
            linux.CLONE_NEWUSER
            | linux.CLONE_NEWNS
            | linux.CLONE_NEWNET
            | linux.CLONE_NEWIPC
            | linux.CLONE_NEWUTS
            | linux.CLONE_NEWPID
        )
        send(control, {"unshared": True})
        ids = json.loads(control.recv(MESSAGE_BYTES))["ids"]
        pid = os.fork()
    except (OSError, ImportError, seccomp.UnsupportedArch) as error:
        send(control, failed(error))
        sys.exit(1)
    if pid:
        control.close()
        os.waitpid(pid, 0)
        os._exit(0)
    try:
        pid_namespace_fd = _become_zygote(settings, ids)
        zygote = Zygote(control, pid_namespace_fd, ids, virtual_bytes)
    except (OSError, seccomp.UnsupportedArch) as error:
        send(control, failed(error))
        os._exit(1)
    confine.confine_for_all()
    seccomp.Filter(seccomp.zygote_program(platform.machine())).install()
    zygote.serve()


def preload(modules: list[str]) -> None:
    """Imports what jobs may want, so that importing costs them nothing and needs no shared library of the host."""
    for name in modules:
        importlib.import_module(name)
    ctypes.CDLL("libgcc_s.so.1")  # the C library loads it when the first thread ends, and the root has no /lib
    for name in [name for name in sys.modules if name.split(".")[0] == "reward"]:
        del sys.modules[name]


def _become_zygote(settings: dict[str, Any], ids: list[int]) -> int:
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write(OOM_SCORE)
    pid_namespace_fd = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    sources = [_open_source(path) for path in (*settings["folders"], *(f"/dev/{name}" for name in DEVICES))]
    if len(ids) > 1:
        os.setgroups([])
    os.setresgid(ids[0], ids[0], ids[0])
    os.setresuid(ids[0], ids[0], ids[0])
    _build_root(sources, settings["hidden"])
    socket.sethostname("jail")
    linux.die_with_parent(signal.SIGKILL)
    for source in sources:
        os.close(source.fd)
    sys.path[:] = [path for path in sys.path if os.path.isdir(path)]
    os.environ.clear()
    os.environ.update(ENVIRONMENT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC), 2)
    warm_up.run_every_kind(RUNNERS)
    os.dup2(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC), 0)
    os.dup2(os.pipe()[1], 1)
    harness.fresh_interpreter()
    gc.collect()
    gc.freeze()
    return pid_namespace_fd


def _open_source(path: str) -> Source:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    mode, flags = os.fstat(fd).st_mode, linux.locked_mount_flags(os.fstatvfs(fd).f_flag)
    return Source(path=path, fd=fd, is_folder=stat.S_ISDIR(mode), is_device=stat.S_ISCHR(mode), flags=flags)


def _build_root(sources: list[Source], hidden: list[str]) -> None:
    """A read-only tmpfs that holds the sources at their own paths, and an empty /tmp. Nothing else of the host stays."""
    linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("jail", STAGE, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=1m,mode=755")
    for source in sources:
        target = STAGE + source.path
        os.makedirs(target if source.is_folder else os.path.dirname(target), exist_ok=True)
        if not source.is_folder:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
        linux.mount(f"/proc/self/fd/{source.fd}", target, None, linux.MS_BIND)
        closed = 0 if source.is_device else linux.MS_NODEV  # a device on a read-only mount can be written to, not changed
        flags = source.flags | linux.MS_REMOUNT | linux.MS_BIND | linux.MS_NOSUID | linux.MS_RDONLY | closed
        linux.mount("none", target, None, flags)
        for name in hidden:
            if source.is_folder and os.path.isdir(folder := os.path.join(target, name)):
                linux.mount("hidden", folder, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_RDONLY, "size=4k")
    os.makedirs(STAGE + "/tmp", exist_ok=True)
    read_only = linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV
    linux.mount("none", STAGE, None, read_only)
    os.chdir(STAGE)
    linux.pivot_root(".", ".")
    linux.detach(".")
    os.chdir("/")


class Starter:
    """Starts jobs on request and reports how each ended. How a job is started is for the subclass to say."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.jobs: dict[int, tuple[int, int]] = {}  # pidfd -> (job id, pid)
        self.poll = select.poll()

    def spawn(self, limits: bytes, fds: Sequence[int]) -> int:
        """Starts a job with these packed limits and files (at `confine.JOB_FDS`); its process, a child of this one."""
        raise NotImplementedError

    def kill(self, pidfd: int) -> None:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def exit_code(self, pid: int, status: int) -> int:
        """The job's exit code, or minus the signal that ended it."""
        return os.waitstatus_to_exitcode(status)

    def serve(self) -> None:
        self.poll.register(self.control, select.POLLIN)
        send(self.control, {"ready": measure_resident_bytes()})
        while True:
            for fd, _ in self.poll.poll():
                if fd == self.control.fileno():
                    self._handle_request()
                elif fd in self.jobs:
                    self._report_exit(fd)

    def _handle_request(self) -> None:
        try:
            data, ancillary, _, _ = self.control.recvmsg(MESSAGE_BYTES, FILES_SPACE, socket.MSG_CMSG_CLOEXEC)
        except ConnectionError:
            data = b""
        if not data:
            os._exit(0)  # the judge is gone, and with this process goes every job
        (number,) = NUMBER.unpack_from(data)
        if ancillary:
            self._start(number, data[NUMBER.size :], memoryview(ancillary[0][2]).cast("i").tolist())
            return
        for pidfd, (job, _) in self.jobs.items():
            if job == number:
                self.kill(pidfd)

    def _start(self, number: int, limits: bytes, fds: list[int]) -> None:
        try:
            pid = self.spawn(limits, fds)
            pidfd = os.pidfd_open(pid)
        except OSError as error:  # the host lacks something now
            harness.write_frame(failed(error), fds[CHANNEL_AT])
            self.control.send(EXIT.pack(number, 1, 0.0, 0))
            return
        finally:
            for fd in fds:
                os.close(fd)
        self.jobs[pidfd] = (number, pid)
        self.poll.register(pidfd, select.POLLIN)

    def _report_exit(self, pidfd: int) -> None:
        number, pid = self.jobs.pop(pidfd)
        self.poll.unregister(pidfd)
        _, status, usage = os.wait4(pid, 0)
        code = self.exit_code(pid, status)
        os.close(pidfd)
        try:
            self.control.send(EXIT.pack(number, code, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024))
        except (BrokenPipeError, ConnectionError):
            os._exit(0)


class Zygote(Starter):
    """Jobs are forks of this process."""

    def __init__(self, control: socket.socket, pid_namespace_fd: int, ids: list[int], virtual_bytes: int) -> None:
        super().__init__(control)
        self.pid_namespace_fd = pid_namespace_fd
        self.job_ids = ids[1:] or ids
        self.virtual_bytes = virtual_bytes
        self.syscalls = seccomp.Filter(seccomp.job_program(platform.machine()))
        self.started = 0
        self.steps: dict[tuple[bytes, int], confine.ForkSteps] = {}

    def spawn(self, limits: bytes, fds: Sequence[int]) -> int:
        self.started += 1
        uid = self.job_ids[self.started % len(self.job_ids)]  # rotated: a dying job still counts against its uid's processes
        steps = self.steps.get((limits, len(fds))) or self._steps(limits, len(fds))
        steps.aim(fds, uid)
        linux.unshare(linux.CLONE_NEWPID)
        try:
            pid = linux.fork()
            if pid == 0:
                _run_job(steps)
        finally:
            linux.setns(self.pid_namespace_fd, linux.CLONE_NEWPID)
        return pid

    def _steps(self, limits: bytes, files: int) -> confine.ForkSteps:
        if len(self.steps) >= MAX_STEPS:
            self.steps.clear()
        steps = confine.ForkSteps(Limits.unpack(limits), files, self.virtual_bytes, self.syscalls)
        self.steps[limits, files] = steps
        return steps


def _run_job(steps: confine.Steps) -> None:
    """The job's life after the fork: confine, say so, run. Never returns."""
    try:
        if error := steps.take():
            harness.write_frame(failed(error))
            os._exit(1)
        os.write(harness.CHANNEL_FD, CONFINED)
        harness.run(RUNNERS)
    except harness.ChannelClosed:
        os._exit(0)
    finally:
        os._exit(1)


def failed(error: Exception) -> dict[str, Any]:
    """A message to the judge: why a jail cannot be had."""
    return {"failed": str(error), "errno": getattr(error, "errno", None)}


def take_control(fd: str) -> socket.socket:
    """The control socket, moved out of the way: below RESERVED_FDS there is nothing of this process, only of its jobs."""
    control = socket.socket(fileno=fcntl.fcntl(int(fd), fcntl.F_DUPFD_CLOEXEC, RESERVED_FDS))
    os.close(int(fd))
    while (free := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) < RESERVED_FDS:
        pass
    os.close(free)
    return control


def measure_virtual_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def measure_resident_bytes() -> int:
    """The memory that this process uses, and so each fork of it before it does anything."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def send(control: socket.socket, message: dict[str, Any]) -> None:
    control.send(json.dumps(message).encode())


if __name__ == "__main__":
    main()
