"""How busy a worker keeps its engine."""

import time
from collections.abc import Callable


class Meter:
    """Sums over what the worker did since it began. A reader takes differences over any interval."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.engine_starts = 0
        self.bad_answers = 0  # answers that no sound engine gives
        self._clock = clock
        self._began_s = self._turned_s = clock()
        self._idle_s = 0.0
        self._in_flight = 0
        self._tokens = 0
        self._request_s = 0.0  # summed over all answered requests
        self._abandoned_s = 0.0  # summed over requests whose engine ended before it answered
        self._abandoned = 0

    def request_began(self) -> float:
        """Returns the time, to be passed to `request_ended`."""
        if self._in_flight == 0:
            self._idle_s += self._clock() - self._turned_s
        self._in_flight += 1
        return self._clock()

    def request_ended(self, began_s: float, tokens: int | None) -> None:
        """tokens: what the request brought; None: the engine ended first, and its tokens are lost."""
        self._in_flight -= 1
        if tokens is None:
            self._abandoned += 1
            self._abandoned_s += self._clock() - began_s
        else:
            self._tokens += tokens
            self._request_s += self._clock() - began_s
        if self._in_flight == 0:
            self._turned_s = self._clock()

    def sums(self) -> dict[str, float]:
        """Idle: no request in flight. A request that waits out a push is in flight.

        Abandoned tokens are an estimate, because engines do not report them: their requests' seconds at the speed of others.
        """
        idle_s = self._idle_s + (self._clock() - self._turned_s if self._in_flight == 0 else 0.0)
        return {
            "up_s": self._clock() - self._began_s,
            "idle_s": idle_s,
            "generated_tokens": self._tokens,
            "in_flight": self._in_flight,
            "abandoned_requests": self._abandoned,
            "abandoned_tokens": round(self._abandoned_s * self._tokens / max(self._request_s, 1e-9)),
            "engine_starts": self.engine_starts,
            "bad_answers": self.bad_answers,
        }
