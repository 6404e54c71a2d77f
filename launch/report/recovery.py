"""How long a loss interrupts training, from the last heartbeat to the first step after it, in parts:

    detection    from the node's last heartbeat until the loss is known; 0 if a process failed on a living node
    restart      until the new processes of the trainer start: the old ones end, and the placement is computed again
    load         until its first step begins: Python, Megatron, the checkpoint, the first push
    first step   the step itself

Each interruption is one line of `recoveries.jsonl`.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from conf.compose.run_folder import METRICS, RECOVERIES
from launch.processes.lifecycle import Start, StopProcess
from launch.processes.supervise import NodeLost
from launch.report.metrics_file import MetricsFile

SAME_EVENT_S = 1.0  # a lost node and a stop of the trainer within this time are one event


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    cause: str
    step: int  # the first step after the interruption
    detection_s: float
    restart_s: float
    load_s: float
    first_step_s: float

    @property
    def total_s(self) -> float:
        return self.detection_s + self.restart_s + self.load_s + self.first_step_s

    def __str__(self) -> str:
        return (
            f"training again {self.total_s:.0f} s after {self.cause}: detection {self.detection_s:.1f} s, restart "
            f"{self.restart_s:.1f} s, load {self.load_s:.1f} s, first step {self.first_step_s:.1f} s"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Interruption:
    cause: str
    began_s: float  # the last heartbeat
    known_s: float


class Recoveries:
    """Follows what happens to the trainer. Times are those of the wall clock, as in the metrics."""

    def __init__(self, run_dir: Path, say: Callable[[str], None], now: Callable[[], float] = time.time) -> None:
        self._path = run_dir / RECOVERIES
        self._metrics_path = run_dir / METRICS
        self._say, self._now = say, now
        self._loss: _Interruption | None = None  # the last loss of a node
        self._stopped: _Interruption | None = None  # the last stop of the trainer
        self._again: tuple[_Interruption, float, MetricsFile] | None = None  # its last restart, and its lines since

    def note(self, what: object) -> None:
        """Takes an event of the backend or an action of the lifecycle."""
        now = self._now()
        match what:
            case NodeLost(node=node, silent_s=silent_s):
                self._loss = _Interruption(cause=f"the loss of {node}", began_s=now - silent_s, known_s=now)
            case StopProcess(name=name) if name.startswith("trainer-") and self._stopped is None:
                self._stopped = _Interruption(cause="a failure of the trainer", began_s=now, known_s=now)
            case Start(process=process) if process.role == "trainer" and self._stopped is not None:
                because_of_node = self._loss is not None and self._loss.known_s > self._stopped.known_s - SAME_EVENT_S
                interruption = self._loss if self._loss is not None and because_of_node else self._stopped
                self._again = interruption, now, MetricsFile(self._metrics_path, from_start=False)
                self._loss = self._stopped = None

    def tick(self) -> None:
        """Looks for the first step after a restart."""
        if self._again is None:
            return
        interruption, started_s, metrics = self._again
        if not (lines := metrics.new_lines()):
            return
        step_s = float(lines[0].get("time/step_s", 0.0))
        done = Recovery(
            cause=interruption.cause,
            step=int(lines[0]["step"]),
            detection_s=interruption.known_s - interruption.began_s,
            restart_s=started_s - interruption.known_s,
            load_s=max(0.0, float(lines[0]["time"]) - step_s - started_s),
            first_step_s=step_s,
        )
        self._again = None
        self._say(str(done))
        try:
            with self._path.open("a") as file:
                print(json.dumps(asdict(done)), file=file)
        except OSError as error:  # the disk may be full; the run goes on
            self._say(f"warning: {self._path} could not be written: {error.strerror}")
