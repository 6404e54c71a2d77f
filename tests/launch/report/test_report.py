"""A run's report and timeline say what its metrics say."""

import json
from pathlib import Path

import pytest

from launch.report.__main__ import main
from launch.report.drawing import Box
from launch.report.run_report import CHARTS, draw, page, trace_events, write_report

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
    drawn = page("a <run>", ["reward  0.5 -> 0.7"], LINES)
    assert "a &lt;run&gt;: 2 steps" in drawn
    assert "step 2: 0.7" in drawn and "step 0: 0.4" in drawn
    assert "Entropy" not in drawn
    assert "reward  0.5 -&gt; 0.7" in drawn
    assert "http" not in drawn  # self-contained


def test_phases_of_a_step_add_up_to_it() -> None:
    steps = [{**LINES[1], "time/train_s": 3.0, "time/old_logprob_s": 1.0, "time/wait_batch_s": 2.0}]
    (seconds,) = [wanted for wanted in CHARTS if wanted.stacked]
    drawing = draw(seconds, steps)
    assert drawing is not None
    heights = {shape.hint.partition(",")[0]: shape.height for shape in drawing.shapes if isinstance(shape, Box)}
    assert heights["train"] == pytest.approx(3 * heights["old log-probs"]) == pytest.approx(1.5 * heights["wait for a batch"])


def test_report_begins_with_what_came_of_the_run(tmp_path: Path) -> None:
    lines = [{**line, "time/step_s": 4.0, "idle/trainer_fraction": 0.25, "tokens/trained_per_s": 1500.0} for line in LINES[1:]]
    write(tmp_path, lines)
    counts = {"trained_tokens": 90, "waiting_tokens": 0, "lost_tokens": {"stale": 7}, "eval_tokens": 3}
    (tmp_path / "summary.json").write_text(json.dumps({"queue": {"ledger": counts}}))
    write_report(tmp_path)
    text = (tmp_path / "report.html").read_text().partition("<main")[0]
    for said in ("1,500 trained", "trainer 25%", "0.500 -&gt; 0.700", "100 generated: trained 90, waiting 0, dropped 0, lost 7"):
        assert said in text


def test_value_that_is_no_number_spoils_no_chart(tmp_path: Path) -> None:
    keys = {key for wanted in CHARTS for key in wanted.series.values() if not key.startswith("time/")}
    for broken in (float("nan"), float("inf"), 0.0, None):
        (tmp_path / "metrics.jsonl").write_text(json.dumps({**LINES[1], **dict.fromkeys(keys, broken)}) + "\n")
        assert write_report(tmp_path)


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
