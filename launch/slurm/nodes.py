"""Which nodes of a Slurm job are still there.

A node is lost when Slurm says that it is down, or when it was silent for `silence_s`: a step over all nodes says each
one's name every two seconds, through Slurm's own channels, and so needs neither a port nor a file. Slurm alone would
take minutes on most clusters (SlurmdTimeout).
"""

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from launch.child import end_group, signal_group, start_guarded
from launch.slurm.step import beat_command

POLL_S = 5.0  # between two looks at what Slurm says
ANSWER_S = 30.0  # for Slurm to say it
PAUSE_S = 5.0  # a longer time between two looks means that this process was stopped, and all of a suspended job with it
BEAT_AGAIN_S = 5.0  # before the heartbeat's step is started again, should it end
DOWN = ("down", "fail")  # `failing` is about to, and works; `unknown` are all for a moment when slurmctld has just started
FLAGS = "*~#!%$@^-+"  # that Slurm may add to a state


class NodeWatch:
    """Watches nodes until they are lost. Times are the monotonic clock's."""

    def __init__(self, nodes: Sequence[str], silence_s: float, srun_args: Sequence[str] = ()) -> None:
        self._nodes = list(nodes)
        self._silence_s, self._srun_args = silence_s, srun_args
        self._heard_s: dict[str, float] = {}
        self._listening_s = 0.0  # since when the heartbeat's step runs, and this process too
        self._looked_s = float("inf")
        self._vouched_s = float("-inf")  # when Slurm last said which nodes are down
        self._beat: _Command | None = None
        self._beat_due_s = 0.0
        self._states: _Command | None = None
        self._states_due_s = 0.0

    def look(self, now: float) -> dict[str, str]:
        """The nodes that are lost since the last look, and why; called several times a second."""
        if now - self._looked_s > PAUSE_S:
            self._listening_s = now
        self._looked_s = now
        self._listen(now)
        lost = self._silent(now) | self._down(now)
        self._nodes = [node for node in self._nodes if node not in lost]
        return lost

    def heard_at(self, node: str) -> float:
        """When the node was last heard. For one that never was, and while nobody is, Slurm's word must do."""
        if node not in self._heard_s:
            return self._vouched_s
        return self._heard_s[node] if self._is_heard() else max(self._heard_s[node], self._vouched_s)

    def heard_s(self) -> float:
        """Every node that is not lost was heard after this."""
        return min((self.heard_at(node) for node in self._nodes), default=float("inf"))

    def ask_soon(self) -> None:
        """Something happened that a lost node would explain."""
        self._states_due_s = 0.0

    def end(self) -> None:
        for command in (self._beat, self._states):
            if command is not None:
                command.end()
        self._beat = self._states = None

    def _listen(self, now: float) -> None:
        if self._beat is None:
            if now >= self._beat_due_s:
                self._beat, self._listening_s = _Command(beat_command(self._nodes, self._srun_args), now), now
            return
        for line in self._beat.lines():
            if line in self._nodes:
                self._heard_s[line] = now
        if self._beat.popen.poll() is not None:
            self._beat.end()
            self._beat, self._beat_due_s = None, now + BEAT_AGAIN_S

    def _silent(self, now: float) -> dict[str, str]:
        """Silence counts only for those who spoke, and while it could be broken: not before the step's first word.

        A step that Slurm is slow to start, or does not start, says nothing about the nodes.
        """
        if not self._is_heard():
            return {}
        since = {node: now - max(heard_s, self._listening_s) for node, heard_s in self._heard_s.items() if node in self._nodes}
        return {node: f"silent for {silent_s:.0f} s" for node, silent_s in since.items() if silent_s > self._silence_s}

    def _is_heard(self) -> bool:
        """Whether the heartbeat's present step has spoken."""
        return self._beat is not None and max(self._heard_s.values(), default=0.0) > self._listening_s

    def _down(self, now: float) -> dict[str, str]:
        if self._states is None:
            if now >= self._states_due_s:
                names = ",".join(self._nodes)
                self._states = _Command(["sinfo", "--noheader", "--Node", "--nodes", names, "--format", "%N %T"], now)
            return {}
        if self._states.popen.poll() is None and now < self._states.started_s + ANSWER_S:
            return {}
        answered = self._states.popen.returncode == 0
        down = down_nodes(self._states.lines())
        self._vouched_s = self._states.started_s if answered else self._vouched_s
        self._states.end()
        self._states, self._states_due_s = None, now + POLL_S
        return {node: f"Slurm says {state}" for node, state in down.items() if node in self._nodes}


def down_nodes(lines: Sequence[str]) -> dict[str, str]:
    """Of lines `node state`, as sinfo prints them, those nodes on which nothing can run."""
    pairs = (line.split() for line in lines)
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2 and pair[1].rstrip(FLAGS) in DOWN}


class _Command:
    """A command whose lines are read as they come."""

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
        """Whole lines that came since the last call."""
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
    """SIGTERM has srun end its step; what does not end so is killed."""
    if srun.poll() is None:
        signal_group(srun.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            srun.wait(timeout=5.0)
    end_group(srun)
