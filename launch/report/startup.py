"""What a run waits for before its first step: engines that listen, their first tokens, and the first evaluation.

Each is asked in a thread or read from a log, because an answer may take long and the launcher must not wait for it.
"""

import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from rollout.queue.client import QueueError

CONNECT_S = 0.5


class Listening:
    """Tells which engines have begun to listen. To look up a name or to connect to a dead node may take long."""

    def __init__(self, engines: Mapping[str, tuple[str, int]]) -> None:
        self._silent = dict(engines)
        self._found: SimpleQueue[str] = SimpleQueue()
        self._round = threading.Thread(target=self._try_all)

    def new(self) -> list[str]:
        """The engines that were found since the last call. The others are tried again, one round at a time."""
        found = [self._found.get() for _ in range(self._found.qsize())]
        for name in found:
            del self._silent[name]
        if self._silent and not self._round.is_alive() and self._found.empty():
            self._round = threading.Thread(target=self._try_all, daemon=True, name="listening")
            self._round.start()
        return found

    def _try_all(self) -> None:
        for name, address in list(self._silent.items()):
            with suppress(OSError), socket.create_connection(address, timeout=CONNECT_S):
                self._found.put(name)


class FirstTokens:
    """Tells whether an engine has generated. Its worker writes that into its log at each start."""

    MARK = b"has its first tokens"

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._read = {path: path.stat().st_size for path in self._logs()}  # what is there comes from an earlier launch

    def found(self) -> bool:
        for path in self._logs():
            with suppress(OSError), path.open("rb") as log:
                log.seek(self._read.get(path, 0))
                data = log.read()
                if self.MARK in data:
                    return True
                self._read[path] = self._read.get(path, 0) + data.rfind(b"\n") + 1
        return False

    def _logs(self) -> list[Path]:
        return sorted(self._log_dir.glob("worker-*.log"))


class EvaluationCount:
    """How many completions of a running evaluation are graded, by the status of the queue server."""

    def __init__(self, ask: Callable[[], Mapping[str, Any]]) -> None:
        self._ask = ask
        self._text = ""
        self._question = threading.Thread(target=self._update)

    def text(self) -> str:
        """The last answer, for example "evaluation: 120 of 512 completions"; "" while no evaluation runs. Asks again."""
        if not self._question.is_alive():
            self._question = threading.Thread(target=self._update, daemon=True, name="evaluation count")
            self._question.start()
        return self._text

    def _update(self) -> None:
        try:
            running = self._ask()["ledger"]["evals"].values()
        except (QueueError, OSError):
            return  # the server is starting, or starts again
        graded, completions = (sum(each[key] for each in running) for key in ("graded", "completions"))
        self._text = f"evaluation: {graded} of {completions} completions" if completions else ""
