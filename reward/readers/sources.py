"""Where the rows of a run lie: what an entry of `data.train` or `data.heldout` may be.

train.jsonl                                       a file: JSONL, JSON, Parquet
problems/                                         a folder of such files, or one that `datasets` saved
data/train-*.parquet                              the files that match
hf://openai/gsm8k?config=main&split=train         a data set of the hub; other options go to `datasets.load_dataset`
anything                                          with data.reader=my_reader:rows, `rows("anything")` returns the rows
"""

import glob
import json
import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from reward.readers.files import Rows, rows_of_file
from rollout.prompts.problems import ProblemError

HUB = "hf://"
SUFFIXES = (".jsonl", ".json", ".parquet", ".jsonl.gz", ".json.gz")
SPLIT = re.compile(r"(train|test|validation|valid|val|dev|eval|heldout)(?![a-z])")
Reader = Callable[[str], Iterable[Any]]  # returns the rows of one source


def parts(source: str, reader: Reader | None = None) -> Iterator[Rows]:
    """The rows of a source. Each part, such as a file, has rows of one format. Raises ProblemError."""
    if reader is not None:
        yield _rows_of_reader(source, reader)
    elif source.startswith(HUB):
        yield _rows_of_data_set(source)
    else:
        yield from map(rows_of_file, files(source))


def files(source: str) -> list[Path]:
    """The files of a source that is no data set of the hub, in order. Raises ProblemError."""
    path = Path(source)
    if path.is_dir():
        return _files_of_folder(path)
    if path.exists() or not glob.has_magic(source):
        return [path]
    if found := sorted(Path(name) for name in glob.glob(source)):
        return found
    raise ProblemError(f"no file matches {source}")


def _files_of_folder(folder: Path) -> list[Path]:
    if (state := folder / "state.json").is_file():  # Dataset.save_to_disk
        try:
            return [folder / file["filename"] for file in json.loads(state.read_text())["_data_files"]]
        except (ValueError, LookupError, TypeError) as error:
            raise ProblemError(f"{state} is not what `datasets` writes: {error!r}") from error
    inner = ", ".join(sorted(str(path) for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")))
    if (folder / "dataset_dict.json").is_file():  # DatasetDict.save_to_disk
        raise ProblemError(f"{folder} holds several splits; name one: {inner}")
    found = sorted(path for path in folder.iterdir() if path.is_file() and path.name.endswith(SUFFIXES))
    if not found:
        other = f"; name one of its folders: {inner}" if inner else ""
        raise ProblemError(f"{folder} holds no {', '.join(SUFFIXES[:3])} file{other}")
    splits = sorted({match[1] for path in found if (match := SPLIT.match(path.name))})
    if len(splits) > 1:
        raise ProblemError(
            f"{folder} holds files of several splits ({', '.join(splits)}); name those of one: {folder}/{splits[-1]}*"
        )
    return found


def _rows_of_data_set(source: str) -> Rows:
    try:
        import datasets  # optional dependency
    except ImportError as error:
        raise ProblemError(f"{source}: this needs the package `datasets`: `pip install datasets`, or use a JSONL file") from error
    name, _, query = source.removeprefix(HUB).partition("?")
    options = {"split": "train"} | {{"config": "name"}.get(option, option): value for option, value in parse_qsl(query)}
    try:
        found = datasets.load_dataset(name, **options)
    except (OSError, ValueError, TypeError) as error:
        raise ProblemError(f"cannot load {source}: {type(error).__name__}: {error}") from error
    for number, row in enumerate(found, 1):
        yield f"{source} row {number}", row


def _rows_of_reader(source: str, reader: Reader) -> Rows:
    number = 0
    try:
        for number, row in enumerate(reader(source), 1):
            yield f"{source} row {number}", row
    except ProblemError:
        raise
    except Exception as error:  # the user's code may raise anything
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise ProblemError(
            f"data.reader failed at {source} after {number} rows: {last.filename}:{last.lineno}: {type(error).__name__}: {error}"
        ) from error
