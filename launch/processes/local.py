"""The processes of one machine: starts them, watches them, and ends them all. A `Host` for `supervise.py`.

Nothing is left behind: each process has a session of its own and is ended by its process group; the guard (rollout/guard.py)
ties it to this process; and what has lost its parent comes to this process, which ends it too.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from types import TracebackType

import psutil

from launch.placement.placement import Process
from launch.processes.child import end_group, signal_group, start_guarded
from launch.processes.logs import cause_of_end, open_log
from launch.processes.supervise import TICK_S, Ended, NodeLost

GRACE_S = 6.0  # between SIGTERM and SIGKILL
PR_SET_CHILD_SUBREAPER = 36


@dataclass(slots=True)
class _Running:
    process: Process
    popen: subprocess.Popen[bytes]
    kill_s: float = float("inf")  # when it is killed if it still runs


class LocalHost:
    """This machine."""

    def __init__(self, log_dir: Path, *, grace_s: float = GRACE_S) -> None:
        self._log_dir, self._grace_s = log_dir, grace_s
        self._running: dict[str, _Running] = {}
        self._not_ours: set[int] = set()
        self._next_reap_s = 0.0

    def __enter__(self) -> "LocalHost":
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._not_ours = {child.pid for child in psutil.Process().children()}
        _adopt_orphans()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end_all(lambda: False)

    def start(self, process: Process) -> None:
        with open_log(self._log(process), process.argv) as log:
            popen = start_guarded(process.argv, process.env, output=log.fileno())
        self._running[process.name] = _Running(process=process, popen=popen)

    def stop(self, name: str, *, at_once: bool) -> None:
        if (running := self._running.get(name)) is None:
            return
        signal_group(running.popen.pid, signal.SIGKILL if at_once else signal.SIGTERM)
        running.kill_s = time.monotonic() + self._grace_s

    def tell_to_save(self, name: str) -> None:
        """Workers of torchrun have sessions of their own, so each process of the tree is told; the guard made the others deaf."""
        if (running := self._running.get(name)) is None:
            return
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(running.popen.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGUSR1)

    def events(self) -> Sequence[Ended | NodeLost]:
        now = time.monotonic()
        ended: list[Ended | NodeLost] = []
        for name, running in list(self._running.items()):
            code = running.popen.poll()
            if code is None:
                if now > running.kill_s:
                    signal_group(running.popen.pid, signal.SIGKILL)
                continue
            signal_group(running.popen.pid, signal.SIGKILL)  # what it left in its group
            del self._running[name]
            ended.append(Ended(name=name, cause=cause_of_end(name, code, self._log(running.process))))
        self._reap_adopted()
        return ended

    def heard_s(self) -> float:
        return time.monotonic()

    def left_s(self) -> float:
        return inf

    def end_all(self, hurry: Callable[[], bool]) -> None:
        living = [running.popen for running in self._running.values()]
        for popen in living:
            if popen.poll() is None:
                signal_group(popen.pid, signal.SIGTERM)
        deadline = time.monotonic() + self._grace_s
        while any(popen.poll() is None for popen in living) and time.monotonic() < deadline and not hurry():
            time.sleep(TICK_S / 2)
        for popen in living:
            end_group(popen)
        self._running.clear()
        _end_strays(self._not_ours)

    def _log(self, process: Process) -> Path:
        return self._log_dir / f"{process.name}.log"

    def _reap_adopted(self) -> None:
        """Takes note of the ended orphans that came to this process, once a second."""
        if time.monotonic() < self._next_reap_s:
            return
        self._next_reap_s = time.monotonic() + 1.0
        known = self._not_ours | {running.popen.pid for running in self._running.values()}
        for child in psutil.Process().children():
            if child.pid not in known:
                with suppress(ChildProcessError):
                    os.waitpid(child.pid, os.WNOHANG)


def _adopt_orphans() -> None:
    """Makes this process the new parent of every descendant that loses its own (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _end_strays(not_ours: set[int]) -> None:
    """Ends every descendant that came to be since the start; orphans may come while others end, hence the rounds."""
    for _ in range(20):
        children = [child for child in psutil.Process().children() if child.pid not in not_ours]
        if not children:
            return
        for child in children:
            for stray in [*child.children(recursive=True), child]:
                with suppress(psutil.NoSuchProcess):
                    stray.kill()
        psutil.wait_procs(children, timeout=0.5)
