"""Our own lines: read to be checked, and to be brought together from several files."""

from typing import Any

from reward.readers.draft import Draft, Refused, text_of, user

FIELDS = frozenset(("id", "prompt", "messages", "prefill", "task", "solution"))


def read_line(row: dict[str, Any]) -> Draft:
    if unknown := sorted(set(row) - FIELDS):
        raise Refused("a field that problem lines do not have", unknown[0])
    if not isinstance(row.get("task"), dict):
        raise Refused("no `task`")
    messages = row.get("messages")
    if messages is not None and not (isinstance(messages, list) and all(isinstance(message, dict) for message in messages)):
        raise Refused("`messages` is not a list of messages")
    solution = row.get("solution")
    return Draft(
        id=text_of(row, "id"),
        messages=messages if messages is not None else user(text_of(row, "prompt")),
        prefill=text_of(row, "prefill", default=""),
        tasks=[row["task"]],
        solutions=[solution] if isinstance(solution, str) else [],
    )
