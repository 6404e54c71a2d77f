"""Shows why engines fail, as soon as their workers write it into their logs (`logs/worker-N.log`)."""

import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

RECORD = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ ([A-Z]+) (.*)")  # the logging format of rollout/__main__.py
REPEAT_S = 60.0  # an engine that fails again and again is shown this often
LONGEST = 300


class EngineFailures:
    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._read = {path: path.stat().st_size for path in self._logs()}  # what is there comes from an earlier launch
        self._shown_s: dict[str, float] = {}

    def new(self) -> list[str]:
        """One line per error since the last call: what failed, and the last line of the engine's log."""
        return [f"{path.stem}: {text}" for path in self._logs() for text in self._errors(path) if self._is_due(path.stem, text)]

    def _logs(self) -> list[Path]:
        return sorted(self._log_dir.glob("worker-*.log"))

    def _errors(self, path: Path) -> Iterator[str]:
        data = b""
        with suppress(OSError), path.open("rb") as log:
            log.seek(self._read.get(path, 0))
            data = log.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read[path] = self._read.get(path, 0) + len(whole)
        for level, lines in records(whole.decode(errors="replace")):
            if level == "ERROR":
                yield one_line(lines)

    def _is_due(self, worker: str, text: str) -> bool:
        kind, now = f"{worker} {re.sub('[0-9]+', '', text)}", time.monotonic()
        if now - self._shown_s.get(kind, float("-inf")) < REPEAT_S:
            return False
        self._shown_s[kind] = now
        return True


def records(text: str) -> Iterator[tuple[str, list[str]]]:
    """The level and the lines of each record of a log."""
    level, lines = "", list[str]()
    for line in text.splitlines():
        if found := RECORD.match(line):
            if level:
                yield level, lines
            level, lines = found[1], [found[2]]
        else:
            lines.append(line)
    if level:
        yield level, lines


def one_line(lines: list[str]) -> str:
    """The first line of a record and the last line below it, where a traceback says what was wrong."""
    below = [line.strip() for line in lines[1:] if line.strip()]
    text = f"{lines[0]} {below[-1]}" if below else lines[0]
    return "".join(char if char.isprintable() else " " for char in text)[:LONGEST]
