"""Watches which nodes of a Slurm job are alive.

A node is lost when Slurm has taken it from the job, as Slurm does when it finds a node down, or when its heartbeat was missing
for `silence_s`. The heartbeat is a step over all nodes that prints each node's name every two seconds. It uses Slurm's own
channels, so it needs no port and no file. Slurm alone would take minutes on most clusters (SlurmdTimeout).
"""

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from launch.processes.child import kill_group, signal_group, start_guarded
from launch.slurm.step import heartbeat_command, nodes_command

ASK_EVERY_S = 5.0  # how often Slurm is asked for the job's nodes
ANSWER_S = 30.0  # the time that Slurm has to answer
SUSPENDED_S = 5.0  # a longer time between two polls means that this process was stopped, and with it the whole job
RESTART_HEARTBEAT_S = 5.0  # the delay before the heartbeat's step is started again


class NodeWatch:
    """Watches nodes until they are lost. Times are those of the monotonic clock."""

    def __init__(self, job: int, nodes: Sequence[str], silence_s: float, srun_args: Sequence[str] = ()) -> None:
        self._job, self._nodes = job, list(nodes)
        self._silence_s, self._srun_args = silence_s, srun_args
        self._heartbeats_s: dict[str, float] = {}  # the last one of each node
        self._listening_since_s = 0.0  # since when both the heartbeat's step and this process have been running
        self._last_poll_s = float("inf")
        self._confirmed_s = float("-inf")  # when Slurm last said which nodes the job has
        self._heartbeat: _Command | None = None
        self._heartbeat_due_s = 0.0
        self._question: _Command | None = None
        self._question_due_s = 0.0

    def poll(self, now: float) -> dict[str, str]:
        """The nodes that were lost since the last call, and why. Called several times per second."""
        if now - self._last_poll_s > SUSPENDED_S:
            self._listening_since_s = now
        self._last_poll_s = now
        self._read_heartbeats(now)
        lost = self._silent(now) | self._taken(now)
        self._nodes = [node for node in self._nodes if node not in lost]
        return lost

    def last_heartbeat_s(self, node: str) -> float:
        """When the node was last known to be alive. While there is no heartbeat, Slurm's answer counts."""
        if node not in self._heartbeats_s:
            return self._confirmed_s
        last_s = self._heartbeats_s[node]
        return last_s if self._heartbeat_works() else max(last_s, self._confirmed_s)

    def heartbeat_s(self) -> float:
        """Every node that is not lost was alive after this time."""
        return min((self.last_heartbeat_s(node) for node in self._nodes), default=float("inf"))

    def ask_soon(self) -> None:
        """Asks Slurm at the next poll, because a lost node would explain what happened."""
        self._question_due_s = 0.0

    def end(self) -> None:
        for command in (self._heartbeat, self._question):
            if command is not None:
                command.end()
        self._heartbeat = self._question = None

    def _read_heartbeats(self, now: float) -> None:
        if self._heartbeat is None:
            if now >= self._heartbeat_due_s:
                command = heartbeat_command(self._nodes, self._srun_args)
                self._heartbeat, self._listening_since_s = _Command(command, now), now
            return
        for line in self._heartbeat.lines():
            if line in self._nodes:
                self._heartbeats_s[line] = now
        if self._heartbeat.popen.poll() is not None:
            self._heartbeat.end()
            self._heartbeat, self._heartbeat_due_s = None, now + RESTART_HEARTBEAT_S

    def _silent(self, now: float) -> dict[str, str]:
        """Nodes whose heartbeat has stopped. A node counts only after its first heartbeat, and while the step works.

        A step that Slurm starts late, or not at all, says nothing about the nodes.
        """
        if not self._heartbeat_works():
            return {}
        since = {
            node: now - max(last_s, self._listening_since_s) for node, last_s in self._heartbeats_s.items() if node in self._nodes
        }
        return {node: f"silent for {silent_s:.0f} s" for node, silent_s in since.items() if silent_s > self._silence_s}

    def _heartbeat_works(self) -> bool:
        """Whether the present step of the heartbeat has printed anything."""
        return self._heartbeat is not None and max(self._heartbeats_s.values(), default=0.0) > self._listening_since_s

    def _taken(self, now: float) -> dict[str, str]:
        if self._question is None:
            if now >= self._question_due_s:
                self._question = _Command(nodes_command(self._job), now)
            return {}
        question = self._question
        if question.popen.poll() is None and now < question.started_s + ANSWER_S:
            return {}
        kept = question.lines() if question.popen.returncode == 0 else self._nodes
        if question.popen.returncode == 0:
            self._confirmed_s = question.started_s
        question.end()
        self._question, self._question_due_s = None, now + ASK_EVERY_S
        return {node: "Slurm took it from the job" for node in self._nodes if node not in kept}


class _Command:
    """A running command whose output is read line by line without blocking."""

    def __init__(self, argv: Sequence[str], now: float) -> None:
        self.started_s = now
        self._read_end, write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        try:
            self.popen = start_guarded(argv, {}, output=write_end)
        finally:
            os.close(write_end)
        self._rest = b""

    def lines(self) -> list[str]:
        """The whole lines that came since the last call."""
        while True:
            try:
                data = os.read(self._read_end, 65536)
            except BlockingIOError:
                break
            if not data:
                break
            self._rest += data
        *whole, self._rest = self._rest.split(b"\n")
        return [line.decode(errors="replace").strip() for line in whole]

    def end(self) -> None:
        end_step(self.popen)
        os.close(self._read_end)


def end_step(srun: subprocess.Popen[bytes]) -> None:
    """On SIGTERM srun ends its step. If it does not, it is killed."""
    if srun.poll() is None:
        signal_group(srun.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            srun.wait(timeout=5.0)
    kill_group(srun)
