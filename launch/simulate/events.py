"""Simulated time."""

import heapq
from collections.abc import Callable
from typing import Any

Action = Callable[[int, Any], None]


class Events:
    """What is to happen, in order of time. An action gets its number, so that it can tell whether it is out of date."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.over = False
        self._heap: list[tuple[float, int, Action, Any]] = []
        self._count = 0

    def at(self, time_s: float, action: Action, what: Any = None) -> int:
        self._count += 1
        heapq.heappush(self._heap, (time_s, self._count, action, what))
        return self._count

    def after(self, delay_s: float, action: Action, what: Any = None) -> int:
        return self.at(self.now_s + delay_s, action, what)

    def run(self) -> bool:
        """Until somebody says that it is over; False if nothing is left to happen before."""
        heap = self._heap
        while heap and not self.over:
            self.now_s, number, action, what = heapq.heappop(heap)
            action(number, what)
        return self.over
