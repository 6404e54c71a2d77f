"""Reads problems from JSONL files, from data sets of the Hugging Face hub, or through the user's own reader.

    data.train=[train.jsonl]
    data.train=[hf://openai/gsm8k?name=main&split=train]        further options go to `datasets.load_dataset`
    data.train=[problems.csv] data.reader=my_reader:rows        `rows("problems.csv")` returns the rows as mappings

Every row has the fields that `problems.py` lists. One column of a table cannot hold tests of different types, so in a data set of
the hub `task`, `messages` and `metadata` may be strings of JSON.
"""

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from urllib.parse import parse_qsl

from rollout.prompts.problems import Problem, ProblemError, parse_line, problem_of

HUB = "hf://"
JSON_FIELDS = ("task", "messages", "metadata")
Reader = Callable[[str], Iterable[Any]]  # returns the rows of one source


def read_problems(sources: Sequence[str], reader: Reader | None = None) -> list[Problem]:
    """The problems of all sources, in order. `reader` is the user's own reader, if there is one. Raises ProblemError."""
    problems: list[Problem] = []
    seen: dict[str, str] = {}
    for source in sources:
        for where, row in _rows(source, reader):
            problem = problem_of(row, where)
            if problem.id in seen:
                raise ProblemError(f"{where}: id {problem.id!r} was used before, at {seen[problem.id]}")
            seen[problem.id] = where
            problems.append(problem)
    return problems


def _rows(source: str, reader: Reader | None) -> Iterator[tuple[str, Any]]:
    if reader is not None:
        return _rows_of_reader(source, reader)
    return _rows_of_data_set(source) if source.startswith(HUB) else _rows_of_file(source)


def _rows_of_file(source: str) -> Iterator[tuple[str, Any]]:
    try:
        with open(source, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{source}:{number}", parse_line(line, f"{source}:{number}")
    except OSError as error:
        raise ProblemError(f"cannot read the problems {source}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ProblemError(f"{source} is not UTF-8 text: {error}") from error


def _rows_of_data_set(source: str) -> Iterator[tuple[str, Any]]:
    try:
        import datasets  # optional dependency
    except ImportError as error:
        raise ProblemError(f"{source}: this needs the package `datasets`: `pip install datasets`, or use a JSONL file") from error
    name, _, query = source.removeprefix(HUB).partition("?")
    options = {"split": "train"} | dict(parse_qsl(query))
    try:
        rows = datasets.load_dataset(name, **options)
    except (OSError, ValueError, TypeError) as error:
        raise ProblemError(f"cannot load {source}: {type(error).__name__}: {error}") from error
    for number, row in enumerate(rows):
        where = f"{source} row {number}"
        present = {name: value for name, value in row.items() if value is not None}
        yield (
            where,
            {
                name: parse_line(value, f"{where}: `{name}`") if name in JSON_FIELDS and isinstance(value, str) else value
                for name, value in present.items()
            },
        )


def _rows_of_reader(source: str, reader: Reader) -> Iterator[tuple[str, Any]]:
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
