"""The processes of one machine: starts them, watches them, starts again what may be, and ends them all.

    with Supervisor(processes, log_dir, restarts, say) as supervisor:
        supervisor.run(tick)

Rules: the run is complete when every trainer has ended with 0; the others are then told to leave by the queue, and are
waited for. A trainer that ends otherwise ends the run. A restartable process that ends early is started again, with a
small back-off, unless it cannot start at all (exit code 2, or three failures soon after its start).

Nothing is left behind: each process has a session of its own and is ended by its process group; the guard (guard.py)
ties it to this process; and what has lost its parent comes to this process, which ends it too. Signals (Ctrl-C,
SIGTERM, SIGHUP) only set a flag, looked at ten times a second, so that no line here can be cut in two; a second one
ends everything at once.
"""

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

import psutil

from launch.guard import PARENT_VARIABLE
from launch.placement import GUARD, Process, Restart

TICK_S = 0.1
GRACE_S = 6.0  # between SIGTERM and SIGKILL
CLOSING_S = 30.0  # for the others to leave by themselves when the trainer is done
BACK_OFF_S = (0.5, 1.0, 2.0, 4.0, 8.0)
CANNOT_START = 2  # exit code of a process that was started wrongly: starting it again cannot help
EARLY_S = 30.0
EARLY_FAILURES = 3
TAIL_LINES = 25
START_MARK = "--- started "
PR_SET_CHILD_SUBREAPER = 36
TORCHRUN_VERDICT = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)")
"""torchrun itself ends with 1 whatever its worker did; this line of its log, in front of its own report, says more."""


class RunFailed(Exception):
    """The run cannot go on; the message says which process, why, and what its log says."""


class Interrupted(KeyboardInterrupt):
    """A signal asked for the end: of a whole sweep too."""


@dataclass(slots=True)
class _Running:
    process: Process
    log: Path
    popen: subprocess.Popen[bytes] | None = None  # None: not running
    started_s: float = 0.0
    start_again_s: float | None = None
    restarts: int = 0
    early_failures: int = 0


