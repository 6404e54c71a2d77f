"""The simulator's command: the job of 256 GPUs, the files it leaves, its comparison, and a real run's second half."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from conf.compose.load import read_run
from conf.schema import ConfigError
from launch.report.metrics_file import read_metrics
from launch.simulate import fit
from launch.simulate.__main__ import _config as composed
from launch.simulate.__main__ import main
from launch.simulate.compare_systems import Variant, compare, failures_cost_s, line, systems, variants
from launch.simulate.measured_run import NEEDED, read_measured_run
from launch.simulate.options import Options, scenario_of
from launch.simulate.prediction import Compared, Comparison, predict_second_half, table
from launch.simulate.scenario import Scenario
from launch.simulate.simulation import simulate
from launch.simulate.simulation_report import report_of
from launch.simulate.timeline import trace_events
from tests.launch.simulated_run import SMALL, as_metrics, small_job

DEBUG_RUN = Path(__file__).parents[1] / "data" / "debug_run"


def kestrel(*overrides: str, **options: object) -> Scenario:
    return scenario_of(composed(["experiment=kestrel_256", *overrides]), Options(**options))  # type: ignore[arg-type]


# The job's figures, by hand.


def test_stated_speeds_are_the_sheet_s_arithmetic() -> None:
    scenario = kestrel(assumptions="stated")
    engine = scenario.engine_groups[0].speeds
    bandwidth = 4 * 3.35e12 * 0.75
    assert engine.decode_s[1] == pytest.approx(64e9 / bandwidth)  # 6.4 ms to read the weights
    assert engine.decode_s_per_context_token == pytest.approx(262_144 / bandwidth)
    tokens = 4096 * (1200 + 2500)
    speeds = scenario.trainer
    step_s = tokens * (speeds.train_s_per_token + speeds.old_logprob_s_per_token + speeds.ref_logprob_s_per_token)
    least_s = 9.5 * 32e9 * tokens / (136 * 989e12 * 0.4)  # 6 N to train, 2 N for a pass of log-probs; one in four needs no old
    assert least_s < step_s < 1.5 * least_s  # attention, bubble, padding and communication on top
    assert scenario.trainer.checkpoint_write_s == pytest.approx(448e9 / 20e9)


def test_the_ledger_s_rules_are_the_configured_ones() -> None:
    rules = kestrel("rollout.window=64", "rollout.max_staleness=3", steps=7).rules
    assert (rules.groups_per_step, rules.max_staleness, rules.window, rules.total_steps) == (512, 3, 64, 7)


@pytest.mark.parametrize(
    ("overrides", "options", "message"),
    [
        (("rollout.engines=31",), {}, "need 260 GPUs"),
        (("rollout.engine_tp=1",), {}, "the smallest that does is rollout.engine_tp=2"),
        ((), {"assumptions": "hoped"}, "simulate.assumptions='hoped': choose one of stated, calibrated"),
        ((), {"push": "never"}, "simulate.push='never'"),
        ((), {"tail_engines": 30}, "leaves none of the 30 engines"),
        ((), {"steps": -1}, "simulate.steps=-1"),
        (("plan.completion_tokens=20000",), {}, "plan.completion_tokens=20000"),
        (("plan.prompt_tokens=5000",), {}, "plan.prompt_tokens=5000"),
    ],
)
def test_what_cannot_be_simulated_is_refused_with_the_value(
    overrides: tuple[str, ...], options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        kestrel(*overrides, **options)


# The command.


def test_one_run_prints_its_report_and_leaves_timeline_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, f"simulate.out={tmp_path}", "simulate.failures=false"]) == 0
    said, beside = capsys.readouterr()
    assert beside.startswith("simulating 10 steps ")
    assert "h for 10 steps" in said and "engines" in said
    assert json.loads((tmp_path / "report.json").read_text())["steps"] == 10
    assert (tmp_path / "plot.html").read_text().count("<svg") == 4
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} >= {"M", "X", "C"}


def test_the_timeline_s_slices_nest_and_follow_one_another() -> None:
    scenario = scenario_of(small_job(), Options(failures=False))
    slices = [event for event in trace_events(simulate(scenario), detail_s=600.0) if event["ph"] == "X"]
    steps = [event for event in slices if event["name"].startswith("step ")]
    assert len(steps) == 10
    for before, after in itertools.pairwise(steps):
        assert after["ts"] == pytest.approx(before["ts"] + before["dur"], abs=1.0)
    for phase in slices:
        assert any(s["ts"] - 1 <= phase["ts"] and phase["ts"] + phase["dur"] <= s["ts"] + s["dur"] + 1 for s in steps)


def test_the_timeline_is_what_perfetto_reads() -> None:
    """The trace event format: each phase has what it needs, begins and ends are in pairs, and every process has a name."""
    config = small_job("plan.node_mtbf_days=0.02")
    events = list(trace_events(simulate(scenario_of(config, Options(failures=True, seed=1))), detail_s=600.0))
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert all(isinstance(name, str) and name for name in named.values())
    for event in events:
        assert {"ph", "name", "pid", "tid"} <= set(event) and event["pid"] in named
        assert event["ph"] in "MXCibe"
        if event["ph"] != "M":
            assert isinstance(event["ts"], float) and event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) and value >= 0 for value in event["args"].values())
    begun = {(event["cat"], event["id"]): event["ts"] for event in events if event["ph"] == "b"}
    ended = {(event["cat"], event["id"]): event["ts"] for event in events if event["ph"] == "e"}
    assert begun and set(begun) == set(ended)
    assert all(begun[key] <= ended[key] for key in begun)
    assert [event for event in events if event["ph"] == "i"]
    assert json.loads(json.dumps(events, allow_nan=False)) == events


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["simulate.staleness=2", *SMALL], "simulate.staleness: no such setting; there are assumptions"),
        (["rollout.max_stalenes=2", *SMALL], "did you mean rollout.max_staleness"),
        (["compare=maybe", *SMALL], "compare=maybe"),
        (["simulate.steps=many", *SMALL], "simulate.steps=many: must be a whole number"),
        (["simulate.engine_restart_s=nan", *SMALL], "simulate.engine_restart_s=nan: must be a finite number of at least 0"),
        (["simulate.timeline_hours=-1", *SMALL], "simulate.timeline_hours=-1.0: must be a finite number of at least 0"),
        ([*SMALL, "trainer.recompute=none"], "needs 76 GB of a GPU, and 74 GB are usable; trainer.recompute=full does"),
        ([*SMALL, "rollout.engine_tp=1"], "the smallest that does is rollout.engine_tp=2"),
        (["from_run=nowhere"], "nowhere is not the folder of a run"),
        ([], "choose an experiment"),
    ],
)
def test_a_wrong_command_is_one_clear_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) == 1


def test_layout_that_computes_activations_again_trains_as_long_as_planned() -> None:
    """The simulated trainer is the planned one, all of its settings counted."""
    plain, again = (kestrel(f"trainer.recompute={kind}").trainer.train_s_per_token for kind in ("none", "full"))
    assert again > 1.1 * plain


# The comparison.


def test_systems_differ_in_what_they_are_named_for() -> None:
    by_name = {variant.name: variant for variant in systems(small_job())}
    rows = {row.variant.name: row for row in compare(small_job(), Options(steps=10), list(by_name.values()), in_full=False)}
    reports = {name: row.report for name, row in rows.items() if row.report is not None}
    assert len(reports) == 5
    lags = {name: max(report.lag_fractions) for name, report in reports.items()}
    assert lags["synchronous, on split GPUs"] == lags["synchronous, in turns on all GPUs"] == 0
    assert lags["one step off"] == 1
    assert reports["ours"].trainer["wait for the fleet"] == 0
    assert rows["ours"].hours < rows["one step off"].hours < rows["synchronous, on split GPUs"].hours
    assert rows["ours"].hours < rows["asynchronous, no partial rollouts"].hours


def test_a_variant_that_cannot_run_says_why_and_the_others_go_on() -> None:
    wrong = Variant(name="wrong", settings={"rollout.engine_tp": 16}, options={})
    right = Variant(name="right", settings={}, options={})
    rows = list(compare(small_job(), Options(steps=4), [wrong, right], in_full=False))
    assert rows[0].report is None and "cannot run" in line(rows[0])
    assert rows[1].report is not None and line(rows[1]).startswith("right")


def test_variants_change_one_thing_each_and_leave_out_what_is_so_already() -> None:
    names = [variant.name for variant in variants(composed(["experiment=kestrel_256"]))]
    assert len(names) == len(set(names))
    assert "max_staleness=4" not in names and "max_staleness=1" in names
    assert {"window=0 max_staleness=3", "segment=1024", "7 long-tail engines"} <= set(names)
    assert "window=512 max_staleness=4" not in names


def test_a_trainer_s_failure_costs_half_a_checkpoint_interval_and_the_restart() -> None:
    config = small_job()
    config.plan.restart_s = 50.0
    scenario = scenario_of(config, Options(failures=False))
    baseline = simulate(scenario)
    step_s = baseline.seconds / 10
    cost_s = failures_cost_s(scenario, baseline, config.plan.node_mtbf_days * 86_400.0, config)
    trainer_nodes = scenario.trainer_nodes
    assert trainer_nodes * (50.0 + 2 * step_s) * 0.7 < cost_s < (trainer_nodes + 4) * (50.0 + 5 * step_s) * 2


# A real run.


@pytest.mark.slow
def test_the_first_half_of_a_debug_run_predicts_the_second() -> None:
    comparison = predict_second_half(read_measured_run(DEBUG_RUN))
    rows = {row.what: row for row in comparison.rows}
    assert comparison.within, table(comparison)
    assert abs(rows["step"].error) < 0.2
    assert rows["trainer idle"].predicted == pytest.approx(rows["trainer idle"].measured, abs=0.05)
    assert rows["rollout idle"].predicted == pytest.approx(rows["rollout idle"].measured, abs=0.05)


@pytest.mark.parametrize(
    ("unit", "predicted", "actual", "within"),
    [
        ("fraction", 0.061, 0.113, False),  # neither within a fifth nor within 0.05
        ("fraction", 0.064, 0.113, True),  # within 0.05
        ("fraction", 0.24, 0.368, False),
        ("fraction", 0.44, 0.368, True),  # within a fifth
        ("s", 5.99, 5.0, True),
        ("s", 0.04, 0.01, False),  # seconds are judged by their ratio alone
    ],
)
def test_small_fractions_are_judged_by_their_distance_and_others_by_their_ratio(
    unit: str, predicted: float, actual: float, within: bool
) -> None:
    row = Compared(what="x", unit=unit, binding=True, first_half=1.0, predicted=predicted, measured=actual)
    assert row.within is within


def test_table_names_what_is_not_within_and_only_that() -> None:
    step = Compared(what="step", unit="s", binding=True, first_half=4.0, predicted=4.0, measured=4.3)
    idle = Compared(what="trainer idle", unit="fraction", binding=True, first_half=0.1, predicted=0.1, measured=0.2)
    push = Compared(what="push", unit="s", first_half=0.2, predicted=0.2, measured=0.5)  # told, not judged
    told = Comparison(
        run="r", first=(3, 24), second=(25, 48), left_out=0, rows=(step, idle, push), scenario=scenario_of(small_job(), Options())
    )
    assert "points of a step: NOT trainer idle\n" in table(told)
    assert "NOT" not in table(replace(told, rows=(step, push)))


def test_steps_after_the_last_admission_are_left_out_of_a_run_that_ended() -> None:
    run = read_measured_run(DEBUG_RUN)
    assert [line["step"] for line in run.supplied] == list(range(1, 49))
    assert replace(run, steps=run.steps[:30]).supplied == run.steps[:30]


def test_passes_differ_from_step_to_step_as_they_were_measured_to() -> None:
    even = scenario_of(small_job(), Options(failures=False))
    passes_s = sum(step.old_logprob_s + step.ref_logprob_s + step.train_s for step in simulate(even).steps)
    uneven = replace(even, trainer=replace(even.trainer, spread=(0.5, 1.5)))
    steps = simulate(uneven).steps
    assert sum(step.old_logprob_s + step.ref_logprob_s + step.train_s for step in steps) == pytest.approx(passes_s, rel=0.1)
    ratios = [step.train_s / before.train_s for before, step in zip(steps[::2], steps[1::2], strict=True)]
    assert min(ratios) > 1.5  # three times, but for their tokens
    lines = [as_metrics(step, uneven) for step in steps]
    assert fit._spread(lines, 128 * 1200.0) == pytest.approx([0.5, 1.5] * 5, rel=0.3)


@pytest.mark.slow
def test_what_is_calibrated_is_found_again_in_a_simulated_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose truth is known: a simulated one, written as metrics."""
    truth = fit.fitted(read_run(DEBUG_RUN), read_metrics(DEBUG_RUN)[3:25])
    slower = replace(truth, engine_groups=tuple(replace(f, speeds=fit._slower(f.speeds, 2.0)) for f in truth.engine_groups))
    (tmp_path / "config.yaml").write_text((DEBUG_RUN / "config.yaml").read_text())
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in simulate(slower).steps:
            file.write(json.dumps(as_metrics(step, slower)) + "\n")
    monkeypatch.setattr(fit, "VERDICT_SHARES", (1.0,))
    comparison = predict_second_half(read_measured_run(tmp_path), seed=1)
    rows = {row.what: row for row in comparison.rows}
    assert rows["step"].error == pytest.approx(0, abs=0.1)
    assert rows["trainer idle"].error == pytest.approx(0, abs=0.1)


