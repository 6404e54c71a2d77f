"""Shows why engines fail, as soon as their workers write it into their logs (`logs/worker-N.log`)."""

import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ERROR = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ ERROR (.*?)(; the end of .*)?$", re.MULTILINE)
"""A record of rollout/__main__.py. Its first line says why; the end of the engine's log follows."""

REPEAT_S = 60.0  # the same failure of a worker is shown this often
LONGEST = 300


class EngineFailures:
    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._read = {path: path.stat().st_size for path in self._logs()}  # what is there comes from an earlier launch
        self._shown_s: dict[str, float] = {}

    def new(self) -> list[str]:
        """One line per error since the last call."""
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
        for found in ERROR.finditer(whole.decode(errors="replace")):
            yield "".join(char if char.isprintable() else " " for char in found[1])[:LONGEST]

    def _is_due(self, worker: str, text: str) -> bool:
        kind, now = f"{worker} {re.sub('[0-9]+', '', text)}", time.monotonic()
        if now - self._shown_s.get(kind, float("-inf")) < REPEAT_S:
            return False
        self._shown_s[kind] = now
        return True
