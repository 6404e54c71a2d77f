import json
import time
from pathlib import Path

from launch.placement.placement import ProcessSpec
from launch.processes.lifecycle import Start, StopProcess
from launch.processes.supervise import NodeLost
from launch.report.recovery import Recoveries

TRAINER = ProcessSpec(role="trainer", name="trainer-0", node="n1", argv=())


class Clock:
    def __init__(self) -> None:
        self.now = time.time() - 100.0

    def __call__(self) -> float:
        return self.now


def write_step(run_dir: Path, step: int, at: float, step_s: float) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        print(json.dumps({"step": step, "time": at, "time/step_s": step_s}), file=file)


def test_recovery_that_cannot_be_written_is_shown_and_the_run_goes_on(tmp_path: Path) -> None:
    said = list[str]()
    (tmp_path / "recoveries.jsonl").mkdir()
    recoveries = Recoveries(tmp_path, said.append, Clock())
    recoveries.note(StopProcess(name="trainer-0"))
    recoveries.note(Start(process=TRAINER))
    write_step(tmp_path, 7, time.time() + 1, 2.0)
    recoveries.tick()
    assert said[0].startswith("training again") and "recoveries.jsonl could not be written: Is a directory" in said[1]


def test_time_from_a_lost_node_to_the_next_step_is_split_without_gap(tmp_path: Path) -> None:
    clock, said = Clock(), list[str]()
    recoveries = Recoveries(tmp_path, said.append, clock)
    recoveries.note(Start(process=TRAINER))
    began = clock.now
    clock.now += 5
    recoveries.note(NodeLost(node="n2", why="test", silent_s=5.0))
    recoveries.note(StopProcess(name="trainer-0"))
    clock.now += 3
    recoveries.note(Start(process=TRAINER))
    recoveries.tick()
    assert said == []
    done = time.time() + 1  # a line is new by the real clock
    write_step(tmp_path, 7, done, 2.0)
    recoveries.tick()
    line = json.loads((tmp_path / "recoveries.jsonl").read_text())
    assert (line["cause"], line["step"]) == ("the loss of n2", 7)
    assert (line["detection_s"], line["restart_s"], line["first_step_s"]) == (5.0, 3.0, 2.0)
    assert abs(sum(value for key, value in line.items() if key.endswith("_s")) - (done - began)) < 0.01
    recoveries.tick()
    assert len(said) == 1


def test_loss_of_a_node_that_is_noticed_after_the_failure_of_the_trainer_is_its_cause(tmp_path: Path) -> None:
    clock, said = Clock(), list[str]()
    recoveries = Recoveries(tmp_path, said.append, clock)
    recoveries.note(StopProcess(name="trainer-1"))
    clock.now += 10
    recoveries.note(NodeLost(node="n2", why="test", silent_s=12.0))
    recoveries.note(Start(process=TRAINER))
    write_step(tmp_path, 3, time.time() + 1, 0.5)
    recoveries.tick()
    assert "the loss of n2: detection 12.0 s" in said[0]


def test_lost_rollout_node_stops_no_training(tmp_path: Path) -> None:
    said = list[str]()
    recoveries = Recoveries(tmp_path, said.append)
    recoveries.note(NodeLost(node="n4", why="test", silent_s=1.0))
    write_step(tmp_path, 3, time.time() + 1, 0.5)
    recoveries.tick()
    assert said == []
