"""How long a run stood still because of a loss, from the last sign of life to the first step after it, part by part.

    detection    from the last time the node was heard to knowing that it is lost; 0 if a process failed on a living node
    restart      to the trainer's new processes: what is left of it ends, the placement is made anew
    load         to its first step: Python, Megatron, the checkpoint, the first push
    first step   the step itself

A line in `recoveries.jsonl` for each.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from launch.processes.lifecycle import Start, Stop
from launch.processes.supervise import NodeLost
from launch.report.metrics import METRICS_FILE, MetricsFile

RECOVERIES_FILE = "recoveries.jsonl"
SAME_S = 1.0  # a loss and a stop so close together are one event


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    cause: str
    step: int  # the first one after it
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
class _Trouble:
    cause: str
    began_s: float  # the last sign of life
    known_s: float


class Recoveries:
    """Follows what happens to the trainer. Times are the wall clock's, as are those in the metrics."""

    def __init__(self, run_dir: Path, say: Callable[[str], None], now: Callable[[], float] = time.time) -> None:
        self._path = run_dir / RECOVERIES_FILE
        self._metrics_path = run_dir / METRICS_FILE
        self._say, self._now = say, now
        self._loss: _Trouble | None = None  # the last node that was lost
        self._stopped: _Trouble | None = None  # the trainer was
        self._again: tuple[_Trouble, float, MetricsFile] | None = None  # when it was started again, and the lines since then

    def note(self, what: object) -> None:
        """An event of the host or an action of the lifecycle."""
        now = self._now()
        match what:
            case NodeLost(node=node, silent_s=silent_s):
                self._loss = _Trouble(cause=f"the loss of {node}", began_s=now - silent_s, known_s=now)
            case Stop(name=name) if name.startswith("trainer-") and self._stopped is None:
                self._stopped = _Trouble(cause="a failure of the trainer", began_s=now, known_s=now)
            case Start(process=process) if process.role == "trainer" and self._stopped is not None:
                of_node = self._loss is not None and self._loss.known_s > self._stopped.known_s - SAME_S
                trouble = self._loss if self._loss is not None and of_node else self._stopped
                self._again = trouble, now, MetricsFile(self._metrics_path, from_start=False)
                self._loss = self._stopped = None

    def tick(self) -> None:
        """Looks for the first step after a restart."""
        if self._again is None:
            return
        trouble, started_s, metrics = self._again
        if not (lines := metrics.new_lines()):
            return
        step_s = float(lines[0].get("time/step_s", 0.0))
        done = Recovery(
            cause=trouble.cause,
            step=int(lines[0]["step"]),
            detection_s=trouble.known_s - trouble.began_s,
            restart_s=started_s - trouble.known_s,
            load_s=max(0.0, float(lines[0]["time"]) - step_s - started_s),
            first_step_s=step_s,
        )
        self._again = None
        self._say(str(done))
        try:
            with self._path.open("a") as file:
                print(json.dumps(asdict(done)), file=file)
        except OSError as error:  # a full disk: the run itself goes on
            self._say(f"warning: {self._path} could not be written: {error.strerror}")
