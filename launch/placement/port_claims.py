"""Claims ports on this machine for a run: from before anything listens on them until the run ends.

    with PortClaims() as claims:
        claims.take(range(20_000, 20_034))     False if another run has claimed one of them

A claim is a bound abstract Unix socket (Linux), one for each slot of SLOT_PORTS ports. Such a name belongs to one process of the
network namespace, as a port does, whoever its user is. The kernel releases it when the process dies. Two runs that start at the
same moment and only test the ports would both find them free.
"""

import errno
import socket
import sys
from contextlib import ExitStack
from types import TracebackType

from launch.placement.ports import slots

NAME = "\0kestrel-ports-"


class PortClaims:
    """Releases all claims when the context is left. Child processes do not inherit them."""

    def __init__(self) -> None:
        self._taken = ExitStack()

    def __enter__(self) -> "PortClaims":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._taken.close()

    def take(self, ports: range) -> bool:
        """Claims all of the ports, or none of them and returns False."""
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
