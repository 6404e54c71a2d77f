"""The rows of a file: JSONL, JSON (one list, or an object of columns or of rows) or Parquet, gzipped or not."""

import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reward.readers.draft import ReadError
from rollout.prompts.problems import ProblemError, parse_line

GZIP_MAGIC, PARQUET_MAGIC = b"\x1f\x8b", b"PAR1"


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """Each row as an object. The kind of file is told by what it holds, not by its name. Raises ReadError."""
    try:
        content = path.read_bytes()
        if content.startswith(GZIP_MAGIC):
            content = gzip.decompress(content)
    except (OSError, EOFError) as error:
        raise ReadError(f"cannot read {path}: {error}") from error
    found = _parquet(path, content) if content.startswith(PARQUET_MAGIC) else _json(path, content)
    for number, row in enumerate(found, 1):
        if not isinstance(row, dict):
            raise ReadError(f"{path}: row {number} must be an object, got {type(row).__name__}")
        yield row


def _json(path: Path, content: bytes) -> Iterator[Any]:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ReadError(f"{path}: neither JSON, JSONL nor Parquet: {error}") from error
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        yield from _lines(path, text)
        return
    if isinstance(whole, dict) and whole and all(isinstance(value, dict) for value in whole.values()):
        yield from whole.values()  # rows by id
    else:
        yield from whole if isinstance(whole, list) else [whole]


def _lines(path: Path, text: str) -> Iterator[Any]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            yield parse_line(line, f"{path}:{number}")
        except ProblemError as error:
            raise ReadError(str(error)) from error


def _parquet(path: Path, content: bytes) -> Iterator[Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ReadError(f"{path}: Parquet needs the package pyarrow: pip install 'kestrel[parquet]'") from error
    try:
        file = pyarrow.parquet.ParquetFile(io.BytesIO(content))
        for batch in file.iter_batches(batch_size=256):
            yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ReadError(f"{path}: a broken Parquet file: {error}") from error
