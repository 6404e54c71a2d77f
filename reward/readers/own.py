"""Rows that say themselves how an answer is graded, and rows with a prompt alone, which `data.task` grades.

    {"id", "prompt" or "messages", "task", "prefill"?, "raw"?, "metadata"?, "solution"?}

`data.task` is a task in which `{column}` stands for the value of that column, as in {kind: math, answer: "{result}"}.
"""

import re
from typing import Any

from reward.readers.answers import PROMPTS, QUESTIONS, messages_of
from reward.readers.draft import Draft, Options, Row, RowRefused, as_json

FIELDS = ("prompt", "messages", "prefill", "raw", "metadata")
JSON_FIELDS = ("task", "messages", "metadata")  # one column of a table cannot hold objects of several types: these may be JSON
COLUMN = re.compile(r"\{(\w+)\}")


def read_own(row: Row, _: Options) -> Draft:
    """The fields are checked where a problem is made of them."""
    row = {name: as_json(value, name) if name in JSON_FIELDS else value for name, value in row.items()}
    return _draft(row, row.get("task"), {name: row[name] for name in FIELDS if name in row})


def read_prompt(row: Row, options: Options) -> Draft:
    """A prompt that is a bare question is used as it is, too: only the author of the task knows how answers are to look."""
    row = {name: as_json(value, name) if name == "metadata" else value for name, value in row.items()}
    column = next(name for name in (*PROMPTS, *QUESTIONS) if name in row)
    prompt = {"prompt": row[column]} if row.get("raw") else {"messages": messages_of(row[column], column)}
    others = {name: row[name] for name in ("prefill", "raw", "metadata") if name in row}
    return _draft(row, filled(options.task, row), prompt | others)


def filled(template: Any, row: Row) -> Any:
    """The template with the row's values in the place of `{column}`. Raises RowRefused."""
    if isinstance(template, dict):
        return {key: filled(value, row) for key, value in template.items()}
    if isinstance(template, list):
        return [filled(value, row) for value in template]
    if isinstance(template, str) and (column := COLUMN.fullmatch(template)):
        if column[1] not in row:
            raise RowRefused(f"no `{column[1]}`, which data.task asks for")
        return row[column[1]]
    return template


def _draft(row: Row, task: Any, fields: dict[str, Any]) -> Draft:
    metadata = fields.pop("metadata") if isinstance(fields.get("metadata"), dict) else {}
    solution = row.get("solution")
    solutions = [solution] if isinstance(solution, str) else []
    return Draft(id=row.get("id"), tasks=[task], fields=fields, metadata=metadata, solutions=solutions)
