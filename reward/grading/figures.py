"""What a judge has done, in one line: counts, and CPU and wall time per verdict (p50 / p95 / p99 of the latest verdicts)."""

import threading
from collections import Counter, deque

from rollout.ledger.records import Verdict

KEPT = 10_000


class Figures:
    """Counts of verdicts. Any thread may add to them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._cpu_s: deque[float] = deque(maxlen=KEPT)
        self._wall_s: deque[float] = deque(maxlen=KEPT)

    def add(self, verdict: Verdict) -> None:
        with self._lock:
            self._counts["verdicts"] += 1
            self._counts["passed"] += not verdict.reason
            self._counts["timed out"] += int(verdict.parts.get("timed_out", 0.0))
            self._counts["retries"] += int(verdict.parts.get("retries", 0.0))
            self._cpu_s.append(verdict.cpu_s)
            self._wall_s.append(verdict.wall_s)

    def add_observation(self) -> None:
        self._count("observations")

    def add_restart(self) -> None:
        self._count("restarts")

    def add_refused(self) -> None:
        self._count("refused")

    def add_cancelled(self) -> None:
        self._count("cancelled")

    def add_failed(self) -> None:
        self._count("grader failures")

    def add_lost_sandbox(self) -> None:
        self._count("sandboxes lost")

    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    def line(self) -> str:
        with self._lock:
            counts = ", ".join(f"{count} {name}" for name, count in self._counts.items() if count) or "nothing graded"
            cpu, wall = _percentiles(self._cpu_s), _percentiles(self._wall_s)
        return f"{counts}; CPU {cpu}, wall {wall} (p50/p95/p99)" if self._cpu_s else counts

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1


def _percentiles(values: deque[float]) -> str:
    if not values:
        return "-"
    ordered = sorted(values)
    found = (ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.95, 0.99))
    return "/".join(f"{1000 * value:.1f}" for value in found) + " ms"
