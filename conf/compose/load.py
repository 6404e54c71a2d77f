"""Composes, checks, writes and reads the configuration of a run: Hydra on one side, plain dataclasses on the other."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from conf.compose.check import check, check_resumed
from conf.compose.fit import fit
from conf.compose.hydra_errors import SETTINGS, in_one_line, wrong_type
from conf.compose.presets import check_names, with_added_keys
from conf.compose.run_folder import CONFIG
from conf.compose.secrets import refuse_secrets
from conf.schema import ConfigError, RunConfig
from conf.user_code import keep


def register() -> None:
    """Tells Hydra the schema, which `config.yaml` names as its first default."""
    ConfigStore.instance().store(name="schema", node=RunConfig)


def composed(words: Sequence[str]) -> DictConfig:
    """Composes the words of a command line. Raises ConfigError."""
    check_names(words)
    register()
    with in_one_line(), initialize_config_module("conf", version_base="1.3"):
        return compose("config", overrides=with_added_keys(words))


def to_run_config(composed: DictConfig, say: Callable[[str], None] = lambda change: None) -> RunConfig:
    """The composed configuration as dataclasses that are checked and fitted. Says what was fitted. Raises ConfigError."""
    config = unchecked(composed)
    check(config)
    for change in fit(config):
        say(change)
    return config


def unchecked(composed: DictConfig) -> RunConfig:
    """The composed configuration as dataclasses, of which only keys and types are checked. Raises ConfigError."""
    with in_one_line():
        # Plain values are merged, because a typed node would bring in keys that were added to it (Hydra's `+key=value`).
        values = OmegaConf.to_container(composed, resolve=True)
        refuse_secrets(values, os.environ)  # before other checks, whose messages show the value
        _check_lists(values, "")
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RunConfig), values))
    assert isinstance(config, RunConfig)
    return config


def _check_lists(node: object, key: str) -> None:
    """Raises ConfigError. OmegaConf takes lists within a list of texts, and its own error does not name the setting."""
    if SETTINGS.get(key) == list[str]:
        if not isinstance(node, list) or any(isinstance(item, dict | list) for item in node):
            raise ConfigError(wrong_type(key, f"{key}={'null' if node is None else node}", list[str]))
    elif isinstance(node, dict):
        for name, inner in node.items():
            _check_lists(inner, f"{key}.{name}" if key else str(name))


def as_yaml(config: RunConfig) -> str:
    """The settings of a run, without those that only the planner reads."""
    values = OmegaConf.to_container(OmegaConf.structured(config))
    assert isinstance(values, dict)
    del values["plan"], values["model"]["shape"]
    return OmegaConf.to_yaml(OmegaConf.create(values))


def write_run(config: RunConfig, run_dir: Path) -> None:
    """Writes the resolved configuration and the user code into the run's folder. Secrets are not in it: they lie in `keys/`."""
    run_dir.mkdir(parents=True, exist_ok=True)
    config.user_code = keep(config, run_dir)
    unfinished = run_dir / f".{CONFIG}"  # the file is complete or absent, whenever this process is killed
    with unfinished.open("w") as file:
        file.write(as_yaml(config))
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(run_dir / CONFIG)


def read_run(run_dir: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration of an existing run, with changes such as `trainer.tp=1`. Raises ConfigError."""
    path = run_dir / CONFIG
    if not path.is_file():
        raise ConfigError(f"{run_dir} is not the folder of a run: it holds no {CONFIG}")
    try:
        loaded = OmegaConf.load(path)
    except (YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is damaged: {' '.join(str(error).split())}") from error
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{path}: must hold a mapping")
    with in_one_line():
        loaded.merge_with_dotlist(list(overrides))
    return to_run_config(loaded)


def read_resumed(run_dir: Path, overrides: Sequence[str]) -> RunConfig:
    """The configuration of a run that is resumed, with the changes on the command line. Its folder may have been moved.

    Raises ConfigError.
    """
    if run_dir.name in ("", ".."):
        run_dir = run_dir.resolve()  # its name becomes the name of the run
    stored = read_run(run_dir)
    kept = [
        override for override in overrides if not override.startswith("experiment=")
    ]  # the experiment was chosen when the run began
    with in_one_line():
        merged = OmegaConf.merge(OmegaConf.structured(stored), OmegaConf.from_dotlist(kept))
    assert isinstance(merged, DictConfig)
    config = to_run_config(merged)
    check_resumed(stored, config)
    config.output, config.name, config.resume = str(run_dir.parent), run_dir.name, str(run_dir)
    return config
