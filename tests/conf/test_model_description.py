"""A run keeps what its engines and judges read of the model's folder, so that they can restart without that folder."""

import shutil
from argparse import Namespace
from pathlib import Path

import pytest

from conf.compose import model_description
from conf.compose.model_description import description_of, keep_description
from conf.schema import RunConfig
from rollout.__main__ import engine_settings
from rollout.queue.keys import RunKeys
from tests.launch.stand_ins import write_model


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    write_model(tmp_path / "model", shards=2)
    (tmp_path / "run").mkdir()
    made = RunConfig()
    made.model.path, made.cluster.device = str(tmp_path / "model"), "cpu"
    return made


def test_an_engine_starts_from_the_runs_own_copy_when_the_models_folder_is_gone(tmp_path: Path, config: RunConfig) -> None:
    run_dir = tmp_path / "run"
    RunKeys.create(run_dir)
    keep_description(config, run_dir)
    shutil.rmtree(config.model.path)
    keep_description(config, run_dir)  # the run is resumed
    arguments = Namespace(run=run_dir, queue="tcp://127.0.0.1:1", engine_port=20000, first_engine=0)
    settings = engine_settings(config, RunKeys.load(run_dir), arguments, 0)
    assert sorted(path.name for path in settings.model.iterdir()) == ["config.json", "tokenizer.json"]
    assert settings.load_format == "dummy"


def test_a_launcher_killed_while_it_copies_leaves_no_half_of_a_copy(tmp_path: Path, config: RunConfig, monkeypatch) -> None:
    run_dir = tmp_path / "run"
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(model_description.shutil, "copy", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        keep_description(config, run_dir)
    assert description_of(config, run_dir) == Path(config.model.path)
    keep_description(config, run_dir)
    assert (description_of(config, run_dir) / "config.json").is_file()
