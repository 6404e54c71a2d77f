"""A run's report and timeline say what its metrics say."""

import json
from pathlib import Path

from launch.report import main, page, trace_events, write_report

LINES = [
    {"step": 0, "time": 100.0, "eval/pass_rate": 0.4, "time/eval_s": 5.0},
    {"step": 1, "time": 110.0, "reward/mean": 0.5, "time/wait_batch_s": 2.0, "time/train_s": 3.0, "queue/ready_groups": 4},
    {"step": 2, "time": 114.0, "reward/mean": 0.7, "time/wait_batch_s": 1.0, "time/train_s": 2.5, "queue/ready_groups": 0},
]


def write(run_dir: Path, lines: list[dict[str, float]]) -> None:
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_phases_of_a_step_follow_one_another_and_end_when_its_line_was_written() -> None:
    spans = [event for event in trace_events(LINES) if event["ph"] == "X"]
    assert [(s["name"], s["args"]["step"], s["ts"], s["dur"]) for s in spans] == [
        ("eval", 0, 0, 5_000_000),
        ("wait_batch", 1, 10_000_000, 2_000_000),
        ("train", 1, 12_000_000, 3_000_000),
        ("wait_batch", 2, 15_500_000, 1_000_000),
        ("train", 2, 16_500_000, 2_500_000),
    ]


def test_page_draws_what_there_is_and_leaves_out_what_is_not() -> None:
    drawn = page("a <run>", LINES)
    assert "a &lt;run&gt;: 2 steps" in drawn
    assert "step 2: 0.7" in drawn and "step 0: 0.4" in drawn
    assert "Entropy" not in drawn
    assert "http" not in drawn  # self-contained


def test_run_without_a_step_has_no_report(tmp_path: Path) -> None:
    assert not write_report(tmp_path)
    write(tmp_path, LINES[:1])
    assert not write_report(tmp_path)
    assert main([str(tmp_path)]) == 1
    assert main([str(tmp_path / "nowhere")]) == 2


def test_files_lie_in_the_run_folder(tmp_path: Path) -> None:
    write(tmp_path, LINES)
    assert main([str(tmp_path)]) == 0
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
