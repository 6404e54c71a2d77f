"""Where a run shows itself: a terminal, a file or a pipe, which may be full or gone while the run goes on.

What could not be written is dropped. It does not wait in Python's buffer either, which would fail again when Python ends.
"""

import os
from io import TextIOWrapper
from typing import TextIO


class Shown:
    def __init__(self, out: TextIO | None) -> None:
        """None: as `sys.stdout` is where it was closed."""
        self._out = out
        if isinstance(out, TextIOWrapper):
            out.reconfigure(errors="backslashreplace")  # of a path that the terminal's encoding lacks letters for

    def write(self, text: str) -> int:
        if self._out is not None:
            try:
                self._out.write(text)
            except OSError:
                _forget(self._out)
        return len(text)

    def flush(self) -> None:
        if self._out is not None:
            try:
                self._out.flush()
            except OSError:
                _forget(self._out)

    def columns(self) -> int:
        """Of the terminal; 0 if it is none."""
        if self._out is None or not self._out.isatty():
            return 0
        try:
            return os.get_terminal_size(self._out.fileno()).columns or 80
        except OSError:
            return 80


def _forget(out: TextIO) -> None:
    """Empties its buffer to where everything may be written."""
    there = os.dup(out.fileno())
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, out.fileno())
    out.flush()
    os.dup2(there, out.fileno())
    os.close(nowhere)
    os.close(there)
