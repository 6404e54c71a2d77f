"""How busy a worker keeps its engine."""

import time
from collections.abc import Callable


class Meter:
    """What the worker did since it began, in sums, so that a reader takes differences over any interval."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.engine_starts = 0
        self._clock = clock
        self._began_s = self._turned_s = clock()
        self._idle_s = 0.0
        self._in_flight = 0
        self._tokens = 0

    def request_began(self) -> None:
        if self._in_flight == 0:
            self._idle_s += self._clock() - self._turned_s
        self._in_flight += 1

    def request_ended(self, tokens: int) -> None:
        self._in_flight -= 1
        self._tokens += tokens
        if self._in_flight == 0:
            self._turned_s = self._clock()

    def sums(self) -> dict[str, float]:
        """Idle: no request in flight. A request that waits out a push is in flight."""
        idle_s = self._idle_s + (self._clock() - self._turned_s if self._in_flight == 0 else 0.0)
        return {
            "up_s": self._clock() - self._began_s,
            "idle_s": idle_s,
            "generated_tokens": self._tokens,
            "in_flight": self._in_flight,
            "engine_starts": self.engine_starts,
        }
