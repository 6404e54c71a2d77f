"""The versions that the project requires, for each environment of a run. They are read from the project's own metadata."""

import importlib.metadata
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = "kestrel"
PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
EXTRA_OF_ROLE = {"trainer": "trainer", "rollout": "rollout"}
ON_GPUS_ONLY = frozenset({"transformer-engine"})
NCCL_PACKAGES = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")
BASE = ""  # the requirements of every process


@cache
def requirements() -> dict[str, tuple[Requirement, ...]]:
    """The requirements by extra; those of every process are under BASE."""
    if PYPROJECT.is_file():
        project = tomllib.loads(PYPROJECT.read_text())["project"]
        lists = {BASE: project["dependencies"], **project["optional-dependencies"]}
        return {extra: tuple(map(Requirement, lines)) for extra, lines in lists.items()}
    found: dict[str, list[Requirement]] = {BASE: []}
    for line in importlib.metadata.requires(PROJECT) or ():
        requirement = Requirement(line)
        extra = str(requirement.marker).partition('"')[2].rstrip('"') if requirement.marker else BASE
        found.setdefault(extra, []).append(requirement)
    return {extra: tuple(lines) for extra, lines in found.items()}


def of_roles(roles: list[str], *, gpus: bool) -> Iterator[Requirement]:
    """The packages that an environment for these roles must have."""
    extras = [BASE, *(EXTRA_OF_ROLE[role] for role in roles if role in EXTRA_OF_ROLE)]
    for extra in extras:
        for requirement in requirements()[extra]:
            if gpus or canonicalize_name(requirement.name) not in ON_GPUS_ONLY:
                yield requirement


def pinned_packages() -> list[str]:
    extras = (BASE, *EXTRA_OF_ROLE.values())
    return [*dict.fromkeys(r.name for extra in extras for r in requirements()[extra]), *NCCL_PACKAGES]
