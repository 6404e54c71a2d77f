"""The example of docs/extending.md: a reader of the user's own, from the setting to the run's prompts."""

import sys
from pathlib import Path

import pytest

from conf.compose.load import write_run
from conf.schema import ConfigError, DataConfig, ModelConfig, RunConfig
from rollout.queue.__main__ import read_prompts
from tests.rollout.stage import write_model

EXAMPLES = Path(__file__).resolve().parents[3] / "docs" / "examples"
CSV = 'name,question,function,tests\nadd,t1 t2,add,"[{""args"": [1, 2], ""expected"": 3}]"\n'
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    (tmp_path / "problems.csv").write_text(CSV)
    (tmp_path / "my_reader.py").write_text((EXAMPLES / "my_reader.py").read_text())
    model = write_model(tmp_path / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_reader", raising=False)
    data = DataConfig(train=["problems.csv"], reader="my_reader:rows")
    return RunConfig(model=ModelConfig(path=str(model)), data=data)


def test_run_trains_on_what_the_users_reader_gives(config: RunConfig, tmp_path: Path) -> None:
    write_run(config, tmp_path / "run")
    ((prompt,),) = read_prompts(config, tmp_path / "run").train
    assert (prompt.id, prompt.task["tests"]) == ("add", [{"args": [1, 2], "expected": 3}])


def test_changed_reader_makes_the_prompts_anew(config: RunConfig, tmp_path: Path) -> None:
    write_run(config, tmp_path / "run")
    read_prompts(config, tmp_path / "run")
    config.user_code = {"my_reader:rows": "sha256:another"}
    read_prompts(config, tmp_path / "run")
    assert len(list((tmp_path / "run" / "prompts").glob("*.msgpack"))) == 2


def test_reader_that_is_not_there_is_an_error_that_names_the_setting(config: RunConfig, tmp_path: Path) -> None:
    config.data.reader = "my_reader:lines"
    with pytest.raises(ConfigError, match=r"data\.reader=my_reader:lines"):
        read_prompts(config, tmp_path / "run")
