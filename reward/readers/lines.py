"""The format of this project: lines are read to be checked, and to merge several files."""

from typing import Any

from reward.readers.draft import Draft, RowRefused, text_of

PROMPT = ("prompt", "messages", "raw", "metadata")  # fields that stay as they are
FIELDS = frozenset(("id", *PROMPT, "prefill", "task", "solution"))


def read_line(row: dict[str, Any]) -> Draft:
    if unknown := sorted(set(row) - FIELDS):
        raise RowRefused("a field that problem lines do not have", unknown[0])
    if not isinstance(row.get("task"), dict):
        raise RowRefused("no `task`")
    messages = row.get("messages")
    if messages is not None and not (isinstance(messages, list) and all(isinstance(message, dict) for message in messages)):
        raise RowRefused("`messages` is not a list of messages")
    if messages is None:
        text_of(row, "prompt")
    solution = row.get("solution")
    return Draft(
        id=text_of(row, "id"),
        fields={key: row[key] for key in PROMPT if key in row},
        prefill=text_of(row, "prefill", default=""),
        tasks=[row["task"]],
        solutions=[solution] if isinstance(solution, str) else [],
    )
