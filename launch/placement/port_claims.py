"""Ports that a run has taken on this machine: its own from before anything listens on them until it ends.

    with PortClaims() as claims:
        claims.take(range(20_000, 20_034))     False if another run has one of them

A claim is a bound abstract Unix socket (Linux), one for each slot of SLOT_PORTS ports. Such a name belongs to one process of
the network namespace, as a port does, whoever its user is; and the kernel gives it free when that process dies, however it
does. Ports that are only looked at would be found free by two runs that start at the same moment.
"""

import errno
import socket
import sys
from contextlib import ExitStack
from types import TracebackType

from launch.placement.ports import slots

NAME = "\0kestrel-ports-"


class PortClaims:
    """What is taken is given back on leaving; children of this process do not inherit it."""

    def __init__(self) -> None:
        self._taken = ExitStack()

    def __enter__(self) -> "PortClaims":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._taken.close()

    def take(self, ports: range) -> bool:
        """All of them, or nothing and False."""
        if sys.platform != "linux":
            return True
        with ExitStack() as taken:
            for slot in slots(ports):
                claim = taken.enter_context(socket.socket(socket.AF_UNIX))
                try:
                    claim.bind(f"{NAME}{slot}")
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:
                        raise
                    return False
            self._taken.push(taken.pop_all())
        return True
