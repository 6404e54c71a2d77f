"""The processes of a Slurm job: one step each, watched from the batch script. A `Host` for `supervise.py`.

A process ends by a step whose last line says so (step.py), or with its node (nodes.py). A step that vanished
without a word is put down to its node if that is found lost, and to itself once the node was heard again.
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

from launch.placement.placement import Process
from launch.processes.child import end_group, start_guarded
from launch.processes.lifecycle import Cause
from launch.processes.logs import cause_of_end, last_lines, open_log
from launch.processes.supervise import TICK_S, Ended, NodeLost
from launch.slurm.job import Job, time_left_s
from launch.slurm.nodes import NodeWatch, end_step
from launch.slurm.step import Where, deputy_command, exit_code, step_command, step_id

GRACE_S = 10.0  # between SIGTERM and the kill of a step; Slurm's KillWait after a scancel is 30 s by default
KILLED_S = 15.0  # for Slurm to end a step that it was told to kill
HEAD_BYTES = 4096


@dataclass(slots=True)
class _Running:
    process: Process
    popen: subprocess.Popen[bytes]  # the srun
    log: Path
    offset: int  # in the log, of what this start wrote
    token: str
    kill_s: float = float("inf")  # when the step is killed
    drop_s: float = float("inf")  # when its srun is
    vanished_s: float | None = None  # when srun ended without a word from the step

    def send(self, number: signal.Signals) -> None:
        """To srun itself: SIGUSR1 it hands to every process of the step, SIGTERM has it kill the step."""
        with suppress(ProcessLookupError):
            self.popen.send_signal(number)

    def kill(self, now: float) -> None:
        self.send(signal.SIGTERM)
        self.kill_s, self.drop_s = float("inf"), now + KILLED_S

    def step(self) -> str | None:
        """Its number, once it runs; None too if its log was cleared away."""
        with suppress(FileNotFoundError), self.log.open("rb") as file:
            file.seek(self.offset)
            return step_id(file.read(HEAD_BYTES).decode(errors="replace").splitlines())
        return None


class SlurmHost:
    """The nodes of this job."""

    def __init__(self, job: Job, where: Where, log_dir: Path, *, grace_s: float = GRACE_S) -> None:
        self._where, self._log_dir, self._grace_s = where, log_dir, grace_s
        self._running: dict[str, _Running] = {}
        self._orphaned: list[_Running] = []  # steps on lost nodes, whose srun may take a while to end
        self._job = job
        self._nodes = NodeWatch(job.id, [node.name for node in job.nodes], where.cluster.heartbeat_s, where.cluster.srun_args)
        self._deputy: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "SlurmHost":
        self._log_dir.mkdir(parents=True, exist_ok=True)
        if len(self._job.nodes) > 1:
            cluster, names = self._where.cluster, [node.name for node in self._job.nodes]
            with (self._log_dir / "deputy.log").open("ab") as log:
                command = deputy_command(
                    self._job.id, names, restarts=self._job.restarts, requeues=cluster.requeues, srun_args=cluster.srun_args
                )
                self._deputy = start_guarded(command, {}, output=log.fileno())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end_all(lambda: False)

    def start(self, process: Process) -> None:
        token, path = secrets.token_hex(4), self._log_dir / f"{process.name}.log"
        with open_log(path, process.argv) as log:
            offset = log.tell()
            popen = start_guarded(step_command(process, self._where, token), {}, output=log.fileno())
        self._running[process.name] = _Running(process=process, popen=popen, log=path, offset=offset, token=token)

    def stop(self, name: str, *, at_once: bool) -> None:
        running, now = self._running.get(name), time.monotonic()
        if running is None:
            return
        if at_once:
            running.kill(now)
        else:
            _ask_to_end([running])
            running.kill_s = now + self._grace_s

    def tell_to_save(self, name: str) -> None:
        if (running := self._running.get(name)) is not None:
            running.send(signal.SIGUSR1)

    def events(self) -> Sequence[Ended | NodeLost]:
        now = time.monotonic()
        events: list[Ended | NodeLost] = [self._lose(node, why, now) for node, why in self._nodes.look(now).items()]
        for name, running in list(self._running.items()):
            if (cause := self._look_at(running, now)) is not None:
                del self._running[name]
                events.append(Ended(name=name, cause=cause))
        self._orphaned = [running for running in self._orphaned if not _is_over(running, now)]
        return events

    def heard_s(self) -> float:
        return self._nodes.heard_s()

    def left_s(self) -> float:
        return time_left_s(self._job)

    def end_all(self, hurry: Callable[[], bool]) -> None:
        living = [running for running in self._running.values() if running.popen.poll() is None]
        if living and not hurry():
            _ask_to_end(living)
            _wait(living, self._grace_s, hurry)
        living += self._orphaned
        for running in living:
            running.send(signal.SIGTERM)
        _wait(living, KILLED_S, lambda: False)
        for running in living:
            end_group(running.popen)
        self._running.clear()
        self._orphaned.clear()
        self._nodes.end()
        if self._deputy is not None:
            end_step(self._deputy)
            self._deputy = None

    def _look_at(self, running: _Running, now: float) -> Cause | None:
        """How it ended; None while it runs, and while that is not known."""
        if not _is_over(running, now):
            if now > running.kill_s:
                running.kill(now)
            return None
        name = running.process.name
        if (code := exit_code(last_lines(running.log), running.token)) is not None:
            return cause_of_end(name, code, running.log)
        if running.vanished_s is None:
            running.vanished_s = now
            _scancel([running])  # its srun may have been killed alone, and the process still hold its ports
            self._nodes.ask_soon()
        was_killed = running.drop_s < float("inf")
        if was_killed or self._nodes.heard_at(running.process.node) > running.vanished_s:
            return cause_of_end(name, -signal.SIGKILL, running.log)
        return None

    def _lose(self, node: str, why: str, now: float) -> NodeLost:
        for name, running in list(self._running.items()):
            if running.process.node == node:
                running.kill(now)  # in case the node lives after all
                self._orphaned.append(self._running.pop(name))
        silent_s = now - self._nodes.heard_at(node)
        return NodeLost(node=node, why=why, silent_s=max(0.0, silent_s))


def _is_over(running: _Running, now: float) -> bool:
    if running.popen.poll() is not None:
        return True
    if now > running.drop_s:
        running.send(signal.SIGKILL)
    return False


def _scancel(steps: Sequence[_Running], *options: str) -> None:
    """The steps themselves, whether their srun lives or not."""
    if numbers := [number for running in steps if (number := running.step()) is not None]:
        with suppress(OSError, subprocess.TimeoutExpired):  # it complains of steps that have just ended
            subprocess.run(["scancel", "--quiet", *options, *numbers], capture_output=True, timeout=GRACE_S, check=False)


def _ask_to_end(steps: Sequence[_Running]) -> None:
    """SIGTERM to every process of the steps. What is only being started is killed."""
    _scancel(steps, "--signal=TERM")
    for running in steps:
        if running.step() is None:
            running.send(signal.SIGTERM)


def _wait(steps: Sequence[_Running], timeout_s: float, hurry: Callable[[], bool]) -> None:
    deadline = time.monotonic() + timeout_s
    while any(running.popen.poll() is None for running in steps) and time.monotonic() < deadline and not hurry():
        time.sleep(TICK_S)
