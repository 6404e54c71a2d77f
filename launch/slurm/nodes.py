"""Which nodes of a Slurm job are still there.

A node is lost when Slurm has taken it from the job, as it does when it finds it down, or when it was silent for
`silence_s`: a step over all nodes says each one's name every two seconds, through Slurm's own channels, and so needs
neither a port nor a file. Slurm alone would take minutes on most clusters (SlurmdTimeout).
"""

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from launch.processes.child import end_group, signal_group, start_guarded
from launch.slurm.step import beat_command, nodes_command

POLL_S = 5.0  # between two looks at what Slurm says
ANSWER_S = 30.0  # for Slurm to say it
PAUSE_S = 5.0  # a longer time between two looks means that this process was stopped, and all of a suspended job with it
BEAT_AGAIN_S = 5.0  # before the heartbeat's step is started again, should it end


class NodeWatch:
    """Watches nodes until they are lost. Times are the monotonic clock's."""

    def __init__(self, job: int, nodes: Sequence[str], silence_s: float, srun_args: Sequence[str] = ()) -> None:
        self._job, self._nodes = job, list(nodes)
        self._silence_s, self._srun_args = silence_s, srun_args
        self._heard_s: dict[str, float] = {}
        self._listening_s = 0.0  # since when the heartbeat's step runs, and this process too
        self._looked_s = float("inf")
        self._vouched_s = float("-inf")  # when Slurm last said which nodes the job has
        self._beat: _Command | None = None
        self._beat_due_s = 0.0
        self._question: _Command | None = None
        self._question_due_s = 0.0

    def look(self, now: float) -> dict[str, str]:
        """The nodes that are lost since the last look, and why; called several times a second."""
        if now - self._looked_s > PAUSE_S:
            self._listening_s = now
        self._looked_s = now
        self._listen(now)
        lost = self._silent(now) | self._taken(now)
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
        self._question_due_s = 0.0

    def end(self) -> None:
        for command in (self._beat, self._question):
            if command is not None:
                command.end()
        self._beat = self._question = None

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

    def _taken(self, now: float) -> dict[str, str]:
        if self._question is None:
            if now >= self._question_due_s:
                self._question = _Command(nodes_command(self._job), now)
            return {}
        asked = self._question
        if asked.popen.poll() is None and now < asked.started_s + ANSWER_S:
            return {}
        kept = asked.lines() if asked.popen.returncode == 0 else self._nodes
        if asked.popen.returncode == 0:
            self._vouched_s = asked.started_s
        asked.end()
        self._question, self._question_due_s = None, now + POLL_S
        return {node: "Slurm took it from the job" for node in self._nodes if node not in kept}


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
