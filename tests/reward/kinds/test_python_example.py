"""The documented reward functions work as their page says, from the setting to the verdict."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conf.compose.load import composed, to_run_config
from conf.schema import ConfigError
from conf.user_code import named
from reward.check.__main__ import main
from reward.task import defaults_of, read_reward

PROJECT = Path(__file__).parents[3]
EXAMPLES = PROJECT / "docs" / "examples"
PART = 'reward.parts={brevity: {kind: python, function: "my_rewards:brevity", weight: 0.1}}'
CALLS = {"kind": "calls", "entry_point": "one", "tests": [{"args": [], "expected": 1}]}


def test_a_file_is_graded_with_the_documented_functions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(EXAMPLES / "my_rewards.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    task = [
        CALLS,
        {"kind": "python", "function": "my_rewards:brevity", "name": "brevity", "weight": 0.1},
        {"kind": "python", "function": "my_rewards:names_the_level", "name": "level", "weight": 0},
        {"kind": "length", "target": 10, "most": 20},
    ]
    problem = {"id": "one", "prompt": "Write one().", "task": task, "metadata": {"level": 7}}
    completion = {"id": "one", "completion": "Level 7:\n```python\ndef one():\n    return 1\n```", "tokens": 15}
    Path("problems.jsonl").write_text(json.dumps(problem) + "\n")
    Path("completions.jsonl").write_text(json.dumps(completion) + "\n")
    assert main(["problems.jsonl", "--solutions", "completions.jsonl"]) == 1
    told = capsys.readouterr()
    assert "length: 15 tokens, and 10 are wanted" in told.err
    for name, mean in {"calls": "1", "brevity": "0.96", "level": "1", "length": "0.5", "cut_off": "0"}.items():
        assert any(line.split()[1:5] == [name, "│", "mean", f"{mean},"] for line in told.out.splitlines()), (name, told.out)


def test_the_documented_setting_names_a_function_that_the_judge_loads(tmp_path: Path) -> None:
    config = to_run_config(composed(["experiment=debug", "name=run", PART]))
    assert [(one.setting, one.name, one.role) for one in named(config)] == [
        ("reward.parts.brevity.function", "my_rewards:brevity", "judge")
    ]
    reward = read_reward(CALLS, defaults=defaults_of(config))
    assert [(part.name, part.weight) for part in reward.parts] == [("calls", 1.0), ("brevity", 0.1)]


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("reward.functions=[my_rewards:brevity]", "there is no my_rewards.py"),
        ("reward.parts={short: {kind: length, target: 5}}", "reward.parts.short.most: must be a whole number"),
        ("reward.parts={short: {kind: lenght}}", "reward.parts.short.kind: 'lenght' is not known"),
        ("reward.reasoning='<think>'", "reward.reasoning='<think>' must be auto, none, or two different tags"),
    ],
)
def test_a_launch_refuses_rewards_that_cannot_be_used(setting: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps({"id": "one", "prompt": "Write one().", "task": CALLS}) + "\n")
    words = [sys.executable, "-m", "launch", "experiment=debug", "data=files", f"data.train=[{tmp_path}/train.jsonl]", setting]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    done = subprocess.run(
        [*words, f"output={tmp_path}", "name=run"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode != 0 and told in done.stderr, done.stderr[-2000:]


def test_parts_of_a_run_that_make_no_sense_are_an_error_of_the_configuration() -> None:
    config = to_run_config(composed(["experiment=debug", "name=run", "reward.parts={short: {kind: length, target: 5}}"]))
    with pytest.raises(ConfigError, match=r"reward\.parts\.short\.most"):
        defaults_of(config)
