import io
import json
import math
import socket
import threading
import time
from pathlib import Path

import pytest

from launch.placement.placement import ProcessSpec
from launch.report.metrics_file import MetricsFile, read_metrics
from launch.report.progress import Progress, row
from launch.report.screen import Screen
from launch.report.summary import outcome, summary

STEP = {"step": 3, "reward/mean": 0.4375, "lag/max_versions": 2, "tokens/trained": 4096, "time/step_s": 2.5}


def write(path: Path, *lines: dict[str, object]) -> None:
    """Appends lines as the trainer does, each with its time."""
    with path.open("a") as file:
        file.writelines(json.dumps({"time": time.time(), **line}) + "\n" for line in lines)


def test_row_leaves_out_figures_that_are_missing() -> None:
    cells = row(STEP, steps=50).split()
    assert cells == ["3/50", "0.438", "2", "4,096", "2.5"]
    assert "0.612" in row({**STEP, "eval/pass_rate": 0.612}, steps=50)


def test_line_that_is_still_being_written_waits(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, from_start=True)
    assert metrics.new_lines() == []
    path.write_text('{"step": 1, "time": 1.0}\n{"st')
    assert [line["step"] for line in metrics.new_lines()] == [1]
    with path.open("a") as file:
        file.write('ep": 2, "time": 2.0}\n')
    assert [line["step"] for line in metrics.new_lines()] == [2]
    assert metrics.new_lines() == []


def test_resumed_run_shows_new_lines_only(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", {"step": 1})
    out = io.StringIO()
    progress = Progress(tmp_path, 5, [], Screen(out), resumed=True)
    write(tmp_path / "metrics.jsonl", {"step": 2, "reward/mean": 0.25})
    progress.tick()
    assert "2/5  0.250" in out.getvalue()
    assert "1/5" not in out.getvalue()


def test_file_that_a_resuming_trainer_replaces_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, {"step": 1}, {"step": 2}, {"step": 3})
    metrics = MetricsFile(path, from_start=False)
    assert metrics.new_lines() == []
    write(tmp_path / "other", {"step": 1, "time": 1.0})
    (tmp_path / "other").replace(path)
    assert metrics.new_lines() == []
    write(path, {"step": 2, "reward/mean": 0.5, "grad_norm": 1.0, "a long line": "longer than what was there before" * 9})
    assert [line["step"] for line in metrics.new_lines()] == [2]


def test_first_tokens_are_announced_once_and_those_of_an_earlier_launch_do_not_count(tmp_path: Path) -> None:
    log = tmp_path / "logs/worker-1.log"
    log.parent.mkdir()
    log.write_text("INFO engine-1 has its first tokens\n")
    out = io.StringIO()
    progress = Progress(tmp_path, 5, [], Screen(out), resumed=True)
    progress.tick()
    assert "first tokens" not in out.getvalue()
    with log.open("a") as file:
        file.write("INFO engine-1 has its first tokens\n")
    for _ in range(2):
        progress._next_probe_s = 0.0
        progress.tick()
    assert out.getvalue().count("first tokens after") == 1


