"""Reads problems from a CSV file with the columns name, question, function, tests (a JSON list)."""

import csv
import json
from collections.abc import Iterator
from typing import Any


def rows(source: str) -> Iterator[dict[str, Any]]:
    with open(source, newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            task = {"kind": "calls", "entry_point": line["function"], "tests": json.loads(line["tests"])}
            yield {"id": line["name"], "prompt": line["question"], "task": task}
