"""The terminal, file or pipe to which a run prints. It may be full or closed while the run goes on.

Text that cannot be written is dropped. It must not stay in Python's buffer either, or Python would fail on it when it exits.
"""

import os
from io import TextIOWrapper
from typing import TextIO


class Screen:
    def __init__(self, out: TextIO | None) -> None:
        """None: `sys.stdout` when it was closed."""
        self._out = out
        if isinstance(out, TextIOWrapper):
            out.reconfigure(errors="backslashreplace")  # for a path with letters that the terminal's encoding lacks

    def say(self, text: str) -> None:
        print(text, file=self, flush=True)

    def write(self, text: str) -> int:
        if self._out is not None:
            try:
                self._out.write(text)
            except OSError:
                _drop_buffer(self._out)
        return len(text)

    def flush(self) -> None:
        if self._out is not None:
            try:
                self._out.flush()
            except OSError:
                _drop_buffer(self._out)

    def columns(self) -> int:
        """The width of the terminal; 0 if this is no terminal."""
        if self._out is None or not self._out.isatty():
            return 0
        try:
            return os.get_terminal_size(self._out.fileno()).columns or 80
        except OSError:
            return 80


def _drop_buffer(out: TextIO) -> None:
    """Empties the buffer by writing it to /dev/null."""
    there = os.dup(out.fileno())
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, out.fileno())
    out.flush()
    os.dup2(there, out.fileno())
    os.close(null)
    os.close(there)
