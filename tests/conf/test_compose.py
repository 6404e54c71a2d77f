"""What Hydra composes from the YAML of conf/, and what a user's mistake looks like."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

from conf.load import read_run, register, to_run_config, write_run
from conf.messages import UserError, one_line
from conf.schema import ConfigError, RunConfig

EXPERIMENTS = sorted(path.stem for path in (Path(__file__).parents[2] / "conf/experiment").glob("*.yaml"))


@pytest.fixture(autouse=True)
def _hydra() -> Iterator[None]:
    register()
    with initialize_config_module("conf", version_base="1.3"):
        yield


def composed(*overrides: str) -> RunConfig:
    return to_run_config(compose("config", overrides=["name=test", *overrides]))


def complaint(*overrides: str) -> str:
    with pytest.raises((*UserError, ConfigError)) as caught:
        composed(*overrides)
    return one_line(caught.value)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes_and_passes_the_checks(experiment: str) -> None:
    composed(f"experiment={experiment}")


def test_command_line_wins_over_the_experiment() -> None:
    assert composed("experiment=debug").trainer.steps == 50
    assert composed("experiment=debug", "trainer.steps=7").trainer.steps == 7


def test_run_that_was_written_is_read_as_it_was(tmp_path: Path) -> None:
    config = composed("experiment=debug", "trainer.lr=1e-5", "rollout.engine_args=[--a,b]")
    write_run(config, tmp_path)
    assert read_run(tmp_path) == config


def test_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no config\.yaml"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rollout.engine=3", "rollout.engine: no such setting; did you mean rollout.engines?"),
        ("+rollout.engine=3", "rollout.engine: no such setting; did you mean rollout.engines?"),
        ("rolout.engines=3", "rolout.engines: no such setting; did you mean rollout.engines?"),
        ("rollout.engines=many", "rollout.engines: Value 'many' of type 'str' could not be converted to Integer"),
        ("data.train=file", "data.train: Invalid value assigned: str is not a ListConfig, list or tuple."),
        ("trainer.tp=0", "trainer.tp=0: must be at least 1"),
        ("model=unknown", "Could not find 'model/unknown' Available options in 'model': debug kestrel_32b smollm2"),
        ("rollout.engines=[1", "rollout.engines=[1: cannot be read as KEY=VALUE (no viable alternative at input '[1')"),
    ],
)
def test_mistake_is_one_line_that_names_the_setting(override: str, said: str) -> None:
    assert complaint("experiment=debug", override) == said


def test_no_experiment_is_a_mistake_with_a_hint() -> None:
    assert complaint() == "choose an experiment (experiment=debug), or a model and data (model=… data=…)"


def test_model_without_a_path_is_refused() -> None:
    assert complaint("experiment=debug", "model.path=???").startswith("model.path: ")
