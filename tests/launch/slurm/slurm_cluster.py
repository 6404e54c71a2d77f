"""A real Slurm of a few nodes with (fake) GPUs on this machine, for tests.

    with slurm_cluster() as slurm:
        job = slurm.sbatch("--nodes=4", "launch/kestrel_256.sh", "experiment=debug")
        slurm.wait(job, {"COMPLETED"}, timeout_s=60)

It has its own folder, ports and munge, so several may run side by side. Its daemons die with this process. A missing Slurm is
installed by apt, which takes root; without either the tests fail and say so.

`ReturnToService=1`: a node that was too slow to answer comes back by itself, one that was killed stays down. With 2, an answer of
the killed node to an earlier question may still arrive, and have it called idle for as long as Slurm takes to miss it.
"""

import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from rollout.guard import PARENT_VARIABLE, guarded

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "munge")
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "munged")
START_S = 120.0
ENDED = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"})

SLURM_CONF = """
ClusterName=fake
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=1
SlurmdTimeout=60
MessageTimeout=60
KillWait=10
MinJobAge=3600
JobRequeue=1
NodeName=DEFAULT CPUs=16 RealMemory=4000 Gres=gpu:{gpus}
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class NoSlurm(RuntimeError):
    """This machine has no Slurm, and none can be installed."""


@dataclass(frozen=True, kw_only=True)
class SlurmCluster:
    folder: Path
    nodes: tuple[str, ...]
    _daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)  # by name; that of a node is its slurmd

    @property
    def env(self) -> dict[str, str]:
        """What a process needs to speak to this cluster."""
        outside = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "SRUN"))}
        return outside | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *command: str, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout_s: float = 120.0) -> str:
        """A command's standard output. Raises CalledProcessError, TimeoutExpired."""
        done = subprocess.run(
            command, cwd=cwd, env=self.env | dict(env or {}), capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if done.returncode:
            raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
        return done.stdout

    def sbatch(self, *arguments: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> int:
        """Submits a batch job; its number."""
        return int(self.run("sbatch", "--parsable", *arguments, cwd=cwd, env=env).split(";")[0])

    def job(self, number: int) -> dict[str, str]:
        """What `scontrol show job` says: JobState, NodeList, Restarts, …"""
        words = self.run("scontrol", "show", "job", "-o", str(number)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def state(self, number: int) -> str:
        return self.job(number)["JobState"]

    def wait(self, number: int, states: Collection[str], timeout_s: float) -> str:
        """Waits until the job is in one of these states. Raises AssertionError when it ends otherwise, or in time does not."""

        def arrived() -> bool:
            if (state := self.state(number)) in ENDED and state not in states:
                raise AssertionError(f"job {number} is {state}, not {' or '.join(sorted(states))}")
            return state in states

        until(f"job {number} is {' or '.join(sorted(states))}", arrived, timeout_s, 0.3)
        return self.state(number)

    def hasten(self, number: int) -> None:
        """Starts a requeued job soon; Slurm would have it wait for two minutes.

        Not in the same second: its nodes refuse what was revoked then (`Job credential revoked`), and the job fails.
        """
        time.sleep(2.5)
        self.run("scontrol", "update", f"jobid={number}", "starttime=now")

    def start_node(self, node: str) -> None:
        command = ["slurmd", "-D", "-f", str(self.folder / "slurm.conf"), "-N", node]
        self._daemons[node] = _start(command, self.folder / f"{node}.out", self.env)

    def kill_node(self, node: str, *, reported: bool = True) -> None:
        """The node is gone at once, with all that ran there; Slurm is told, or finds out by itself (a minute and more)."""
        slurmd = self._daemons.pop(node)
        _kill([psutil.Process(slurmd.pid), *self.steps(node)])
        slurmd.wait()
        if reported:
            self.report_down(node)

    def report_down(self, node: str) -> None:
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=test")

    @property
    def killed(self) -> list[str]:
        return [node for node in self.nodes if node not in self._daemons]

    def mend_node(self, node: str) -> None:
        """Brings a killed node back, whether or not Slurm has missed it, until it runs something.

        What `sinfo` says is no measure: it may call a node `mixed` for minutes by the processors that a killed job had.
        """
        self.start_node(node)

        def runs() -> bool:
            with suppress(subprocess.CalledProcessError):  # it is not down
                self.run("scontrol", "update", f"nodename={node}", "state=resume")
            with suppress(subprocess.CalledProcessError):
                return self.run("srun", "--immediate=5", f"--nodelist={node}", "printenv", "SLURMD_NODENAME").strip() == node
            return False

        until(f"{node} runs something", runs, START_S)

    def node_state(self, node: str) -> str:
        return self.run("sinfo", "-h", "-N", "-n", node, "-o", "%T").split()[0]

    def steps(self, node: str) -> list[psutil.Process]:
        """The step daemons of a node and everything that they run."""
        found = []
        for process in psutil.process_iter(["name"]):
            with suppress(psutil.Error, OSError):
                if process.info["name"] == "slurmstepd" and self._writes_log_of(node, process):
                    found += [process, *process.children(recursive=True)]
        return found

    def _writes_log_of(self, node: str, stepd: psutil.Process) -> bool:
        """A step daemon shows neither environment nor arguments, but it has its node's log open."""
        open_files = {os.readlink(entry) for entry in Path(f"/proc/{stepd.pid}/fd").iterdir()}
        return str(self.folder / f"slurmd.{node}.log") in open_files


def until(what: str, true: Callable[[], bool], timeout_s: float, every_s: float = 0.1) -> None:
    """Waits for a condition. Raises AssertionError when the time is over."""
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(every_s)


@contextmanager
def slurm_cluster(nodes: int = 4, gpus: int = 8) -> Iterator[SlurmCluster]:
    """A running cluster of nodes n1, n2, …, each at an address of its own, 127.0.1.1, 127.0.1.2, …"""
    install()
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        cluster = SlurmCluster(folder=folder, nodes=tuple(f"n{n}" for n in range(1, nodes + 1)))
        _configure(cluster, gpus)
        stack.callback(_stop, cluster)
        _start_munge(cluster)
        cluster._daemons["slurmctld"] = _start(
            ["slurmctld", "-D", "-f", str(folder / "slurm.conf")], folder / "slurmctld.out", cluster.env
        )
        for node in cluster.nodes:
            cluster.start_node(node)
        until("every node is idle", lambda: _all_idle(cluster), START_S)
        yield cluster


def install() -> None:
    """Installs Slurm if it is missing. Raises NoSlurm."""
    if all(shutil.which(program, path=_path()) for program in PROGRAMS):
        return
    command = f"apt-get install -y --no-install-recommends {' '.join(PACKAGES)}"
    if os.getuid() != 0 or not shutil.which("apt-get"):
        raise NoSlurm(f"this test needs Slurm: run `{command}` as root, or leave such tests out by `-m 'not slurm'`")
    print(f"installing Slurm: {command}", file=sys.stderr)
    env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    # The packages would also start a Slurm for this machine, which is not wanted.
    with _no_services():
        for step in (command, f"apt-get update && {command}"):
            done = subprocess.run(["bash", "-c", step], env=env, capture_output=True, text=True, timeout=240, check=False)
            if done.returncode == 0:
                return
    raise NoSlurm(f"`{command}` failed:\n{done.stderr[-2000:]}")


@contextmanager
def _no_services() -> Iterator[None]:
    policy = Path("/usr/sbin/policy-rc.d")  # Debian's packages ask it before they start a service; 101 means no
    if policy.exists():
        yield
        return
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    try:
        yield
    finally:
        policy.unlink()


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def _configure(cluster: SlurmCluster, gpus: int) -> None:
    folder, host = cluster.folder, socket.gethostname().split(".")[0]
    for name in ("munge", "state", "spool", "dev", *(f"spool/{node}" for node in cluster.nodes)):
        (folder / name).mkdir(mode=0o700)
    # Slurm takes a GPU for one if its file is a device; which device does not matter.
    for number in range(gpus):
        (folder / f"dev/nvidia{number}").symlink_to("/dev/null")
    controller_port, *ports = _free_ports(1 + len(cluster.nodes))
    lines = [
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.1.{number} Port={port}"
        for number, (node, port) in enumerate(zip(cluster.nodes, ports, strict=True), start=1)
    ]
    text = SLURM_CONF.format(
        host=host, user=pwd.getpwuid(os.getuid()).pw_name, folder=folder, controller_port=controller_port, gpus=gpus,
        nodes="\n".join(lines),
    )  # fmt: skip
    (folder / "slurm.conf").write_text(text)
    (folder / "gres.conf").write_text(
        f"AutoDetect=off\nNodeName=n[1-{len(cluster.nodes)}] Name=gpu File={folder}/dev/nvidia[0-{gpus - 1}]\n"
    )
    (folder / "cgroup.conf").touch()
    key = folder / "munge/key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("", 0))
        return [one.getsockname()[1] for one in sockets]


def _start_munge(cluster: SlurmCluster) -> None:
    files = {name: cluster.folder / "munge" / name for name in ("key", "socket", "pid", "log", "seed")}
    # Forced: it objects to a folder that other users cannot reach into.
    command = ["munged", "--force", "--foreground", f"--key-file={files['key']}", f"--socket={files['socket']}"]
    command += [f"--{name}-file={files[name]}" for name in ("pid", "log", "seed")]
    cluster._daemons["munged"] = _start(command, cluster.folder / "munged.out", cluster.env)
    until("munged listens", files["socket"].exists, START_S)


def _start(command: list[str], log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A daemon in the foreground, which the kernel ends when this process is gone."""
    with log.open("ab") as out:
        return subprocess.Popen(
            guarded(command),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**env, "PATH": _path(), PARENT_VARIABLE: str(os.getpid())},
            start_new_session=True,
        )


def _all_idle(cluster: SlurmCluster) -> bool:
    for name, daemon in cluster._daemons.items():
        if daemon.poll() is not None:
            said = "".join(log.read_text()[-1000:] for log in cluster.folder.glob(f"{name}.*") if log.suffix in (".out", ".log"))
            raise AssertionError(f"{name} ended with exit code {daemon.returncode}:\n{said}")
    with suppress(subprocess.SubprocessError):
        return all(cluster.node_state(node) == "idle" for node in cluster.nodes)
    return False


def _stop(cluster: SlurmCluster) -> None:
    """Ends all jobs, then the daemons, then what is left of any node."""
    with suppress(subprocess.SubprocessError, AssertionError):  # a process that does not end is killed below
        cluster.run("scancel", "--user", pwd.getpwuid(os.getuid()).pw_name)
        until("the jobs end", lambda: not cluster.run("squeue", "-h").strip(), 15.0)
    left = [process for node in cluster.nodes for process in cluster.steps(node)]
    for daemon in reversed(cluster._daemons.values()):
        daemon.send_signal(signal.SIGTERM)
    for daemon in cluster._daemons.values():
        with suppress(subprocess.TimeoutExpired):
            daemon.wait(timeout=5.0)
        daemon.kill()
        daemon.wait()
    _kill(left)


def _kill(processes: list[psutil.Process]) -> None:
    """All in one moment, as when a machine dies: stopped first, or one of them acts on the death of another."""
    for act in (psutil.Process.suspend, psutil.Process.kill):
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                act(process)
    psutil.wait_procs(processes, timeout=5.0)
