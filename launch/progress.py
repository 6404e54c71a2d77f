"""What a run shows: what happens before the first step, a line a step, restarts, and where things are at the end.

The source is `metrics.jsonl`, read as it grows, and, for what comes before its first line, whether the engines listen.
On a terminal the last line is a live status; elsewhere there are plain lines only. Whatever is wrong with what it reads,
the run goes on.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from queue import SimpleQueue
from statistics import fmean, median
from typing import Any, TextIO

from launch.placement import Process

Metrics = Mapping[str, Any]  # a line of metrics.jsonl

METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
HEADER_EVERY = 20
PROBE_S = 1.0
CONNECT_S = 0.5
QUIET_S = 30.0  # off a terminal: a sign of life so often
LAST_STEPS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    title: str
    key: str
    form: str
    width: int


COLUMNS = (
    Column(title="reward", key="reward/mean", form=".3f", width=6),
    Column(title="lag", key="lag/max_versions", form=".0f", width=3),
    Column(title="mean", key="lag/mean_versions", form=".2f", width=4),
    Column(title="queue", key="queue/ready_groups", form=".0f", width=5),
    Column(title="tok/s", key="tokens/generated_per_s", form=",.0f", width=6),
    Column(title="trained", key="tokens/trained", form=",.0f", width=8),
    Column(title="step s", key="time/step_s", form=".1f", width=6),
    Column(title="wait", key="time/wait_batch_s", form=".1f", width=5),
    Column(title="logp", key="time/old_logprob_s", form=".1f", width=5),
    Column(title="ref", key="time/ref_logprob_s", form=".1f", width=5),
    Column(title="train", key="time/train_s", form=".1f", width=5),
    Column(title="push", key="time/push_s", form=".1f", width=5),
    Column(title="mismatch", key="mismatch/same_version_abs_logprob", form=".1e", width=8),
    Column(title="eval", key="eval/pass_rate", form=".3f", width=5),
)
STEP_WIDTH = 9


def header() -> str:
    return " ".join([f"{'step':>{STEP_WIDTH}}", *(f"{c.title:>{c.width}}" for c in COLUMNS)])


def row(line: Metrics, steps: int) -> str:
    cells = [f"{line['step']}/{steps}".rjust(STEP_WIDTH)]
    for column in COLUMNS:
        value = line.get(column.key)
        cells.append((f"{value:{column.form}}" if isinstance(value, int | float) else "").rjust(column.width))
    return " ".join(cells).rstrip()


class MetricsFile:
    """The lines of metrics.jsonl, as they come; a line that is still being written waits.

    A trainer that resumes replaces the file, without the steps that it will do again; so a line is new by its time.
    A line that is damaged, by a full disk or two writers, is left out and told to `warn`.
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
        except OSError:  # not there yet, or just being replaced on a shared file system
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


class FirstTokens:
    """Whether an engine has generated: its worker says so in its log, once a start."""

    SAID = b"has its first tokens"

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._read = {path: path.stat().st_size for path in self._logs()}  # what is there is of an earlier life of the run

    def found(self) -> bool:
        for path in self._logs():
            with suppress(OSError), path.open("rb") as log:
                log.seek(self._read.get(path, 0))
                data = log.read()
                if self.SAID in data:
                    return True
                self._read[path] = self._read.get(path, 0) + data.rfind(b"\n") + 1
        return False

    def _logs(self) -> list[Path]:
        return sorted(self._log_dir.glob("worker-*.log"))


class Listening:
    """Which engines listen. Asked in a thread: to look up a name, or to reach a node that is gone, may take long."""

    def __init__(self, engines: Mapping[str, tuple[str, int]]) -> None:
        self._silent = dict(engines)
        self._found: SimpleQueue[str] = SimpleQueue()
        self._round = threading.Thread(target=self._ask)

    def new(self) -> list[str]:
        """Those that were found to listen since the last call; the others are asked again, one round at a time."""
        found = [self._found.get() for _ in range(self._found.qsize())]
        for name in found:
            del self._silent[name]
        if self._silent and not self._round.is_alive() and self._found.empty():
            self._round = threading.Thread(target=self._ask, daemon=True, name="listening")
            self._round.start()
        return found

    def _ask(self) -> None:
        for name, address in list(self._silent.items()):
            with suppress(OSError), socket.create_connection(address, timeout=CONNECT_S):
                self._found.put(name)


