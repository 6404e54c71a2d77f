"""Messages between a judge and the processes that run users' functions: a length, then JSON."""

import json
import socket
import struct
from typing import Any

LENGTH = struct.Struct("<I")
READ_BYTES = 1 << 16
PROGRESS = "progress"  # the message before each call of an environment, whose deadline begins then
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


class Frames:
    """One end of a pair of sockets."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._unread = bytearray()

    def send(self, message: Any) -> None:
        """Raises OSError."""
        body = _encode(message).encode("ascii")
        self._end.sendall(LENGTH.pack(len(body)) + body)

    def receive(self) -> Any:
        """The next message. Raises EOFError where the other end is gone, TimeoutError and other OSErrors."""
        while (message := self._take()) is None:
            data = self._end.recv(READ_BYTES)
            if not data:
                raise EOFError
            self._unread += data
        return message

    def close(self) -> None:
        self._end.close()

    def _take(self) -> Any:
        if len(self._unread) < LENGTH.size:
            return None
        end = LENGTH.size + LENGTH.unpack_from(self._unread)[0]
        if len(self._unread) < end:
            return None
        message = json.loads(self._unread[LENGTH.size : end])
        del self._unread[:end]
        return message
