"""What the planner says of a real run: its bottleneck, and the setting that helps."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from conf.load import read_run, write_run
from conf.schema import ConfigError
from launch.metrics import read_metrics
from launch.plan.__main__ import run
from launch.plan.from_run import knobs, limit, run_report
from launch.simulate.measured import calibrated
from launch.simulate.options import Options, scenario_of
from launch.simulate.scenario import Scenario
from launch.simulate.simulation import simulate
from tests.launch.simulated_run import as_metrics, small_job

DEBUG_RUN = Path(__file__).with_name("data") / "debug_run"


@pytest.fixture(scope="module")
def debug() -> Scenario:
    return calibrated(read_run(DEBUG_RUN), read_metrics(DEBUG_RUN)[3:8])


@pytest.mark.parametrize(
    ("trainer_waits", "engines_idle", "said"),
    [
        (0.02, 0.4, "training; the trainer waits 2% of a step, and engines are idle 40%"),
        (0.4, 0.02, "generation;"),
        (0.4, 0.4, "latency, of the longest completions or of verdicts"),
        (0.05, 0.05, "both sides, which are balanced"),
    ],
)
def test_bottleneck_is_the_side_that_does_not_wait(trainer_waits: float, engines_idle: float, said: str) -> None:
    assert said in limit(trainer_waits, engines_idle)


def test_each_knob_is_another_setting_that_can_run(debug: Scenario) -> None:
    found = {knob.setting: knob.scenario for knob in knobs(debug, read_run(DEBUG_RUN))}
    assert {"rollout.max_staleness=1", "rollout.max_staleness=3", "rollout.window=16", "rollout.engines=3"} <= set(found)
    assert "rollout.segment_tokens=96" in found
    for setting, scenario in found.items():
        assert scenario != debug, setting
        assert simulate(replace(scenario, rules=replace(scenario.rules, total_steps=4))).steps, setting


def test_staleness_that_cannot_be_less_is_no_knob(debug: Scenario) -> None:
    synchronous = replace(debug, rules=replace(debug.rules, max_staleness=0))
    settings = [knob.setting for knob in knobs(synchronous, read_run(DEBUG_RUN))]
    assert "rollout.max_staleness=1" in settings
    assert not [setting for setting in settings if "=-1" in setting or "window" in setting]


def test_folder_that_is_no_run_and_run_that_is_too_short_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is no run's folder: it holds no config\.yaml"):
        run([f"from_run={tmp_path}"])
    (tmp_path / "config.yaml").write_text((DEBUG_RUN / "config.yaml").read_text())
    with pytest.raises(ConfigError, match="0 steps were measured; to calibrate and predict takes at least 12"):
        run([f"from_run={tmp_path}"])
    with pytest.raises(ConfigError, match="leave out 'experiment=debug'"):
        run([f"from_run={tmp_path}", "experiment=debug"])


@pytest.mark.slow
def test_report_of_the_debug_run_names_the_bottleneck_and_weighs_the_settings() -> None:
    said = run_report(DEBUG_RUN)
    assert "within 20%" in said
    assert "Bottleneck:" in said
    assert "rollout.max_staleness=3" in said
    assert "measured / plan" not in said  # on a CPU the plan's GPUs say nothing


@pytest.mark.slow
def test_run_on_gpus_is_set_beside_its_plan(tmp_path: Path) -> None:
    """A run whose truth is known: the plan's, with a trainer that takes eight times as long."""
    config = small_job("trainer.steps=16")
    truth = scenario_of(config, Options(failures=False))
    speeds = truth.trainer
    slow = replace(
        speeds, train_s_per_token=8 * speeds.train_s_per_token, old_logprob_s_per_token=8 * speeds.old_logprob_s_per_token
    )  # fmt: skip
    write_run(config, tmp_path)
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in simulate(replace(truth, trainer=slow)).steps:
            file.write(json.dumps(as_metrics(step, truth)) + "\n")
    said = run_report(tmp_path)
    assert "The trainer takes 8.0" in said
    assert "Bottleneck: training" in said
    assert "Turn first: trainer.dp=2" in said
