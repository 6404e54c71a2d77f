"""A port for a test."""

import socket


def free_port() -> int:
    """One of this machine's that nobody listens on at the moment; whoever takes it should do so soon."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
