"""The fallback where this process may not make namespaces but bubblewrap may (it is setuid, or the host trusts only its profile).

Speaks to the judge as the zygote does (`jail`), and starts every job as a new Python under `bwrap`, confined by the same rlimits
and the same system call filter. That costs a cold interpreter a job. Where the host lets bubblewrap keep no capability (a setuid
bwrap, some AppArmor profiles) one thing is weaker: the number of files in /tmp is not limited.

Started by `reward.sandbox.sandbox` as a script; as `bubblewrap.py --job LIMITS FILES VIRTUAL_BYTES` it is the job itself, inside.
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
JOB_ID = 1000
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")


class Wrapped(zygote.Starter):
    """Jobs are children of bubblewrap processes, which are children of this one."""

    def __init__(self, control: socket.socket, settings: dict[str, Any]) -> None:
        super().__init__(control)
        self.settings = settings
        self.capabilities = ["--cap-add", "CAP_SYS_ADMIN"] if _keeps_capabilities(settings["bwrap"]) else []
        self.virtual_bytes = zygote.measure_virtual_bytes()
        self.states: dict[int, tuple[int, int]] = {}  # pid of bwrap -> (where it says more, the job's pid)

    def spawn(self, limits: bytes, fds: Sequence[int]) -> int:
        status_fd, theirs = os.pipe2(os.O_CLOEXEC)
        moves = [(os.POSIX_SPAWN_DUP2, fd, to) for fd, to in (*zip(fds, confine.JOB_FDS, strict=False), (theirs, STATUS_FD))]
        command = [
            self.settings["bwrap"],
            *self._arguments(Limits.unpack(limits).disk_bytes),
            *self._job(limits, len(fds)),
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

    def _job(self, limits: bytes, files: int) -> list[str]:
        python = ["-s", "-S", "-P", "-B", "-X", "utf8", f"{INSIDE}/{os.path.basename(__file__)}"]
        return [os.path.realpath(sys.executable), *python, "--job", limits.hex(), str(files), str(self.virtual_bytes)]

    def _arguments(self, disk_bytes: int) -> list[str]:
        executable = os.path.realpath(sys.executable)
        arguments = ["--unshare-user", "--unshare-all", "--die-with-parent", "--as-pid-1", "--new-session", "--hostname", "jail"]
        arguments += ["--uid", str(JOB_ID), "--gid", str(JOB_ID), "--cap-drop", "ALL", *self.capabilities, "--clearenv"]
        for name, value in {**zygote.ENVIRONMENT, **self.settings["environment"]}.items():
            arguments += ["--setenv", name, value]
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


def _keeps_capabilities(bwrap: str) -> bool:
    """Whether a job may still mount: in its own user namespace, before it confines itself."""
    command = [bwrap, "--unshare-user", "--cap-add", "CAP_SYS_ADMIN", "--ro-bind", "/", "/", "--", "/bin/true"]
    return subprocess.run(command, capture_output=True, timeout=START_S).returncode == 0


def main() -> None:
    if sys.argv[1] == "--job":
        run_job(Limits.unpack(bytes.fromhex(sys.argv[2])), int(sys.argv[3]), int(sys.argv[4]))
    control = zygote.take_control(sys.argv[1])
    try:
        starter = Wrapped(control, json.loads(sys.argv[2]))
    except OSError as error:
        zygote.send(control, {"failed": str(error)})
        sys.exit(1)
    starter.serve()


def run_job(limits: Limits, files: int, virtual_bytes: int) -> None:
    """Confines this process and runs what the judge sends. Never returns."""
    try:
        os.closerange(confine.first_unused_fd(files), confine.OPEN_MAX)
        zygote.preload([])
        with suppress(PermissionError):  # bubblewrap's own /tmp stays
            linux.mount("job", "/tmp", "tmpfs", confine.FOLDER_FLAGS, confine.folder_options(limits.disk_bytes))
            os.chdir("/tmp")
        confine.confine_for_all()
        if failed := confine.wrapped(limits, virtual_bytes, seccomp.Filter(seccomp.program(platform.machine()))).take():
            harness.write_frame({"unconfined": failed})
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
