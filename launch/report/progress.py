"""What a run shows while it lives: what happens before the first step, one line per step, failures and restarts.

The steps come from `metrics.jsonl`, which is read as it grows. On a terminal the last line is a live status; elsewhere there are
plain lines only. Whatever is wrong with what is read here, the run goes on.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.compose.run_folder import LOGS, METRICS
from launch.placement.placement import ProcessSpec
from launch.report.log_messages import LogMessages
from launch.report.metrics_file import Metrics, MetricsFile
from launch.report.screen import Screen
from launch.report.startup import EvaluationCount, FirstTokens, Listening

HEADER_EVERY = 20
PROBE_S = 1.0
QUIET_S = 30.0  # where there is no live status, a line of status is shown this often


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


class Progress:
    def __init__(
        self,
        run_dir: Path,
        steps: int,
        processes: Sequence[ProcessSpec],
        screen: Screen,
        *,
        resumed: bool,
        queue_status: Callable[[], Mapping[str, Any]] = lambda: {"ledger": {"evals": {}}},
    ) -> None:
        self._metrics = MetricsFile(run_dir / METRICS, from_start=not resumed, warn=self.say)
        self._steps = steps
        self._screen = screen
        engines = {name: (p.address, port) for p in processes for name, port in p.ports.items() if name.startswith("engine-")}
        self._starting = list(engines)
        self._listening = Listening(engines)
        self._first_tokens: FirstTokens | None = FirstTokens(run_dir / LOGS)
        self._messages = LogMessages(run_dir / LOGS)
        self._evaluation = EvaluationCount(queue_status)
        self._started_s = self._last_line_s = time.monotonic()
        self._next_probe_s = 0.0
        self._rows = 0
        self._last_step: Metrics | None = None
        self._live = ""

    def say(self, text: str) -> None:
        """Prints a line that stays."""
        self._clear_live()
        self._screen.say(text)
        self._last_line_s = time.monotonic()

    def tick(self) -> None:
        for line in self._metrics.new_lines():
            self._show(line)
        if time.monotonic() >= self._next_probe_s:
            self._next_probe_s = time.monotonic() + PROBE_S
            for message in self._messages.new():
                self.say(message)
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
        if columns := self._screen.columns():
            self._clear_live()
            self._live = text[: columns - 1]  # if the line wrapped, only its last part could be cleared
            print(self._live, end="", file=self._screen, flush=True)
        elif time.monotonic() - self._last_line_s > QUIET_S:
            self.say(text)

    def _status(self) -> str:
        elapsed = f"  {self._elapsed_s():.0f} s:"
        if self._last_step is None:
            if self._starting:
                return f"{elapsed} starting {', '.join(self._starting)}"
            return f"{elapsed} {self._evaluation.text() or 'first push, evaluation and batch'}"
        done = int(self._last_step["step"])
        if done >= self._steps:
            return f"{elapsed} {self._evaluation.text() or 'last push, evaluation and checkpoint'}"
        step_s = self._last_step.get("time/step_s")
        left = f", about {(self._steps - done) * step_s:.0f} s to go" if step_s else ""
        return f"{elapsed} step {done + 1} since {time.monotonic() - self._last_line_s:.0f} s{left}"

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def _clear_live(self) -> None:
        if self._live:
            print(f"\r{' ' * len(self._live)}\r", end="", file=self._screen)
            self._live = ""
