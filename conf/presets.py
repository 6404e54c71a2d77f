"""A preset that is named on the command line and an experiment may set the same key; the experiment comes later and would win."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from conf.schema import ConfigError

FOLDER = Path(__file__).parent
EXPERIMENT = "experiment"


def check_presets(overrides: Sequence[str], composed: DictConfig) -> None:
    """`overrides` are the words of the command line. Raises ConfigError where a preset named there would silently not hold."""
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
                    f"{group}={preset} sets {full}={wanted}, but experiment={said.get(EXPERIMENT)} comes later and sets {found}: "
                    f"give {full}={wanted} on the command line too, or {full}={found} to keep the experiment's"
                )


def experiments() -> list[str]:
    return sorted(file.stem for file in (FOLDER / EXPERIMENT).glob("*.yaml"))


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
