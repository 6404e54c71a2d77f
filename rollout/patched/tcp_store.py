"""Makes torch's TCPStore listen at its host's address only.

Cause: a TCPStore asks for no key, and it listens on every interface, whatever host it is given. Whoever reaches the port can fill
its memory or change what ranks tell one another. Torch has no setting for this; it does take a socket that listens already.

Remove when: TCPStore listens at the host that it is given.
"""

import errno
import socket
from typing import Any

from torch.distributed import TCPStore

BACKLOG = 4096
_initialise = TCPStore.__init__


def _bound(
    self: TCPStore, host_name: str, port: int, world_size: int | None = None, is_master: bool = False, *rest: Any, **options: Any
) -> None:
    if is_master and options.get("master_listen_fd") is None:
        options["master_listen_fd"] = listen(host_name, port)
    _initialise(self, host_name, port, world_size, is_master, *rest, **options)


def listen(host: str, port: int) -> int | None:
    """The descriptor of a listening socket; None if the port is taken, as by a store that this process can share."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return None
            raise
        listener.listen(BACKLOG)
        return listener.detach()


def listen_at_the_host_only() -> None:
    """Applies to every store that this process creates from now on."""
    TCPStore.__init__ = _bound  # type: ignore[method-assign]
