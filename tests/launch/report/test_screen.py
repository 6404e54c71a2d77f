import os
import pty
import termios
from collections.abc import Callable
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from typing import TextIO

import pytest

from launch.report.progress import Progress
from launch.report.screen import Screen

TEXT = "x" * 10_000


def full() -> TextIO:
    return Path("/dev/full").open("w")


def unread() -> TextIO:
    read_end, write_end = os.pipe()
    os.close(read_end)
    return os.fdopen(write_end, "w")


def hung_up() -> TextIO:
    ours, theirs = pty.openpty()
    os.close(ours)
    return os.fdopen(theirs, "w")


@pytest.mark.parametrize("make", [full, unread, hung_up])
def test_text_that_cannot_be_written_is_dropped(make: Callable[[], TextIO]) -> None:
    with make() as out:
        shown = Screen(out)
        for _ in range(3):
            print(TEXT, file=shown, flush=True)
    assert out.closed  # which would have failed if anything had waited to be written


def test_output_goes_on_when_the_disk_has_room_again() -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    with os.fdopen(write_end, "w") as out, os.fdopen(read_end) as read:
        shown = Screen(out)
        for _ in range(20):
            print(TEXT, file=shown, flush=True)
        os.read(read_end, 1 << 20)
        print("there it is", file=shown, flush=True)
        out.close()
        assert read.read().endswith("there it is\n")


def test_letters_that_the_terminal_cannot_show_are_escaped() -> None:
    written = BytesIO()
    out = TextIOWrapper(written, encoding="latin-1")
    print("outputs/Łód …", file=Screen(out), flush=True)
    assert written.getvalue() == b"outputs/\\u0141\xf3d \\u2026\n"


def test_output_that_was_closed_before_the_start_shows_nothing() -> None:
    print(TEXT, file=Screen(None), flush=True)
    assert Screen(None).columns() == 0


def test_status_fits_into_one_line_of_the_terminal(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 20))
    with os.fdopen(theirs, "w") as out:
        Progress(tmp_path, 5, [], Screen(out), resumed=False).tick()
        assert 0 < len(os.read(ours, 1000)) < 20
    os.close(ours)


def test_output_that_is_no_terminal_has_no_columns() -> None:
    assert Screen(StringIO()).columns() == 0
