"""Presets: the YAML files in the folders of conf/, as they are named on the command line."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from conf.schema import RULES, ConfigError, RunConfig, value_of

FOLDER = Path(__file__).parents[1]
EXPERIMENT = "experiment"
ADDRESS = re.compile(r"(?<!['\"])hf://(?:[^\s,'\"\[\]]|\[[^\]]*\])+")
ANY_KEYS = tuple(f"{key}." for key in RULES if isinstance(value_of(RunConfig(), key), dict))
NO_NAME = re.compile(r"null|true|false|[-+.\d\[].*", re.IGNORECASE)
"""Words that Hydra does not read as text. Its own error message does not name the word."""


def with_quoted_addresses(words: Sequence[str]) -> list[str]:
    """The words of a command with `hf://name?split=train` in quotes, since Hydra does not read `?`, `=` and `&` without them."""
    return [ADDRESS.sub(lambda found: f"'{found[0]}'", word) for word in words]


def with_added_keys(words: Sequence[str]) -> list[str]:
    """The words of a new run with `++` before a setting that holds keys of the user's choice, such as reward.parts, since Hydra
    adds no key without it."""
    if any(word.startswith("resume=") for word in words):
        return list(words)
    return [f"++{word}" if f"{word.partition('=')[0]}.".startswith(ANY_KEYS) else word for word in words]


def check_names(words: Sequence[str]) -> None:
    """Raises ConfigError if a group of presets is given a word that cannot be the name of a preset."""
    for word in words:
        group, _, preset = word.lstrip("+").partition("=")
        if not group:
            raise ConfigError(f"{word}: there is no setting before the `=`; is there a space before it?")
        if NO_NAME.fullmatch(preset) and (FOLDER / group).is_dir():
            raise ConfigError(f"{word}: choose a preset by its name, {group}={'|'.join(_members(group))}")


def check_presets(overrides: Sequence[str], composed: DictConfig) -> None:
    """Raises ConfigError if the experiment overrides a preset that the user chose: Hydra composes the experiment last."""
    said = dict(override.lstrip("+").partition("=")[::2] for override in overrides)
    for group, preset in said.items():
        file = FOLDER / group / f"{preset}.yaml"
        if group == EXPERIMENT or not file.is_file():
            continue
        values = OmegaConf.to_container(composed[group], resolve=False)
        for key, wanted in _leaves(OmegaConf.to_container(OmegaConf.load(file), resolve=False)):
            full = f"{group}.{key}"
            if full not in said and (found := _at(values, key)) != wanted:
                raise ConfigError(
                    f"{group}={preset} sets {full}={wanted}, but experiment={said.get(EXPERIMENT)} is applied later and "
                    f"sets {found}: add {full}={wanted} to the command line, or {full}={found} to keep what the experiment sets"
                )


def experiments() -> list[str]:
    return _members(EXPERIMENT)


def _members(group: str) -> list[str]:
    return sorted(file.stem for file in (FOLDER / group).glob("*.yaml"))


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, inner in (node or {}).items():
        if isinstance(inner, dict):
            yield from _leaves(inner, f"{prefix}{name}.")
        else:
            yield prefix + name, inner


def _at(node: Any, key: str) -> Any:
    for part in key.split("."):
        node = node[part]
    return node