def ticks(progress: Progress, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        progress._next_probe_s = 0.0
        progress.tick()
        time.sleep(0.02)


def engine(name: str, address: str, port: int) -> ProcessSpec:
    return ProcessSpec(role="rollout", name="rollout-0", node="here", address=address, argv=("x",), ports={name: port})


def test_engine_that_listens_is_announced_once_while_others_do_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = threading.Event()

    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        if address[0] == "gone":
            answered.wait(10)
            raise OSError("no route")
        return socket.socket()

    monkeypatch.setattr(socket, "create_connection", connect)
    out = io.StringIO()
    progress = Progress(tmp_path, 5, [engine("engine-0", "here", 1), engine("engine-1", "gone", 1)], Screen(out), resumed=False)
    began_s = time.monotonic()
    ticks(progress, 0.5)
    assert time.monotonic() - began_s < 5, "the launcher waited for a node that is gone"
    answered.set()
    ticks(progress, 0.2)
    assert out.getvalue().count("engine-0 listens after") == 1 and "engine-1 listens" not in out.getvalue()


@pytest.mark.parametrize(
    "damage", [b'{"step": 2, "ti', b"\xff\x00\x00", b"[]", b"null", b'{"step": 2}', b'{"time": 2}', b'{"step": "2", "time": 1}']
)
def test_damaged_line_is_left_out_with_a_warning_and_the_others_are_shown(damage: bytes, tmp_path: Path) -> None:
    out = io.StringIO()
    progress = Progress(tmp_path, 5, [], Screen(out), resumed=False)
    write(tmp_path / "metrics.jsonl", {"step": 1})
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(damage + b"\n")
    write(tmp_path / "metrics.jsonl", {"step": 3, "reward/mean": "not a number"})
    for _ in range(2):
        progress.tick()
    said = out.getvalue()
    assert "1/5" in said and "3/5" in said
    assert said.count("warning: ") == 1 and "has a damaged line" in said
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 3]


def test_metrics_that_cannot_be_read_for_a_moment_stop_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, from_start=True)
    path.mkdir()
    assert metrics.new_lines() == []
    path.rmdir()
    write(path, {"step": 1})
    assert [line["step"] for line in metrics.new_lines()] == [1]


def test_summary_says_that_the_token_accounting_is_damaged(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", {**STEP, "step": 1})
    (tmp_path / "summary.json").write_text('{"queue": {')
    assert f"not known: {tmp_path / 'summary.json'} cannot be read" in summary(tmp_path, elapsed_s=61.0)


def test_step_that_was_done_twice_counts_once(tmp_path: Path) -> None:
    write(
        tmp_path / "metrics.jsonl",
        {"step": 0, "eval/pass_rate": 0.3, "time": 0.5},
        {"step": 1, "reward/mean": 0.1, "time": 1.0},
        {"step": 1, "reward/mean": 0.2, "time": 2.0},
    )
    assert [line.get("reward/mean") for line in read_metrics(tmp_path)] == [None, 0.2]


def test_outcome_is_the_last_evaluation_or_else_the_reward() -> None:
    assert outcome([{"step": 0, "eval/pass_rate": 0.3}, {"step": 1, "reward/mean": 0.9, "eval/pass_rate": 0.6}]) == 0.6
    assert outcome([{"step": 1, "reward/mean": 0.25}, {"step": 2, "reward/mean": 0.75}]) == 0.5
    assert math.isnan(outcome([]))


def test_summary_shows_first_and_last_values_and_where_the_files_are(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", {"step": 0, "eval/pass_rate": 0.3}, {**STEP, "step": 1, "eval/pass_rate": 0.6})
    (tmp_path / "summary.json").write_text(json.dumps({"queue": {"trained_tokens": 4096, "lost_tokens": {"stale": 7}}}))
    text = summary(tmp_path, elapsed_s=61.0)
    assert "1 steps in 61 s" in text
    assert "0.300 -> 0.600" in text
    assert "trained 4,096, waiting 0, dropped 0, lost 7" in text
    assert str(tmp_path / "metrics.jsonl") in text
    assert "checkpoints" not in text


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (1, "0.100 -> 0.100 (the first and the last step)"),
        (3, "0.100 -> 0.300 (the first and the last step)"),
        (4, "0.150 -> 0.350 (mean of the first and the last 2 steps)"),
        (11, "0.300 -> 0.900 (mean of the first and the last 5 steps)"),
    ],
)
def test_no_step_counts_as_first_and_as_last(tmp_path: Path, steps: int, said: str) -> None:
    write(tmp_path / "metrics.jsonl", *({"step": n, "reward/mean": n / 10} for n in range(1, steps + 1)))
    assert said in summary(tmp_path, elapsed_s=61.0)
