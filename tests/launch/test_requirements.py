"""The lock of the GPU environment agrees with what the project, SGLang and Megatron ask for, and is complete."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "requirements"


def requirements(file: str) -> dict[str, Requirement]:
    lines = (line.partition("#")[0].strip() for line in (FOLDER / file).read_text().splitlines())
    return {canonicalize_name(found.name): found for found in map(Requirement, filter(None, lines))}


LOCKED = {name: str(wanted.specifier).removeprefix("==") for name, wanted in requirements("cuda-constraints.txt").items()}


def test_every_package_of_the_gpu_environment_has_one_locked_version() -> None:
    assert all(re.fullmatch(r"[\w.]+", version) for version in LOCKED.values())
    for file in ("cuda.txt", "cuda-nodeps.txt"):
        for name, wanted in requirements(file).items():
            assert wanted.specifier.contains(LOCKED[name], prereleases=True), f"{file}: {wanted}"


def test_locked_versions_are_those_that_the_project_requires() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for wanted in map(Requirement, [*project["dependencies"], *extras["trainer"], *extras["rollout"], *extras["sweep"]]):
        assert wanted.specifier.contains(LOCKED[canonicalize_name(wanted.name)], prereleases=True), str(wanted)


def test_locked_versions_are_those_that_sglang_and_megatron_require() -> None:
    for package in ("sglang", "megatron-core"):
        for wanted in map(Requirement, importlib.metadata.requires(package) or ()):
            name = canonicalize_name(wanted.name)
            asked = wanted.marker is None or wanted.marker.evaluate({"extra": ""}) or name == "transformer-engine"
            if asked and name in LOCKED:
                assert wanted.specifier.contains(LOCKED[name], prereleases=True), f"{package}: {wanted}, not {LOCKED[name]}"


def test_one_nccl_and_one_cuda_are_locked() -> None:
    assert [name for name in LOCKED if name.startswith("nvidia-nccl")] == ["nvidia-nccl-cu13"]
    assert LOCKED["cuda-toolkit"].startswith("13.")
    assert {LOCKED["transformer-engine"]} == {LOCKED[f"transformer-engine-{part}"] for part in ("cu13", "torch")}


def test_images_install_from_the_same_files_as_make() -> None:
    for file in ("Makefile", "requirements/Dockerfile", "requirements/kestrel.def"):
        assert "requirements/install_cuda.sh" in (REPOSITORY / file).read_text()
