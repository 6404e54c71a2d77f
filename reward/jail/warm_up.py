"""Runs every kind of job in the zygote itself a few times, before there are any jobs.

Afterwards everything that a job needs is imported, and Python has specialised the code that every job runs. A job then need not
write to that memory. This matters because each page of the zygote's memory that a job writes to is copied for it, and that is
most of what a short job costs.
"""

import os
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from reward.jail import harness, math_equality

TIMES = 24  # Python specialises what has run some ten times
_CODE = "def f(x):\n    return x * x\n"
_TESTS = "def check(candidate):\n    assert candidate(3) == 9\n    assert candidate(2) == 4\n"
_FUNCTION = {"__ref__": {"n": 0, "classes": [1]}}
_TAKEN: dict[str, Any] = {"names": ["f"], "operators": [], "modules": {}, "library": {}, "in_place": []}
_ASK = {"do": "call", "args": [{"__ref__": 0}, 3], "kwargs": {}}
_PROGRAM = {"setup": "", "trim": False, "entry_point": "f", "code": _CODE}

# kind -> (what the judge sends, what comes over the link)
_EXAMPLES: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "stdio": ([{**_PROGRAM, "code": f"{_CODE}print(f(sum(map(int, input().split()))))\n"}], []),
    "calls": ([{**_PROGRAM, "calls": 3}, *[{"args": [3], "kwargs": {}}] * 3], []),
    "candidate": ([_PROGRAM], [_ASK] * 3),
    "tests": (
        [{**_PROGRAM, **_TAKEN, "units": 1}, {"run": _TESTS, "inline": False, **_TAKEN}],
        [{"f": _FUNCTION}, {"ok": 9, "back": [None]}, {"ok": 4, "back": [None]}],
    ),
}


def run_every_kind(runners: Mapping[str, Callable[[dict[str, Any]], None]]) -> None:
    """Uses file descriptors 0, 1, CHANNEL_FD and LINK_FD, and leaves them open on nothing."""
    if "math_verify" in sys.modules:
        for truth, answer in math_equality.EXAMPLES:
            math_equality.compare(truth, answer)
    modules = dict(sys.modules)
    for _ in range(TIMES):
        for kind, (from_judge, over_link) in _EXAMPLES.items():
            _run(runners[kind], from_judge, over_link)
    sys.modules.clear()
    sys.modules.update(modules)


def _run(runner: Callable[[dict[str, Any]], None], from_judge: list[dict[str, Any]], over_link: list[dict[str, Any]]) -> None:
    others = [_connect(harness.CHANNEL_FD, from_judge), _connect(harness.LINK_FD, over_link)]
    stdin, stdout = os.pipe()
    os.write(stdout, b"3 4\n")
    os.dup2(stdin, 0)
    os.dup2(stdout, 1)
    os.close(stdin)
    os.close(stdout)
    harness.fresh_interpreter()
    with suppress(harness.ChannelClosed):
        runner(harness.read_frame())
    for other in others:
        other.close()


def _connect(fd: int, frames: list[dict[str, Any]]) -> socket.socket:
    ours, theirs = socket.socketpair()
    with theirs:
        os.dup2(theirs.fileno(), fd)
    ours.sendall(b"".join(map(harness.frame, frames)))
    ours.shutdown(socket.SHUT_WR)
    return ours