class Progress:
    def __init__(self, run_dir: Path, steps: int, processes: Sequence[Process], out: TextIO, *, resumed: bool) -> None:
        self._metrics = MetricsFile(run_dir / METRICS_FILE, from_start=not resumed, warn=self.say)
        self._steps = steps
        self._out = out
        engines = {name: (p.address, port) for p in processes for name, port in p.ports.items() if name.startswith("engine-")}
        self._starting = list(engines)
        self._listening = Listening(engines)
        self._first_tokens: FirstTokens | None = FirstTokens(run_dir / "logs")
        self._started_s = self._last_line_s = time.monotonic()
        self._next_probe_s = 0.0
        self._rows = 0
        self._last_step: Metrics | None = None
        self._live = ""

    def say(self, text: str) -> None:
        """A line that stays."""
        self._clear_live()
        print(text, file=self._out, flush=True)
        self._last_line_s = time.monotonic()

    def tick(self) -> None:
        for line in self._metrics.new_lines():
            self._show(line)
        if time.monotonic() >= self._next_probe_s:
            self._next_probe_s = time.monotonic() + PROBE_S
            self._probe_engines()
            self._probe_first_tokens()
            self._show_status()

    def _show(self, line: Metrics) -> None:
        if self._rows % HEADER_EVERY == 0:
            self.say(header())
        self._rows += 1
        self.say(row(line, self._steps))
        self._last_step = line

    def _probe_engines(self) -> None:
        for name in self._listening.new():
            self._starting.remove(name)
            self.say(f"{name} listens after {self._elapsed_s():.0f} s")

    def _probe_first_tokens(self) -> None:
        if self._first_tokens is not None and self._first_tokens.found():
            self._first_tokens = None
            self.say(f"first tokens after {self._elapsed_s():.0f} s")

    def _show_status(self) -> None:
        text = self._status()
        if self._out.isatty():
            self._clear_live()
            self._live = text
            print(text, end="", file=self._out, flush=True)
        elif time.monotonic() - self._last_line_s > QUIET_S:
            self.say(text)

    def _status(self) -> str:
        elapsed = f"  {self._elapsed_s():.0f} s:"
        if self._last_step is None:
            before = f"starting {', '.join(self._starting)}" if self._starting else "first push, evaluation and batch"
            return f"{elapsed} {before}"
        done = int(self._last_step["step"])
        if done >= self._steps:
            return f"{elapsed} last push, evaluation and checkpoint"
        step_s = self._last_step.get("time/step_s")
        left = f", about {(self._steps - done) * step_s:.0f} s to go" if step_s else ""
        return f"{elapsed} step {done + 1} since {time.monotonic() - self._last_line_s:.0f} s{left}"

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def _clear_live(self) -> None:
        if self._live:
            print(f"\r{' ' * len(self._live)}\r", end="", file=self._out)
            self._live = ""


def read_metrics(run_dir: Path) -> list[Metrics]:
    """The run's lines in order of steps; of a step that was done twice (after a resume) the last one counts."""
    lines: dict[int, dict[str, Any]] = {}
    for line in MetricsFile(run_dir / METRICS_FILE, from_start=True).new_lines():
        lines[line["step"]] = {**lines.get(line["step"], {}), **line}
    return [lines[step] for step in sorted(lines)]


def outcome(lines: Sequence[Metrics]) -> float:
    """One number for a sweep: the last pass rate on the held-out problems, or the mean reward of the last steps.

    What is no number is left out; NaN when nothing is left.
    """
    if passed := [value for value in _values(lines, "eval/pass_rate") if isfinite(value)]:
        return passed[-1]
    rewards = [value for value in _values(lines, "reward/mean") if isfinite(value)]
    return fmean(rewards[-LAST_STEPS:]) if rewards else float("nan")


def summary(run_dir: Path, elapsed_s: float) -> str:
    """What a finished run has to say for itself, and where its things are."""
    lines = read_metrics(run_dir)
    facts = [f"done: {max((int(line['step']) for line in lines), default=0)} steps in {elapsed_s:.0f} s"]
    if passed := _values(lines, "eval/pass_rate"):
        facts.append(f"held-out pass rate  {passed[0]:.3f} -> {passed[-1]:.3f}")
    if rewards := _values(lines, "reward/mean"):
        facts.append(f"reward              {fmean(rewards[:LAST_STEPS]):.3f} -> {fmean(rewards[-LAST_STEPS:]):.3f}")
    if step_s := _values(lines, "time/step_s"):
        facts.append(f"step                {median(step_s):.1f} s (median)")
    if lags := _values(lines, "lag/max_versions"):
        facts.append(f"largest lag         {max(lags):.0f} versions")
    if mismatch := _values(lines, "mismatch/same_version_abs_logprob"):
        facts.append(f"log-prob mismatch   {fmean(mismatch):.1e} (same version, mean)")
    facts += _accounting(run_dir / SUMMARY_FILE)
    facts += places(run_dir)
    return "\n".join(facts)


def _accounting(path: Path) -> list[str]:
    """Where every generated token went, as the queue counted."""
    try:
        counts = _with_key(json.loads(path.read_text()), "trained_tokens")
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        return [f"tokens              not known: {path} cannot be read ({error})"]
    if counts is None:
        return []
    parts = []
    for kind in ("trained", "waiting", "dropped", "lost", "eval"):
        count = counts.get(f"{kind}_tokens", 0)
        parts.append(f"{kind} {sum(count.values()) if isinstance(count, dict) else count:,}")
    return [f"tokens              {', '.join(parts)}"]


def _with_key(value: object, key: str) -> dict[str, Any] | None:
    """The first mapping, however deep, that holds the key."""
    if not isinstance(value, dict):
        return None
    if key in value:
        return value
    return next((found for inner in value.values() if (found := _with_key(inner, key))), None)


def places(run_dir: Path) -> list[str]:
    what = {
        "report.html": "charts of the run",
        "trace.json": "timeline, for ui.perfetto.dev",
        METRICS_FILE: "a line a step",
        SUMMARY_FILE: "token accounting",
        "recoveries.jsonl": "what the run stood still for, and how long",
        "logs": "of every process",
        "checkpoints": "to resume from",
        "hf": "the last weights, Hugging Face format",
        "tensorboard": f"tensorboard --logdir {run_dir / 'tensorboard'}",
    }
    return [f"{run_dir / name!s:<60} {why}" for name, why in what.items() if (run_dir / name).exists()]


def _values(lines: Sequence[Metrics], key: str) -> list[float]:
    return [float(line[key]) for line in lines if line.get(key) is not None]
