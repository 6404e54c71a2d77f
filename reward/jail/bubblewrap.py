"""The fallback where this process may not make namespaces but bubblewrap may (it is setuid, or the host trusts only its profile).

It speaks to the judge as the zygote does. It starts every job as a new Python under `bwrap`, confined by the same rlimits and the
same system call filter. That costs one start of Python per job. Where the host lets bubblewrap keep no capability (a setuid
bwrap, some AppArmor profiles), one thing is weaker: the number of files in /tmp is not limited.

No job runs as root of this host, who owns its device files: under a root judge each job takes a user id that nobody else has.

`reward.sandbox.sandbox` starts this file as a script. `bubblewrap.py --job LIMITS FILES VIRTUAL_BYTES UID` is the job itself,
inside.
"""

import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

sys.path.insert(0, os.path.abspath(f"{__file__}/../../.."))
from reward.jail import confine, harness, linux, seccomp, zygote
from reward.jail.limits import Limits

del sys.path[0]

START_S = 20.0
INSIDE = "/jail/reward/jail"  # where the job finds this folder
STATUS_FD = zygote.RESERVED_FDS - 1
JOB_ID = 1000  # inside the user namespace of an ordinary user's job
AS_ROOT = (
    "--unshare-ipc",
    "--unshare-pid",
    "--unshare-net",
    "--unshare-uts",
    "--unshare-cgroup-try",
    "--cap-drop",
    "ALL",
    "--cap-add",
    "CAP_SYS_ADMIN",
    "--cap-add",
    "CAP_SETUID",
    "--cap-add",
    "CAP_SETGID",
)
AS_USER = ("--unshare-user", "--unshare-all", "--uid", str(JOB_ID), "--gid", str(JOB_ID), "--cap-drop", "ALL")
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")


class Wrapped(zygote.Starter):
    """Jobs are children of bubblewrap processes, which are children of this one."""

    def __init__(self, control: socket.socket, settings: dict[str, Any]) -> None:
        super().__init__(control)
        self.settings = settings
        self.isolation = find_isolation(settings["bwrap"], is_root=bool(settings["job_ids"]))
        self.virtual_bytes = zygote.measure_virtual_bytes()
        self.started = 0
        self.states: dict[int, tuple[int, int]] = {}  # pid of bwrap -> (where it says more, the job's pid)

    def spawn(self, limits: bytes, fds: Sequence[int]) -> int:
        status_fd, theirs = os.pipe2(os.O_CLOEXEC)
        moves = [(os.POSIX_SPAWN_DUP2, fd, to) for fd, to in (*zip(fds, confine.JOB_FDS, strict=False), (theirs, STATUS_FD))]
        command = [
            self.settings["bwrap"],
            *self._arguments(Limits.unpack(limits).disk_bytes),
            *self._job(limits, len(fds), self._next_uid()),
        ]
        pid = os.posix_spawn(command[0], command, {}, file_actions=[*moves, (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)])
        os.close(theirs)
        first = b""
        while not first.rstrip().endswith(b"}") and (more := os.read(status_fd, 4096)):
            first += more
        self.states[pid] = (status_fd, json.loads(first)["child-pid"] if first else 0)
        return pid

    def kill(self, pidfd: int) -> None:
        """The job itself, so that bubblewrap lives to say what it used."""
        _, job_pid = self.states[self.jobs[pidfd][1]]
        if job_pid:
            try:
                os.kill(job_pid, 9)
            except ProcessLookupError:
                return

    def exit_code(self, pid: int, status: int) -> int:
        os.close(self.states.pop(pid)[0])
        code = os.waitstatus_to_exitcode(status)
        return 128 - code if code > 128 else code

    def _next_uid(self) -> int:
        """The user id of the next job on this host. A root judge has one for each: a dying job still counts against its own."""
        first, count = self.settings["job_ids"] or (JOB_ID, 1)
        self.started += 1
        return int(first + self.started % count)

    def _job(self, limits: bytes, files: int, uid: int) -> list[str]:
        python = ["-s", "-S", "-P", "-B", "-X", "utf8", f"{INSIDE}/{os.path.basename(__file__)}"]
        return [os.path.realpath(sys.executable), *python, "--job", limits.hex(), str(files), str(self.virtual_bytes), str(uid)]

    def _arguments(self, disk_bytes: int) -> list[str]:
        executable = os.path.realpath(sys.executable)
        arguments = [*self.isolation, "--die-with-parent", "--as-pid-1", "--new-session", "--hostname", "jail", "--clearenv"]
        for name, value in {**zygote.ENVIRONMENT, **self.settings["environment"]}.items():
            arguments += ["--setenv", name, value]
        shown = [*LIBRARIES, executable, INSIDE, *self.settings["folders"], *(f"/dev/{name}" for name in zygote.DEVICES)]
        for folder in sorted({parent for path in shown for parent in parents(path)}):
            arguments += ["--perms", "0755", "--dir", folder]  # bubblewrap makes some that only root can enter
        for path in LIBRARIES:
            if os.path.islink(path):
                arguments += ["--symlink", os.readlink(path), path]
            elif os.path.isdir(path):
                arguments += ["--ro-bind", path, path]
        arguments += ["--ro-bind", executable, executable, "--ro-bind", os.path.dirname(os.path.abspath(__file__)), INSIDE]
        for path in self.settings["folders"]:
            arguments += ["--ro-bind", path, path]
        hidden = [os.path.join(path, name) for path in self.settings["folders"] for name in self.settings["hidden"]]
        for folder in ("/usr/lib/python3", *hidden):
            if os.path.isdir(folder):
                arguments += ["--tmpfs", folder, "--remount-ro", folder]
        for name in zygote.DEVICES:
            arguments += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
        arguments += ["--size", str(disk_bytes), "--tmpfs", "/tmp", "--chdir", "/tmp", "--remount-ro", "/"]
        return [*arguments, "--json-status-fd", str(STATUS_FD), "--"]


