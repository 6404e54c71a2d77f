"""The logs of a run's processes: where one start ends and the next begins, and what a dead process has to say."""

import os
import re
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from launch.processes.lifecycle import Cause

TAIL_LINES = 25
READ_LINES = 200
READ_BYTES = 256 * 1024
START_MARK = "--- started "
END_MARK = "--- ended "
TORCHRUN_VERDICT = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)")
"""torchrun itself ends with 1 whatever its worker did; this line of its log, in front of its own report, says more."""


def open_log(path: Path, argv: Sequence[str]) -> BinaryIO:
    """To be appended to; it says what is started. A disk that is full keeps no process from its start."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        log = path.open("ab", buffering=0)
    except OSError:
        return open(os.devnull, "ab", buffering=0)
    with suppress(OSError):
        log.write(f"{START_MARK}{time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(argv)}\n".encode())
    return log


def last_lines(log: Path, count: int = READ_LINES) -> list[str]:
    """The last lines of a log, from the last start of its process on; none of a log that was cleared away."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - READ_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    starts = [n for n, line in enumerate(lines) if line.startswith(START_MARK)]
    return lines[starts[-1] + 1 if starts else 0 :][-count:]


def cause_of_end(name: str, code: int, log: Path) -> Cause:
    """Who died, how, and its last words: what torchrun reports after a worker's end is left out."""
    lines = last_lines(log)
    verdicts = [(n, found) for n, line in enumerate(lines) if (found := TORCHRUN_VERDICT.search(line))]
    who = name
    if code == 1 and verdicts:
        code, who = int(verdicts[-1][1][1]), f"{name} (worker {verdicts[-1][1][2]})"
        lines = [line for line in lines[: verdicts[0][0]] if "closing signal SIGTERM" not in line]
    words = "\n".join(f"    {line}" for line in [line for line in lines if not line.startswith(END_MARK)][-TAIL_LINES:])
    return Cause(code=code, how=f"{who} {_how(code)}", last_words=f"The end of {log}:\n{words}")


def _how(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
