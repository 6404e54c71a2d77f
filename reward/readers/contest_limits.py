"""The limits of a contest for one test: `time_limit` and `memory_limit`, in the many ways that sets write them.

    time      2 · 2.5 · "2.0 seconds" · "500 ms" · "0.5 - 2.0 seconds" (the larger) · {"seconds": 2, "nanos": 500000000}
    memory    "256.0 megabytes" · 256 (megabytes) · `memory_limit_bytes`: 256000000

A limit that is zero, "None" or unreadable sets no limit, and the run's own limit holds. The run's `cpu_limit_s` holds for the
whole completion in any case.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

LEAST_MEMORY_MB = 64  # Python itself needs some, and contests think of other languages
_SECONDS = {"": 1.0, "s": 1.0, "sec": 1.0, "second": 1.0, "ms": 1e-3, "millisecond": 1e-3}
_MEGABYTES = {
    "": 1.0, "mb": 1.0, "mib": 1.0, "megabyte": 1.0, "gb": 1e3, "gigabyte": 1e3, "kb": 1e-3, "kilobyte": 1e-3,
    "b": 1e-6, "byte": 1e-6,
}  # fmt: skip
_NUMBERS = re.compile(r"\d+(?:\.\d+)?")
_UNIT = re.compile(r"[a-z]+")


def contest_limits(*rows: Mapping[str, Any]) -> dict[str, float]:
    """The limits as fields of a task, without those that no row sets. The first row that has a limit decides."""
    found: dict[str, float] = {}
    for row in rows:
        seconds = _amount(row.get("time_limit"), _SECONDS)
        megabytes = _amount(row.get("memory_limit_bytes"), {"": 1e-6}) or _amount(row.get("memory_limit"), _MEGABYTES)
        if seconds:
            found.setdefault("test_cpu_limit_s", seconds)
        if megabytes:
            found.setdefault("memory_limit_mb", max(LEAST_MEMORY_MB, math.ceil(megabytes)))
    return found


def _amount(value: Any, units: Mapping[str, float]) -> float:
    """The amount in seconds or megabytes; 0 if there is none."""
    if isinstance(value, Mapping):
        value = (value.get("seconds") or 0) + (value.get("nanos") or 0) / 1e9
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return 0.0
    text = str(value).lower()
    numbers, words = [float(number) for number in _NUMBERS.findall(text)], _UNIT.findall(text) or [""]
    factor = units.get(words[-1], units.get(words[-1].removesuffix("s"), 0.0))
    amount = max(numbers, default=0.0) * factor
    return amount if math.isfinite(amount) else 0.0
