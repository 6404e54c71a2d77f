"""Shows on the screen what workers, judges and the trainer write into their logs about failures, as soon as they write it."""

import re
import time
from collections.abc import Iterator, Mapping, Set
from contextlib import suppress
from pathlib import Path

RECORD = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ ([A-Z]+) (.*?)(; the end of .*)?$", re.MULTILINE)
"""A record in the logging format of worker, judge and trainer. Its first line says what failed and why."""

LEVELS: Mapping[str, Set[str]] = {"worker-*.log": {"ERROR"}, "judge-*.log": {"ERROR"}, "trainer-*.log": {"WARNING", "ERROR"}}
REPEAT_S = 60.0  # the same message of a process is shown this often
LONGEST = 500


class LogMessages:
    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._read = {path: path.stat().st_size for path, _ in self._logs()}  # what is there comes from an earlier launch
        self._shown_s: dict[str, float] = {}

    def new(self) -> list[str]:
        """One line per message since the last call."""
        messages = ((path.stem, text) for path, levels in self._logs() for text in self._messages(path, levels))
        return [f"{process}: {text}" for process, text in messages if self._is_due(process, text)]

    def _logs(self) -> list[tuple[Path, Set[str]]]:
        return [(path, levels) for pattern, levels in LEVELS.items() for path in sorted(self._log_dir.glob(pattern))]

    def _messages(self, path: Path, levels: Set[str]) -> Iterator[str]:
        data = b""
        with suppress(OSError), path.open("rb") as log:
            log.seek(self._read.get(path, 0))
            data = log.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read[path] = self._read.get(path, 0) + len(whole)
        for found in RECORD.finditer(whole.decode(errors="replace")):
            if found[1] in levels:
                yield "".join(char if char.isprintable() else " " for char in found[2])[:LONGEST]

    def _is_due(self, process: str, text: str) -> bool:
        kind, now = f"{process} {re.sub('[0-9]+', '', text)}", time.monotonic()
        if now - self._shown_s.get(kind, float("-inf")) < REPEAT_S:
            return False
        self._shown_s[kind] = now
        return True
