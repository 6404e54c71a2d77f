"""A run that learned nothing from its rewards says so at the end, with the reasons of the judges."""

import json
import time
from pathlib import Path

from launch.report.summary import summary


def line(step: int, signal: float, without_signal: int, **more: object) -> str:
    figures = {"reward/mean": 0.0, "reward/groups_with_signal_fraction": signal, "reward/steps_without_signal": without_signal}
    return json.dumps({"step": step, "time": time.time(), **figures, **more}) + "\n"


REASONS = {"verdict_reasons": {"no code block": 30, "test …: wrong answer": 2}}


def test_run_with_a_signal_is_not_said_to_have_learned_nothing(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(line(1, 0.0, 1) + line(2, 0.5, 0) + line(3, 0.0, 1))
    assert "learned nothing" not in summary(tmp_path, elapsed_s=1.0)


def test_run_that_only_logs_its_rewards_is_not_said_to_have_learned_nothing(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(line(step, 0.0, 0) for step in (1, 2, 3)))
    assert "learned nothing" not in summary(tmp_path, elapsed_s=1.0)


def test_summary_of_a_run_without_any_signal_says_that_it_learned_nothing(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(line(step, 0.0, step, **REASONS) for step in (1, 2, 3)))
    text = summary(tmp_path, elapsed_s=1.0)
    assert "learned nothing" in text and "in 3 steps all completions" in text and "90 x no code block" in text


def test_run_whose_metrics_do_not_say_is_not_blamed(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "time": 1.0, "reward/mean": 0.0}) + "\n")
    assert "learned nothing" not in summary(tmp_path, elapsed_s=1.0)
