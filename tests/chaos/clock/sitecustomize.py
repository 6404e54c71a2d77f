"""A wall clock that jumps: with this folder on PYTHONPATH, the seconds in the file $CHAOS_CLOCK are added to every reading."""

import os
import time

_path = os.environ.get("CHAOS_CLOCK", "")
_true_time = time.time


def _time() -> float:
    try:
        with open(_path) as file:
            return _true_time() + float(file.read() or 0.0)
    except OSError:
        return _true_time()


if _path:
    time.time = _time
    time.time_ns = lambda: int(_time() * 1e9)
