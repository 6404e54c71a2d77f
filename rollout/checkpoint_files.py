"""The checkpoints in a run's folder: which there are, and whether their files are as they were written.

A checkpoint is a folder `version-<n>`. Its file SHA256SUMS holds the digest of every other file, in the format of `sha256sum`,
so that `sha256sum --check SHA256SUMS` finds the same. The trainer writes both; the others only look.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SUMS = "SHA256SUMS"
READERS = 4  # files that one process reads at the same time
_NAME = re.compile(r"version-(\d+)")
_LINE = re.compile(r"([0-9a-f]{64}) [ *](\S+)")


class SumsError(ValueError):
    """SHA256SUMS is missing or cannot be read; the message says what to do."""


def complete(folder: str | Path) -> list[tuple[int, Path]]:
    """Every checkpoint that was written to its end, with its version, oldest first."""
    named = ((_NAME.fullmatch(path.name), path) for path in Path(folder).glob("version-*"))
    return sorted((int(match[1]), path) for match, path in named if match and path.is_dir())


def newest_version(folder: Path) -> int:
    """The version of the newest complete checkpoint; 0 if there is none."""
    return max((version for version, _ in complete(folder)), default=0)


def digest(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_sums(checkpoint: Path, known: Mapping[str, str]) -> None:
    """Writes SHA256SUMS. known: digests by file name, taken when the files were written; the other files are read here."""
    names = sorted(path.name for path in checkpoint.iterdir() if path.name != SUMS)
    lines = (f"{known.get(name) or digest(checkpoint / name)}  {name}\n" for name in names)
    (checkpoint / SUMS).write_text("".join(lines))


def read_sums(checkpoint: Path) -> dict[str, str]:
    """Digests by file name. Raises SumsError."""
    path = checkpoint / SUMS
    try:
        lines = [_LINE.fullmatch(line) for line in path.read_text(errors="replace").splitlines()]
    except OSError as error:
        remedy = f"if you trust its files, accept them: (cd {checkpoint} && sha256sum -- $(ls -A) > {SUMS})"
        raise SumsError(f"{path} cannot be read ({error.strerror}), so damage would not be noticed; {remedy}") from error
    found = {line[2]: line[1] for line in lines if line}
    if not found or not all(lines):
        raise SumsError(f"{path} is damaged: bring it back as it was")
    return found


def damage(checkpoint: Path, names: Sequence[str] | None = None) -> str | None:
    """The first of the files that is not as it was written, and how that shows; None if all are whole. Raises SumsError.

    names: the files to look at, where several processes share the work; all by default.
    """
    sums = read_sums(checkpoint)
    with ThreadPoolExecutor(READERS) as readers:
        found = readers.map(lambda name: _damage(checkpoint / name, sums[name]), sums if names is None else names)
        return next((fault for fault in found if fault), None)


def _damage(path: Path, expected: str) -> str | None:
    try:
        found = digest(path)
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    return None if found == expected else f"{path} is damaged: its SHA-256 is not the one in {SUMS}"
