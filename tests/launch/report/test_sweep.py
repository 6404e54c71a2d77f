"""A sweep's records, its rows, its table and its pictures."""

import json
from collections.abc import Sequence
from math import isnan, nan
from pathlib import Path

import pytest
from PIL import Image

from conf.compose.load import write_run
from conf.schema import DataConfig, ModelConfig, RunConfig, TrainerConfig
from launch.report.charts import Axis, grouped_bars
from launch.report.drawing import Box, Dot, Drawing, Text
from launch.report.sweep import COLUMNS, cells, drawings, head, main, page
from launch.report.sweep_jobs import State, SweepJob, read_jobs, recorded
from launch.report.sweep_rows import NoSweep, choose_x, lines_of, read_sweep, row, varied_keys

KEY = "rollout.max_staleness"


def steps(count: int, reward: float, lag: float) -> list[dict[str, float]]:
    evaluations = [{"step": 0, "time": 100.0, "eval/pass_rate": 0.25}]
    return evaluations + [
        {
            "step": n, "time": 100.0 + 4 * n, "reward/mean": reward, "tokens/trained": 1000, "time/step_s": 40.0 if n == 1 else 4,
            "lag/mean_versions": lag / 2, "lag/max_versions": lag, "mismatch/same_version_abs_logprob": 1e-7,
            "mismatch/abs_logprob": 1e-2 * lag, "idle/trainer_fraction": 0.5, "idle/rollout_fraction": 0.25,
            **({"eval/pass_rate": reward + 0.1} if n == count else {}),
        }
        for n in range(1, count + 1)
    ]  # fmt: skip


def write_sweep(folder: Path) -> Path:
    """Three finished jobs over max_staleness, and one that failed before it had a folder."""
    for n, staleness in enumerate(("0", "1", "4")):
        job = SweepJob(
            name=f"{n:02d}-max_staleness={staleness}", said={"experiment": "debug", KEY: staleness, "trainer.steps": "8"}
        )
        run = folder / job.name
        run.mkdir(parents=True)
        lines = steps(8, 0.5 + 0.1 * n, float(staleness))
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        model, data = ModelConfig(path="m"), DataConfig(train=["t"])
        write_run(RunConfig(model=model, data=data, trainer=TrainerConfig(steps=8, tokens_per_microbatch=20_480)), run)
        with recorded(job, folder) as record:
            record.end(0.5)
    failed = SweepJob(name="03-max_staleness=x", said={"experiment": "debug", KEY: "x", "trainer.steps": "8"})
    with recorded(failed, folder) as record:
        record.fail("rollout.max_staleness: Value 'x' is no integer", 2)
    return folder


def test_record_is_there_from_the_start_and_tells_the_end(tmp_path: Path) -> None:
    job = SweepJob(name="00-a", said={"a": "1"})
    with recorded(job, tmp_path) as record:
        assert read_jobs(tmp_path) == [job]
        record.end(0.75)
    (done,) = read_jobs(tmp_path)
    assert (done.state, done.outcome) == (State.DONE, 0.75)
    assert not list((tmp_path / "jobs").glob(".*"))


def test_outcome_that_is_no_number_is_none(tmp_path: Path) -> None:
    with recorded(SweepJob(name="00", said={}), tmp_path) as record:
        record.end(nan)
    assert read_jobs(tmp_path)[0].outcome is None


@pytest.mark.parametrize("error", [RuntimeError("a bug"), KeyboardInterrupt()])
def test_job_that_leaves_by_an_error_has_failed(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), recorded(SweepJob(name="00", said={}), tmp_path):
        raise error
    (failed,) = read_jobs(tmp_path)
    assert failed.state is State.FAILED and type(error).__name__ in failed.failure


def test_row_leaves_the_first_step_out_of_its_means() -> None:
    found = row(SweepJob(name="a", said={}), steps(8, 0.5, 2.0), 8)
    assert found.trained_per_s == 250.0 and found.step_s == 4.0
    assert (found.lag_mean, found.lag_max, found.reward) == (1.0, 2.0, 0.5)
    assert (found.pass_before, found.pass_after) == (0.25, 0.6)
    assert found.rewards[-1] == (8, 32.0, 0.5)


def test_job_without_a_step_has_no_figures() -> None:
    found = row(SweepJob(name="a", said={}), [], 0)
    assert all(isnan(of(found)) for _, _, of in COLUMNS)


def test_value_that_is_no_number_does_not_spoil_a_mean() -> None:
    lines = steps(8, 0.5, 2.0)
    lines[4]["reward/mean"] = lines[5]["idle/trainer_fraction"] = nan
    found = row(SweepJob(name="a", said={}), lines, 8)
    assert (found.reward, found.idle_trainer) == (0.5, 0.5)


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf")])
def test_sweep_without_one_good_reward_is_reported(tmp_path: Path, reward: float | None) -> None:
    for run in write_sweep(tmp_path).glob("0*"):
        (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "time": 5.0, "reward/mean": reward, "time/step_s": 1.0}) + "\n")
    assert main([str(tmp_path)]) == 0


@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
def test_value_without_a_place_on_an_axis_is_a_word(tmp_path: Path, value: str) -> None:
    for number, said in enumerate(("1.0", value)):
        job = SweepJob(name=f"{number:02d}", said={"trainer.clip_grad": said}, state=State.DONE)
        job.write(tmp_path)
        (tmp_path / job.name).mkdir()
        (tmp_path / job.name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps(3, 0.5, 1.0)))
    assert main([str(tmp_path)]) == 0