class Supervisor:
    def __init__(
        self,
        processes: Sequence[Process],
        log_dir: Path,
        restarts: int,
        say: Callable[[str], None],
        *,
        grace_s: float = GRACE_S,
        closing_s: float = CLOSING_S,
    ) -> None:
        self._all = [_Running(process=p, log=log_dir / f"{p.name}.log") for p in processes]
        self._log_dir = log_dir
        self._restarts = restarts
        self._say = say
        self._grace_s, self._closing_s = grace_s, closing_s
        self._signals: list[int] = []
        self._old_handlers: dict[int, object] = {}
        self._not_ours: set[int] = set()
        self._next_reap_s = 0.0

    def __enter__(self) -> "Supervisor":
        self._not_ours = {child.pid for child in psutil.Process().children()}
        _adopt_orphans()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # started under nohup
            self._old_handlers[number] = signal.signal(number, self._note_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._end()
        finally:
            for number, handler in self._old_handlers.items():
                signal.signal(number, handler)  # type: ignore[arg-type]

    def run(self, tick: Callable[[], None] = lambda: None) -> None:
        """Starts everything and returns when the run is complete. Raises RunFailed, Interrupted."""
        self._log_dir.mkdir(parents=True, exist_ok=True)
        for running in self._all:
            self._start(running)
        while not self._trainers_are_done():
            self._check_signals()
            for running in self._all:
                self._watch(running)
            self._reap_adopted()
            tick()
            time.sleep(TICK_S)
        self._wait_for_leaving(tick)

    def _trainers_are_done(self) -> bool:
        trainers = [r for r in self._all if r.process.role == "trainer"]
        for running in trainers:
            code = running.popen.poll() if running.popen else None
            if code:
                raise RunFailed(_obituary(running, _cause(running, code)))
        return all(r.popen is not None and r.popen.returncode == 0 for r in trainers)

    def _watch(self, running: _Running) -> None:
        if running.popen is None:
            if running.start_again_s is not None and time.monotonic() >= running.start_again_s:
                self._start(running)
            return
        code = running.popen.poll()
        if code is None or running.process.role == "trainer":
            return
        _signal_group(running.popen.pid, signal.SIGKILL)
        running.popen = None
        if code == 0 and running.process.restart is Restart.ON_FAILURE:
            return
        self._plan_restart(running, _cause(running, code))

    def _plan_restart(self, running: _Running, cause: "_Cause") -> None:
        """A kill is no sign that a process cannot start; a failure soon after the start is."""
        early = cause.code > 0 and time.monotonic() - running.started_s < EARLY_S
        running.early_failures = running.early_failures + 1 if early else 0
        if cause.code == CANNOT_START or not running.process.restartable or running.early_failures >= EARLY_FAILURES:
            raise RunFailed(_obituary(running, cause))
        if running.restarts >= self._restarts:
            used_up = f"after {running.restarts} restarts (cluster.worker_restarts)"
            raise RunFailed(f"{used_up}: {_obituary(running, cause)}")
        back_off_s = BACK_OFF_S[min(running.restarts, len(BACK_OFF_S) - 1)]
        running.start_again_s = time.monotonic() + back_off_s
        running.restarts += 1
        self._say(
            f"{running.process.name}{cause}; started again in {back_off_s:g} s ({running.restarts} of {self._restarts} restarts)"
        )

    def _start(self, running: _Running) -> None:
        process = running.process
        with running.log.open("ab") as log:
            log.write(f"{START_MARK}{time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(process.argv)}\n".encode())
            log.flush()
            running.popen = start_guarded(process.argv, process.env, output=log.fileno())
        running.started_s, running.start_again_s = time.monotonic(), None

    def _wait_for_leaving(self, tick: Callable[[], None]) -> None:
        """Workers and judges leave when the queue says that it closes; the queue has nobody to wait for then."""
        deadline = time.monotonic() + self._closing_s
        leaving = [r for r in self._all if r.process.role not in ("trainer", "queue")]
        while any(r.popen is not None and r.popen.poll() is None for r in leaving):
            self._check_signals()
            tick()
            if time.monotonic() > deadline:
                names = ", ".join(r.process.name for r in leaving if r.popen is not None and r.popen.poll() is None)
                self._say(f"{names} did not leave within {self._closing_s:g} s and will be ended")
                return
            time.sleep(TICK_S)
        tick()

    def _end(self) -> None:
        living = [r.popen for r in self._all if r.popen is not None]
        for popen in living:
            if popen.poll() is None:
                _signal_group(popen.pid, signal.SIGTERM)
        heard = len(self._signals)
        deadline = time.monotonic() + self._grace_s
        while any(popen.poll() is None for popen in living) and time.monotonic() < deadline:
            if len(self._signals) > heard:
                break
            time.sleep(TICK_S / 2)
        for popen in living:
            end_group(popen)
        _end_strays(self._not_ours)

    def _reap_adopted(self) -> None:
        """Takes note of the ended orphans that came to this process, once a second."""
        if time.monotonic() < self._next_reap_s:
            return
        self._next_reap_s = time.monotonic() + 1.0
        known = self._not_ours | {r.popen.pid for r in self._all if r.popen is not None}
        for child in psutil.Process().children():
            if child.pid not in known:
                with suppress(ChildProcessError):
                    os.waitpid(child.pid, os.WNOHANG)

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _check_signals(self) -> None:
        if self._signals:
            raise Interrupted(signal.Signals(self._signals[0]).name)


def start_guarded(argv: Sequence[str], env: Mapping[str, str], output: int) -> subprocess.Popen[bytes]:
    """Starts a command in a session of its own, tied to this process by the guard."""
    return subprocess.Popen(
        [sys.executable, "-S", str(GUARD), *argv],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**os.environ, **env, PARENT_VARIABLE: str(os.getpid())},
        start_new_session=True,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cause:
    """How a process, or the torchrun worker that took it down, ended."""

    code: int
    worker: str = ""

    def __str__(self) -> str:
        where = f" (worker {self.worker})" if self.worker else ""
        if self.code < 0:
            return f"{where} was killed by {signal.Signals(-self.code).name}"
        return f"{where} ended with exit code {self.code}"


def _cause(running: _Running, code: int) -> _Cause:
    verdicts = TORCHRUN_VERDICT.findall("\n".join(last_lines(running.log, 200)))
    if code == 1 and verdicts:
        return _Cause(code=int(verdicts[-1][0]), worker=verdicts[-1][1])
    return _Cause(code=code)


def _obituary(running: _Running, cause: _Cause) -> str:
    """Who died, how, and its last words: what torchrun reports after a worker's end is left out."""
    lines = last_lines(running.log, 200)
    verdicts = [n for n, line in enumerate(lines) if TORCHRUN_VERDICT.search(line)]
    if verdicts:
        lines = [line for line in lines[: verdicts[0]] if "closing signal SIGTERM" not in line]
    words = "\n".join(f"    {line}" for line in lines[-TAIL_LINES:])
    return f"{running.process.name}{cause}. The end of {running.log}:\n{words}"


def last_lines(log: Path, count: int) -> list[str]:
    """The last lines of a log, from the last start of its process on."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 256 * 1024))
        lines = file.read().decode(errors="replace").splitlines()
    starts = [n for n, line in enumerate(lines) if line.startswith(START_MARK)]
    return lines[starts[-1] + 1 if starts else 0 :][-count:]


def end_group(popen: subprocess.Popen[bytes]) -> None:
    """Ends a process that `start_guarded` started, and what it started, at once."""
    _signal_group(popen.pid, signal.SIGKILL)
    popen.wait()


def _signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


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