def parents(path: str) -> set[str]:
    """The folders that a path lies in, apart from the root."""
    folder = os.path.dirname(path)
    return set() if folder == "/" else {folder} | parents(folder)


def find_isolation(bwrap: str, *, is_root: bool) -> tuple[str, ...]:
    """The arguments that isolate a job: where the host allows it, with the right to mount until it confines itself. Raises
    OSError where bubblewrap does not work here."""
    said = b""
    for arguments in (AS_ROOT,) if is_root else ((*AS_USER, "--cap-add", "CAP_SYS_ADMIN"), AS_USER):
        done = subprocess.run([bwrap, *arguments, "--ro-bind", "/", "/", "--", "/bin/true"], capture_output=True, timeout=START_S)
        if done.returncode == 0:
            return arguments
        said = done.stderr
    raise OSError(f"{bwrap} does not work here: {said.decode(errors='replace').strip()}")


def main() -> None:
    if sys.argv[1] == "--job":
        run_job(Limits.unpack(bytes.fromhex(sys.argv[2])), *map(int, sys.argv[3:]))
    control = zygote.take_control(sys.argv[1])
    try:
        starter = Wrapped(control, json.loads(sys.argv[2]))
    except OSError as error:
        zygote.send(control, zygote.failed(error))
        sys.exit(1)
    starter.serve()


def run_job(limits: Limits, files: int, virtual_bytes: int, uid: int) -> None:
    """Confines this process and runs what the judge sends. Never returns."""
    try:
        os.closerange(confine.first_unused_fd(files), confine.OPEN_MAX)
        zygote.preload([])
        with suppress(PermissionError):  # bubblewrap's own /tmp stays
            linux.mount("job", "/tmp", "tmpfs", confine.FOLDER_FLAGS, confine.folder_options(limits.disk_bytes))
            os.chdir("/tmp")
            for name in zygote.DEVICES:
                flags = linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NOEXEC
                linux.mount("none", f"/dev/{name}", None, flags)
        if os.getuid() == 0:
            os.setgroups([])
        confine.confine_for_all()
        if error := confine.wrapped(limits, uid, virtual_bytes, seccomp.Filter(seccomp.program(platform.machine()))).take():
            harness.write_frame(zygote.failed(error))
            os._exit(1)
        os.write(harness.CHANNEL_FD, zygote.CONFINED)
        harness.fresh_interpreter()
        harness.run(zygote.RUNNERS)
    except harness.ChannelClosed:
        os._exit(0)
    finally:
        os._exit(1)


if __name__ == "__main__":
    main()