@pytest.mark.parametrize(
    "record", ["", '{"name": ', "[]", "{}", '{"name": "a", "said": {}, "state": "asleep"}', '{"state": "done"}']
)
def test_job_with_a_damaged_record_is_a_failed_row_beside_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], record: str
) -> None:
    (write_sweep(tmp_path) / "jobs/01-max_staleness=1.json").write_text(record)
    (tmp_path / "00-max_staleness=0/config.yaml").write_text("a: [")
    assert main([str(tmp_path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "01-max_staleness=1.json is damaged" in said
    assert [job.state is State.FAILED for job in read_jobs(tmp_path)] == [False, True, False, True]


def test_what_all_jobs_share_is_not_varied(tmp_path: Path) -> None:
    rows = read_sweep(write_sweep(tmp_path))
    assert varied_keys(rows) == [KEY] and choose_x(rows) == KEY
    with pytest.raises(NoSweep, match=r"varies rollout\.max_staleness"):
        choose_x(rows, "trainer.lr")


def grid(*keys: tuple[str, tuple[str, ...]]) -> list[SweepJob]:
    jobs = [dict[str, str]()]
    for key, values in keys:
        jobs = [{**said, key: value} for said in jobs for value in values]
    return [SweepJob(name=f"{n:02d}", said=said, state=State.DONE) for n, said in enumerate(jobs)]


def test_seeds_are_repetitions_and_other_keys_are_lines_of_their_own() -> None:
    jobs = grid((KEY, ("0", "2")), ("trainer.seed", ("0", "1")), ("algo.advantage", ("grpo", "dr_grpo")))
    rows = [row(job, steps(4, 0.5, 1.0), 4) for job in jobs]
    assert choose_x(rows) == KEY
    assert {name: len(members) for name, members in lines_of(rows, KEY).items()} == {"advantage=grpo": 4, "advantage=dr_grpo": 4}


def words(drawn: Drawing) -> list[str]:
    return [shape.words for shape in drawn.shapes if isinstance(shape, Text)]


def test_categories_are_bars_side_by_side_and_numbers_are_lines() -> None:
    def panels(key: str, values: Sequence[str]) -> list[Drawing]:
        rows = [row(SweepJob(name=v, said={key: v}, state=State.DONE), steps(4, 0.5, 1.0), 4) for v in values]
        return [drawn for drawn in drawings(rows, choose_x(rows)) if not words(drawn)[0].startswith("Reward by")]

    for drawn in panels("algo.advantage", ("grpo", "rloo")):
        assert {"grpo", "rloo"} <= set(words(drawn))
        assert any(isinstance(shape, Box) for shape in drawn.shapes)
        assert not any(isinstance(shape, Dot) for shape in drawn.shapes)
    for drawn in panels(KEY, ("0", "1")):
        assert not any(isinstance(shape, Box) for shape in drawn.shapes)


def test_repetitions_of_a_category_are_dots_on_the_bar_of_their_mean() -> None:
    drawn = grouped_bars("t", Axis(name="x", labels={0.0: "a", 1.0: "b"}), {"one": [(0.0, 1.0), (0.0, 3.0), (1.0, 2.0)]})
    boxes = [shape for shape in drawn.shapes if isinstance(shape, Box)]
    assert [box.hint for box in boxes] == ["one, x a: 2", "one, x b: 2"]
    assert boxes[0].height == pytest.approx(boxes[1].height)
    assert sum(isinstance(shape, Dot) for shape in drawn.shapes) == 2


def test_report_of_a_sweep_with_a_failed_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = write_sweep(tmp_path / "sweep")
    assert main([str(sweep)]) == 0
    said = capsys.readouterr().out
    assert "03-max_staleness=x: rollout.max_staleness: Value 'x' is no integer" in said
    shown = (sweep / "sweep.html").read_text()
    assert "3 of 4 jobs are done" in shown and "Value &#x27;x&#x27; is no integer" in shown and "http" not in shown
    assert shown.count("<svg") == 8
    with Image.open(sweep / "sweep.png") as picture:
        assert picture.width > 1500
        assert len(picture.getcolors(1 << 24) or []) > 50


def test_table_has_a_cell_for_each_title(tmp_path: Path) -> None:
    rows = read_sweep(write_sweep(tmp_path))
    assert {len(cells(one, rows)) for one in rows} == {len(head(rows))}
    assert cells(rows[-1], rows)[:4] == ["x", "failed", "-", "-"]


def test_killed_job_is_a_row_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = write_sweep(tmp_path)
    SweepJob(name="04-max_staleness=9", said={KEY: "9"}).write(sweep)
    assert main([str(sweep)]) == 0
    assert "04-max_staleness=9: left no result" in capsys.readouterr().out


def test_value_in_brackets_stands_in_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = write_sweep(tmp_path)
    with recorded(SweepJob(name="04-brackets", said={KEY: "[a,/b]"}), sweep) as record:
        record.fail("broken", 2)
    assert main([str(sweep)]) == 0
    assert "[a,/b]" in capsys.readouterr().out


def test_folder_without_a_sweep_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "holds no sweep" in capsys.readouterr().err


def test_names_are_escaped_in_the_page() -> None:
    rows = [row(SweepJob(name="a", said={"k": "<b>"}), [], 0), row(SweepJob(name="b", said={"k": "c"}), [], 0)]
    assert "<b>" not in page("a <sweep>", rows, [])