def test_a_run_too_short_to_calibrate_on_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text((DEBUG_RUN / "config.yaml").read_text())
    lines = (DEBUG_RUN / "metrics.jsonl").read_text().splitlines()
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines[:8]) + "\n")
    with pytest.raises(ConfigError, match="7 steps were measured; to calibrate and predict takes at least 12"):
        read_measured_run(tmp_path)


@pytest.mark.parametrize("key", NEEDED[1:])
@pytest.mark.parametrize("broken", [None, float("nan")])
def test_steps_without_what_is_needed_are_left_out_and_named_when_too_few_are_left(
    tmp_path: Path, key: str, broken: float | None
) -> None:
    (tmp_path / "config.yaml").write_text((DEBUG_RUN / "config.yaml").read_text())
    whole = [dict(told) for told in read_metrics(DEBUG_RUN)]

    def write(first_broken: int, last_broken: int) -> None:
        spoilt = [told | {key: broken} if first_broken <= told["step"] <= last_broken else told for told in whole]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(told) + "\n" for told in spoilt))

    write(5, 6)
    assert [told["step"] for told in read_measured_run(tmp_path).steps] == [n for n in range(1, 51) if n not in (5, 6)]
    write(5, 50)
    with pytest.raises(ConfigError, match=f"4 steps were measured with {key}; to calibrate and predict takes at least 12"):
        read_measured_run(tmp_path)


@pytest.mark.parametrize("tokens", [1.0, 96.0])
def test_run_whose_completions_are_all_as_short_or_as_long_as_can_be_is_calibrated_on(tokens: float) -> None:
    config = read_run(DEBUG_RUN)
    lines = [
        {**line, "tokens/trained": 128 * tokens, "completion/max_tokens": tokens}
        for line in read_measured_run(DEBUG_RUN).steps[:1]
    ]
    made = fit._workload(config, lines, 1.0, 0)
    assert made.completion_mean_tokens == pytest.approx(tokens, rel=0.02)


def test_a_report_of_fewer_steps_goes_on_as_it_did() -> None:
    report = report_of(simulate(scenario_of(small_job(), Options(failures=False))))
    assert report.hours_for(110) == pytest.approx(report.hours + 100 * report.step_s["mean"] / 3600)


@pytest.mark.slow
def test_six_hundred_steps_of_the_job_are_a_matter_of_minutes() -> None:
    """From some of them, in CPU seconds, with room for a busy machine: on an idle core it is half of that."""
    result = simulate(kestrel(steps=12, failures=False))
    assert result.cpu_s / 12 * 600 < 300
