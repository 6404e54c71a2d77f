"""Between Hydra's world and plain dataclasses: composing, checking, writing and reading a run's configuration."""

from pathlib import Path

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf.messages import one_line
from conf.schema import ConfigError, RunConfig, check

CONFIG_FILE = "config.yaml"


def register() -> None:
    """Makes the schema known to Hydra; `config.yaml` names it as its first default."""
    ConfigStore.instance().store(name="schema", node=RunConfig)


def to_run_config(composed: DictConfig) -> RunConfig:
    """The composed configuration as plain, checked dataclasses. Raises ConfigError."""
    try:
        # Merged as plain values: a typed node would bring in keys that were added to it (Hydra's `+key=value`).
        values = OmegaConf.to_container(composed, resolve=True)
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RunConfig), values))
    except OmegaConfBaseException as error:
        raise ConfigError(one_line(error)) from error
    assert isinstance(config, RunConfig)
    check(config)
    return config


def write_run(config: RunConfig, run_dir: Path) -> None:
    """Writes the resolved configuration into the run's folder. It holds no secrets: those lie in `keys/`."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / CONFIG_FILE).write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))


def read_run(run_dir: Path) -> RunConfig:
    """The configuration of an existing run. Raises ConfigError."""
    path = run_dir / CONFIG_FILE
    if not path.is_file():
        raise ConfigError(f"{run_dir} is no run's folder: it holds no {CONFIG_FILE}")
    loaded = OmegaConf.load(path)
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{path}: must hold a mapping")
    return to_run_config(loaded)
