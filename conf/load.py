"""Between Hydra's world and plain dataclasses: composing, checking, writing and reading a run's configuration."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf.check import check
from conf.messages import one_line
from conf.schema import ConfigError, RunConfig

CONFIG_FILE = "config.yaml"
SECRET_NAME = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD)($|_)")
SHORTEST_SECRET = 8  # what is shorter would be found everywhere


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
    refuse_secrets(values, os.environ)
    return config


def refuse_secrets(values: object, environment: Mapping[str, str]) -> None:
    """A configuration is written down, shown and shared, so no value may hold that of a secret variable. Raises ConfigError."""
    secrets = {n: v for n, v in environment.items() if SECRET_NAME.search(n.upper()) and len(v) >= SHORTEST_SECRET}
    for key, text in _texts(values, ""):
        if name := next((name for name, secret in secrets.items() if secret in text), None):
            raise ConfigError(f"{key} holds the value of ${name}: leave it out; secrets are read from the environment")


def _texts(node: object, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, dict):
        for name, inner in node.items():
            yield from _texts(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(node, list):
        for item in node:
            yield from _texts(item, key)
    elif isinstance(node, str):
        yield key, node


def write_run(config: RunConfig, run_dir: Path) -> None:
    """Writes the resolved configuration into the run's folder. It holds no secrets: those lie in `keys/`."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / CONFIG_FILE).write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))


def read_run(run_dir: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration of an existing run, with changes such as `trainer.tp=1`. Raises ConfigError."""
    path = run_dir / CONFIG_FILE
    if not path.is_file():
        raise ConfigError(f"{run_dir} is no run's folder: it holds no {CONFIG_FILE}")
    loaded = OmegaConf.load(path)
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{path}: must hold a mapping")
    loaded.merge_with_dotlist(list(overrides))
    return to_run_config(loaded)
