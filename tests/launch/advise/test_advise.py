"""What the planner says of a real run: its bottleneck, and the setting that helps."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from conf.compose.load import read_run, write_run
from conf.schema import ConfigError, RolloutConfig, RunConfig, TrainerConfig
from launch.advise.__main__ import main
from launch.advise.advice import KnobOutcome, bottleneck, run_report, verdict
from launch.advise.knobs import ANOTHER_OBJECTIVE, Knob, knobs
from launch.report.metrics_file import read_metrics
from launch.simulate.fit import fitted
from launch.simulate.options import Options, scenario_of
from launch.simulate.scenario import Scenario
from launch.simulate.simulation import simulate
from launch.simulate.step_figures import StepFigures
from tests.launch.simulated_run import as_metrics, small_job

DEBUG_RUN = Path(__file__).parents[1] / "data" / "debug_run"
MODEL = {
    "architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 64, "hidden_size": 5120, "num_attention_heads": 40,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 27648, "vocab_size": 152064,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
}  # fmt: skip
FIGURES = StepFigures(step_s=1.0, phases_s={}, trainer_idle=0.0, engines_idle=0.0, busy_tokens_per_s=1.0)
KESTREL = RunConfig(
    trainer=TrainerConfig(tp=8, dp=17, tokens_per_microbatch=20_480),
    rollout=RolloutConfig(engines=30, engine_tp=4, concurrency=80),
)


@pytest.fixture(scope="module")
def debug() -> Scenario:
    return fitted(read_run(DEBUG_RUN), read_metrics(DEBUG_RUN)[3:8])


@pytest.mark.parametrize(
    ("trainer_waits", "engines_idle", "said"),
    [
        (0.02, 0.4, "training; the trainer waits 2% of a step, and engines are idle 40%"),
        (0.4, 0.02, "generation;"),
        (0.4, 0.4, "latency. The longest completions or the verdicts take the time"),
        (0.05, 0.05, "both sides equally"),
    ],
)
def test_bottleneck_is_the_side_that_does_not_wait(trainer_waits: float, engines_idle: float, said: str) -> None:
    assert said in bottleneck(trainer_waits, engines_idle)


def test_each_knob_is_another_setting_that_can_run(debug: Scenario) -> None:
    found = {knob.setting: knob.scenario for knob in knobs(debug, read_run(DEBUG_RUN))}
    assert {"rollout.max_staleness=1", "rollout.max_staleness=3", "rollout.window=16", "rollout.segment_tokens=96"} <= set(found)
    for setting, scenario in found.items():
        assert scenario != debug, setting
        assert simulate(replace(scenario, rules=replace(scenario.rules, total_steps=4))).steps, setting


def test_run_without_gpus_is_not_told_to_take_more_of_them(debug: Scenario) -> None:
    """Its processes share the cores: another engine or rank would be slower, not faster."""
    config = read_run(DEBUG_RUN)
    assert config.cluster.device != "cuda"
    settings = " ".join(knob.setting + knob.costs for knob in knobs(debug, config))
    assert not re.search(r"GPU|engines=|trainer\.|reward\.", settings)


def test_knobs_of_a_run_on_gpus_move_the_split_and_say_what_more_would_take(debug: Scenario) -> None:
    config = replace(KESTREL, cluster=replace(KESTREL.cluster, device="cuda"))
    scenario = replace(debug, engine_groups=(replace(debug.engine_groups[0], engines=30),))
    takes = {knob.setting: knob.costs for knob in knobs(scenario, config)}
    assert {"trainer.dp=18 rollout.engines=28": "", "trainer.dp=16 rollout.engines=32": ""}.items() <= takes.items()
    more = {
        "rollout.engines=31": "4 more GPUs",
        "trainer.dp=34": "136 more GPUs",
        "trainer.dp=34 rollout.engines=60": "256 more GPUs",
    }
    assert more.items() <= takes.items()


def test_setting_that_costs_nothing_is_named_before_one_that_takes_hardware(debug: Scenario) -> None:
    def turned(setting: str, gain: float, costs: str = "") -> KnobOutcome:
        return KnobOutcome(knob=Knob(setting=setting, scenario=debug, costs=costs), gain=gain, figures=FIGURES, mean_lag=0.0)

    some = [
        turned("twice", -0.4, "256 more GPUs"),
        turned("kl", -0.2, ANOTHER_OBJECTIVE),
        turned("split", -0.1),
        turned("window", 0.3),
    ]
    assert verdict(some) == (
        "Change first: split (-10% of a step predicted).\nWith more hardware: twice (-40% of a step predicted, 256 more GPUs)."
    )
    assert verdict([turned("kl", -0.2, ANOTHER_OBJECTIVE), turned("split", -0.001)]) == "No single setting gains anything."
    assert verdict([]) == "No single setting gains anything."


def test_staleness_that_cannot_be_less_is_no_knob(debug: Scenario) -> None:
    synchronous = replace(debug, rules=replace(debug.rules, max_staleness=0))
    settings = [knob.setting for knob in knobs(synchronous, read_run(DEBUG_RUN))]
    assert "rollout.max_staleness=1" in settings
    assert not [setting for setting in settings if "=-1" in setting or "window" in setting]


def test_folder_that_is_no_run_and_run_that_is_too_short_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"is not the folder of a run: it holds no config\.yaml"):
        run_report(tmp_path)
    (tmp_path / "config.yaml").write_text((DEBUG_RUN / "config.yaml").read_text())
    with pytest.raises(ConfigError, match="0 steps were measured; to calibrate and predict takes at least 12"):
        run_report(tmp_path)
    assert main([str(tmp_path)]) == 2
    assert "0 steps were measured" in capsys.readouterr().err


@pytest.mark.slow
def test_report_of_the_debug_run_names_the_bottleneck_and_weighs_the_settings() -> None:
    said = run_report(DEBUG_RUN)
    assert "within 20%" in said
    assert "Bottleneck:" in said
    assert "rollout.max_staleness=3" in said
    assert "share the machine's cores" in said
    assert "measured / plan" not in said  # on a CPU the plan's GPUs say nothing


@pytest.mark.slow
def test_run_on_gpus_is_set_beside_its_plan(tmp_path: Path) -> None:
    """A run whose truth is known: the plan's, with a trainer that takes eight times as long."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODEL))
    config = small_job("trainer.steps=16", f"model.path={folder}")
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
    assert "With more hardware: trainer.dp=2" in said
