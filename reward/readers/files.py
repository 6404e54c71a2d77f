"""The rows of one file: JSONL, JSON, Parquet, or Arrow as `datasets` saves it. JSONL and JSON may be gzipped.

JSONL, Parquet and Arrow are read as a stream, so a large file is never in memory as a whole.
"""

import gzip
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from rollout.prompts.problems import ProblemError, parse_line

GZIP, PARQUET, ARROW = b"\x1f\x8b", b"PAR1", b"\xff\xff\xff\xff"  # how such files begin
ROWS_AT_ONCE = 256
Rows = Iterator[tuple[str, Any]]
"""Each row with its place, for messages."""


def rows_of_file(path: Path) -> Rows:
    """The rows of a file. What the file holds tells its kind; its name does not. Raises ProblemError."""
    try:
        with path.open("rb") as file:
            start = file.read(4)
            file.seek(0)
            if start in (PARQUET, ARROW):
                yield from _rows_of_table(path, is_parquet=start == PARQUET)
            else:
                text = gzip.GzipFile(fileobj=file) if start.startswith(GZIP) else file
                yield from _rows_of_text(path, text)
    except (OSError, EOFError, zlib.error) as error:
        raise ProblemError(f"cannot read the problems {path}: {getattr(error, 'strerror', None) or error}") from error


def _rows_of_text(path: Path, file: Iterable[bytes]) -> Rows:
    lines = _lines(path, file)
    where, first = next(lines, ("", ""))
    if not first:
        return
    broken = None
    if not first.lstrip().startswith("["):
        try:
            row = parse_line(first, where)
        except ProblemError as error:
            broken = error  # one object may also be printed over several lines
        else:
            second = next(lines, None)
            if second is None and _holds_rows_by_id(row):
                yield from _rows_of_value(path, row)
                return
            yield where, row
            for where, line in chain([second] if second else [], lines):
                yield where, parse_line(line, where)
            return
    try:
        value = parse_line("\n".join([first, *(line for _, line in lines)]), str(path))
    except ProblemError as error:
        raise broken or error from None
    yield from _rows_of_value(path, value)


def _lines(path: Path, file: Iterable[bytes]) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(file, 1):
        if line.strip():
            try:
                yield f"{path}:{number}", line.decode("utf-8-sig").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise ProblemError(f"{path}:{number}: is not UTF-8 text: {error}") from error


def _rows_of_value(path: Path, value: Any) -> Rows:
    found = value if isinstance(value, list) else list(value.values()) if _holds_rows_by_id(value) else [value]
    for number, row in enumerate(found, 1):
        yield f"{path} row {number}", row


def _holds_rows_by_id(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(isinstance(row, dict) for row in value.values())


def _rows_of_table(path: Path, *, is_parquet: bool) -> Rows:
    try:
        import pyarrow  # optional dependency
        import pyarrow.parquet
    except ImportError as error:
        raise ProblemError(f"{path}: Parquet and Arrow need the package pyarrow: pip install 'kestrel[parquet]'") from error
    try:
        with pyarrow.memory_map(str(path)) as source:
            if is_parquet:
                batches = pyarrow.parquet.ParquetFile(source).iter_batches(batch_size=ROWS_AT_ONCE)
            else:
                batches = pyarrow.ipc.open_stream(source)
            found = chain.from_iterable(batch.to_pylist() for batch in batches)
            for number, row in enumerate(found, 1):
                yield f"{path} row {number}", row
    except pyarrow.ArrowException as error:
        raise ProblemError(f"{path}: a broken {'Parquet' if is_parquet else 'Arrow'} file: {error}") from error
