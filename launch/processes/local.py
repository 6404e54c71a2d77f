"""The backend for one machine: starts the processes, watches them, and ends them all.

Nothing is left behind: each process has a session of its own and is ended by its process group, the guard (rollout/guard.py) ties
it to the launcher, and the launcher adopts and ends every orphan.
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

from launch.placement.placement import ProcessSpec
from launch.processes.child import kill_group, signal_group, start_guarded
from launch.processes.logs import open_log, read_exit
from launch.processes.supervise import TICK_S, Exited, NodeLost

GRACE_S = 6.0  # from SIGTERM to SIGKILL
PR_SET_CHILD_SUBREAPER = 36


@dataclass(slots=True)
class _Running:
    process: ProcessSpec
    popen: subprocess.Popen[bytes]


class LocalBackend:
    """This machine."""

    def __init__(self, log_dir: Path, *, grace_s: float = GRACE_S) -> None:
        self._log_dir, self._grace_s = log_dir, grace_s
        self._running: dict[str, _Running] = {}
        self._earlier_children: set[int] = set()
        self._next_reap_s = 0.0

    def __enter__(self) -> "LocalBackend":
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._earlier_children = {child.pid for child in psutil.Process().children()}
        _adopt_orphans()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end_all(lambda: False)

    def start(self, process: ProcessSpec) -> None:
        with open_log(self._log(process), process.argv) as log:
            popen = start_guarded(process.argv, process.env, output=log.fileno())
        self._running[process.name] = _Running(process=process, popen=popen)

    def stop(self, name: str) -> None:
        if (running := self._running.get(name)) is not None:
            signal_group(running.popen.pid, signal.SIGKILL)

    def request_save(self, name: str) -> None:
        """Signals the whole tree, since torchrun's workers have sessions of their own. The guard blocks it elsewhere."""
        if (running := self._running.get(name)) is None:
            return
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(running.popen.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGUSR1)

    def events(self) -> Sequence[Exited | NodeLost]:
        exited: list[Exited | NodeLost] = []
        for name, running in list(self._running.items()):
            if (code := running.popen.poll()) is None:
                continue
            signal_group(running.popen.pid, signal.SIGKILL)  # its children that are left
            del self._running[name]
            exited.append(Exited(name=name, exit=read_exit(name, code, self._log(running.process))))
        self._reap_orphans()
        return exited

    def heartbeat_s(self) -> float:
        return time.monotonic()

    def time_left_s(self) -> float:
        return inf

    def end_all(self, at_once: Callable[[], bool]) -> None:
        started = [running.popen for running in self._running.values()]
        for popen in started:
            if popen.poll() is None:
                signal_group(popen.pid, signal.SIGTERM)
        deadline = time.monotonic() + self._grace_s
        while any(popen.poll() is None for popen in started) and time.monotonic() < deadline and not at_once():
            time.sleep(TICK_S / 2)
        for popen in started:
            kill_group(popen)
        self._running.clear()
        _kill_orphans(self._earlier_children)

    def _log(self, process: ProcessSpec) -> Path:
        return self._log_dir / f"{process.name}.log"

    def _reap_orphans(self) -> None:
        """Collects the exit codes of adopted orphans once a second, so that they do not stay as zombies."""
        if time.monotonic() < self._next_reap_s:
            return
        self._next_reap_s = time.monotonic() + 1.0
        known = self._earlier_children | {running.popen.pid for running in self._running.values()}
        for child in psutil.Process().children():
            if child.pid not in known:
                with suppress(ChildProcessError):
                    os.waitpid(child.pid, os.WNOHANG)


def _adopt_orphans() -> None:
    """Makes this process the parent of every descendant that loses its own parent (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _kill_orphans(earlier_children: set[int]) -> None:
    """Kills every descendant that was started since then. More orphans may arrive meanwhile, hence the rounds."""
    for _ in range(20):
        children = [child for child in psutil.Process().children() if child.pid not in earlier_children]
        if not children:
            return
        for child in children:
            for orphan in [*child.children(recursive=True), child]:
                with suppress(psutil.NoSuchProcess):
                    orphan.kill()
        psutil.wait_procs(children, timeout=0.5)
