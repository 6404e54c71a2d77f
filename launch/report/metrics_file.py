"""Reads `metrics.jsonl`, in which the trainer writes one line per step: while it grows, or at once."""

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from conf.compose.run_folder import METRICS

Metrics = Mapping[str, Any]  # a line of the file


class MetricsFile:
    """The new lines of metrics.jsonl at each call. A line that is still being written is left for the next call.

    A trainer that resumes replaces the file, without the steps that it will repeat, so a line is new by its time. A damaged line,
    from a full disk or two writers, is left out and reported to `warn`.
    """

    def __init__(self, path: Path, *, from_start: bool, warn: Callable[[str], None] = lambda text: None) -> None:
        self._path, self._warn = path, warn
        self._inode = 0
        self._offset = 0
        self._newest_s = 0.0 if from_start else time.time()

    def new_lines(self) -> list[Metrics]:
        try:
            with self._path.open("rb") as file:
                if (inode := os.fstat(file.fileno()).st_ino) != self._inode:
                    self._inode, self._offset = inode, 0
                file.seek(self._offset)
                data = file.read()
        except OSError:  # the file is not there yet, or is being replaced on a shared file system
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        lines = (self._read(line) for line in whole.split(b"\n") if line)
        fresh = [line for line in lines if line is not None and line["time"] > self._newest_s]
        self._newest_s = max((line["time"] for line in fresh), default=self._newest_s)
        return fresh

    def _read(self, text: bytes) -> Metrics | None:
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if isinstance(line, dict) and isinstance(line.get("step"), int) and isinstance(line.get("time"), int | float):
            return line
        self._warn(f"warning: {self._path} has a damaged line, which is left out: {text[:80]!r}")
        return None


def read_metrics(run_dir: Path) -> list[Metrics]:
    """The run's lines in the order of steps. Of a step that was repeated after a resume, the last line counts."""
    lines: dict[int, dict[str, Any]] = {}
    for line in MetricsFile(run_dir / METRICS, from_start=True).new_lines():
        lines[line["step"]] = {**lines.get(line["step"], {}), **line}
    return [lines[step] for step in sorted(lines)]
