"""The backend for a Slurm job: one step for each process, watched from the batch script.

A process has ended when the last line of its step says so (step.py), or when its node is lost (nodes.py). If a step disappears
without that line, its node may be the reason: that is decided by the node's loss, or by its next heartbeat.
"""

import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from launch.placement.placement import ProcessSpec
from launch.processes.child import kill_group, start_guarded
from launch.processes.lifecycle import ProcessExit
from launch.processes.logs import last_lines, open_log, read_exit
from launch.processes.supervise import TICK_S, Exited, NodeLost
from launch.slurm.job import SlurmJob, time_left_s
from launch.slurm.nodes import NodeWatch, end_step
from launch.slurm.step import StepContext, exit_code, step_command, step_id, watchdog_command

GRACE_S = 10.0  # from SIGTERM until the step is killed; Slurm's own KillWait after scancel is 30 s by default
KILL_S = 15.0  # the time that Slurm has to end a step that it was told to kill
HEAD_BYTES = 4096


@dataclass(slots=True)
class _Running:
    process: ProcessSpec
    srun: subprocess.Popen[bytes]
    log: Path
    offset: int  # where this start begins in the log
    token: str
    kill_srun_s: float = float("inf")  # when srun itself is killed
    vanished_s: float | None = None  # when srun ended although the step had not written its last line

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to srun. srun passes SIGUSR1 on to every process of the step; on SIGTERM it kills the step."""
        with suppress(ProcessLookupError):
            self.srun.send_signal(number)

    def kill(self, now: float) -> None:
        self.send(signal.SIGTERM)
        self.kill_srun_s = now + KILL_S

    def step(self) -> str | None:
        """The step's number; None before it runs, and when its log was removed."""
        with suppress(FileNotFoundError), self.log.open("rb") as file:
            file.seek(self.offset)
            return step_id(file.read(HEAD_BYTES).decode(errors="replace").splitlines())
        return None


class SlurmBackend:
    """The nodes of this job."""

    def __init__(self, job: SlurmJob, context: StepContext, log_dir: Path, *, grace_s: float = GRACE_S) -> None:
        self._context, self._log_dir, self._grace_s = context, log_dir, grace_s
        self._running: dict[str, _Running] = {}
        self._on_lost_nodes: list[_Running] = []  # their srun may take a while to end
        self._job = job
        names, cluster = [node.name for node in job.nodes], context.cluster
        self._nodes = NodeWatch(job.id, names, cluster.heartbeat_s, cluster.srun_args)
        self._watchdog: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "SlurmBackend":
        self._log_dir.mkdir(parents=True, exist_ok=True)
        if len(self._job.nodes) > 1:
            cluster, names = self._context.cluster, [node.name for node in self._job.nodes]
            with (self._log_dir / "watchdog.log").open("ab") as log:
                command = watchdog_command(
                    self._job.id, names, restarts=self._job.restarts, requeues=cluster.requeues, srun_args=cluster.srun_args
                )
                self._watchdog = start_guarded(command, {}, output=log.fileno())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end_all(lambda: False)

    def start(self, process: ProcessSpec) -> None:
        token, path = secrets.token_hex(4), self._log_dir / f"{process.name}.log"
        with open_log(path, process.argv) as log:
            offset = log.tell()
            srun = start_guarded(step_command(process, self._context, token), {}, output=log.fileno())
        self._running[process.name] = _Running(process=process, srun=srun, log=path, offset=offset, token=token)

    def stop(self, name: str) -> None:
        if (running := self._running.get(name)) is not None:
            running.kill(time.monotonic())

    def request_save(self, name: str) -> None:
        if (running := self._running.get(name)) is not None:
            running.send(signal.SIGUSR1)

    def events(self) -> Sequence[Exited | NodeLost]:
        now = time.monotonic()
        events: list[Exited | NodeLost] = [self._lose(node, why, now) for node, why in self._nodes.poll(now).items()]
        for name, running in list(self._running.items()):
            if (exit := self._exit_of(running, now)) is not None:
                del self._running[name]
                events.append(Exited(name=name, exit=exit))
        self._on_lost_nodes = [running for running in self._on_lost_nodes if not _has_ended(running, now)]
        return events

    def heartbeat_s(self) -> float:
        return self._nodes.heartbeat_s()

    def time_left_s(self) -> float:
        return time_left_s(self._job)

    def end_all(self, at_once: Callable[[], bool]) -> None:
        running = [each for each in self._running.values() if each.srun.poll() is None]
        if running and not at_once():
            _terminate(running)
            _wait(running, self._grace_s, at_once)
        running += self._on_lost_nodes
        for each in running:
            each.send(signal.SIGTERM)
        _wait(running, KILL_S, lambda: False)
        for each in running:
            kill_group(each.srun)
        self._running.clear()
        self._on_lost_nodes.clear()
        self._nodes.end()
        if self._watchdog is not None:
            end_step(self._watchdog)
            self._watchdog = None

    def _exit_of(self, running: _Running, now: float) -> ProcessExit | None:
        """How a process ended; None while it runs, and while the reason is not known."""
        if not _has_ended(running, now):
            return None
        name = running.process.name
        if (code := exit_code(last_lines(running.log), running.token)) is not None:
            return read_exit(name, code, running.log)
        if running.vanished_s is None:
            running.vanished_s = now
            _scancel([running])  # srun alone may have been killed, while the process still holds its ports
            self._nodes.ask_soon()
        was_killed = running.kill_srun_s < float("inf")
        if was_killed or self._nodes.last_heartbeat_s(running.process.node) > running.vanished_s:
            return read_exit(name, -signal.SIGKILL, running.log)
        return None

    def _lose(self, node: str, why: str, now: float) -> NodeLost:
        for name, running in list(self._running.items()):
            if running.process.node == node:
                running.kill(now)  # in case the node is alive after all
                self._on_lost_nodes.append(self._running.pop(name))
        silent_s = now - self._nodes.last_heartbeat_s(node)
        return NodeLost(node=node, why=why, silent_s=max(0.0, silent_s))


def _has_ended(running: _Running, now: float) -> bool:
    if running.srun.poll() is not None:
        return True
    if now > running.kill_srun_s:
        running.send(signal.SIGKILL)
    return False


def _scancel(steps: Sequence[_Running], *options: str) -> None:
    """Signals the steps themselves, whether or not their srun is alive."""
    if numbers := [number for running in steps if (number := running.step()) is not None]:
        with suppress(OSError, subprocess.TimeoutExpired):  # scancel complains about steps that have just ended
            subprocess.run(["scancel", "--quiet", *options, *numbers], capture_output=True, timeout=GRACE_S, check=False)


def _terminate(steps: Sequence[_Running]) -> None:
    """Sends SIGTERM to every process of the steps. A step that is only starting is killed."""
    _scancel(steps, "--signal=TERM")
    for running in steps:
        if running.step() is None:
            running.send(signal.SIGTERM)


def _wait(steps: Sequence[_Running], timeout_s: float, at_once: Callable[[], bool]) -> None:
    deadline = time.monotonic() + timeout_s
    while any(running.srun.poll() is None for running in steps) and time.monotonic() < deadline and not at_once():
        time.sleep(TICK_S)
