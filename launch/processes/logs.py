"""The logs of a run's processes: where each start begins, how a process ended, and why."""

import os
import re
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from conf.compose.run_folder import TRAINER_FAILURE
from launch.processes.lifecycle import ProcessExit

TAIL_LINES = 25
READ_LINES = 200
READ_BYTES = 256 * 1024
START_MARK = "--- started "
END_MARK = "--- ended "
"""The file in the run's folder where the first trainer rank that fails writes why. The errors of later ranks only say that a
connection was closed."""
TORCHRUN_FAILURE = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)")
"""torchrun itself always exits with 1. This line of its log, before its own report, gives the worker's exit code."""


def open_log(path: Path, argv: Sequence[str]) -> BinaryIO:
    """Opens a log to append to, and writes the command into it. The process starts even if the disk is full."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        log = path.open("ab", buffering=0)
    except OSError:
        return open(os.devnull, "ab", buffering=0)
    with suppress(OSError):
        log.write(f"{START_MARK}{time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(argv)}\n".encode())
    return log


def last_lines(log: Path, count: int = READ_LINES) -> list[str]:
    """The last lines of a log since the last start of its process; none if the log was removed."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - READ_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    starts = [n for n, line in enumerate(lines) if line.startswith(START_MARK)]
    return lines[starts[-1] + 1 if starts else 0 :][-count:]


def read_exit(name: str, code: int, log: Path) -> ProcessExit:
    """Which process ended, how, and why. What torchrun reports after its worker has ended is left out."""
    lines = last_lines(log)
    failures = [(n, found) for n, line in enumerate(lines) if (found := TORCHRUN_FAILURE.search(line))]
    who = name
    if code == 1 and failures:
        code, who = int(failures[-1][1][1]), f"{name} (worker {failures[-1][1][2]})"
        lines = [line for line in lines[: failures[0][0]] if "closing signal SIGTERM" not in line]
    lines = [line for line in lines if not line.startswith(END_MARK)][-TAIL_LINES:]
    tail = f"The end of {log}:\n{_indented(lines)}"
    if code and name.startswith("trainer-") and (first := _first_failure(log.parent.parent / TRAINER_FAILURE)):
        tail = f"The first failure of the trainer, {_indented(first.splitlines()).lstrip()}\n{tail}"
    return ProcessExit(code=code, description=f"{who} {_how(code)}", log_tail=tail)


def _first_failure(record: Path) -> str:
    """Empty when no rank wrote why it failed, as one that was killed cannot. Rank 0 removes the record of an earlier start."""
    try:
        return record.read_text(errors="replace").strip()
    except OSError:
        return ""


def _indented(lines: Sequence[str]) -> str:
    return "\n".join(f"    {line}" for line in lines)


def _how(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
