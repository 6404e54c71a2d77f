"""Keeps a design note current: every console block in it is what its command prints now.

    python -m tests.docs.design_note docs/kestrel_256.md            runs the commands of `launch.plan` and rewrites their blocks
    python -m tests.docs.design_note docs/kestrel_256.md --all      those of other modules too, which may take minutes
    python -m tests.docs.design_note docs/kestrel_256.md --only systems   those alone whose command holds this word
    python -m tests.docs.design_note docs/kestrel_256.md --check    changes nothing; exit code 1 if a block is out of date

A block is fenced as `console`, its first line is `$ python -m module arguments`. `stray_numbers` finds what the prose says and
no block of its section does.
"""

import re
import shlex
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from functools import cache
from pathlib import Path

from launch.plan.__main__ import run

BLOCK = re.compile(r"^```console\n\$ python -m (\S+) ?([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECTION = re.compile(r"^(?=## )", re.MULTILINE)
NUMBER = re.compile(r"(?<![\w.,])\d+(?:,\d{3})*(?:\.\d+)?(?!\w)")
FORMATS = re.compile(r"\b(?:fp|bf)\d+\b")
LIST_MARK = re.compile(r"^\s*\d+\. ", re.MULTILINE)
LINK = re.compile(r"\]\([^)]*\)")
OURS = "launch.plan"
TIMEOUT_S = 900.0


@cache
def output_of(module: str, arguments: str) -> str:
    """What the command prints."""
    if module == OURS:
        return run(shlex.split(arguments))
    command = [sys.executable, "-m", module, *shlex.split(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    return done.stdout.rstrip("\n")


def renewed(note: str, wanted: Callable[[str], bool] = lambda command: f"-m {OURS} " in command) -> str:
    """The note with the blocks of the wanted commands made anew."""

    def block(found: re.Match[str]) -> str:
        module, arguments = found[1], found[2]
        command = f"python -m {module} {arguments}".rstrip()
        if not wanted(command):
            return found[0]
        return f"```console\n$ {command}\n{output_of(module, arguments)}\n```"

    return BLOCK.sub(block, note)


def stray_numbers(note: str) -> list[str]:
    """Numbers of the prose, with their line, that no block of the same section prints."""
    stray = []
    for section in SECTION.split(note):
        said = {number for block in BLOCK.finditer(section) for number in NUMBER.findall(_spaced(block[0]))}
        prose = LINK.sub("]", LIST_MARK.sub("", BLOCK.sub("", section)))
        for line in prose.splitlines():
            stray += [f"{number}: {line.strip()}" for number in NUMBER.findall(_spaced(line)) if number not in said]
    return stray


def _spaced(text: str) -> str:
    """`15.6h` and `TP8` hold numbers too: letters are set apart from them. Number formats are names."""
    text = FORMATS.sub("", text)
    return re.sub(r"(?<=\d)(?=[^\W\d_])|(?<=[^\W\d_])(?=\d)", " ", text)


def main() -> int:
    parser = ArgumentParser(prog="python -m tests.docs.design_note", description="Keeps a design note current.")
    parser.add_argument("path", type=Path)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--all", action="store_true", help="commands of other modules too")
    which.add_argument("--only", metavar="WORD", help="commands that hold this word")
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if out of date")
    asked = parser.parse_args()
    before = asked.path.read_text()
    if asked.only or asked.all:
        after = renewed(before, lambda command: (asked.only or "") in command)
    else:
        after = renewed(before)
    stray = stray_numbers(after)
    for number in stray:
        print(f"{asked.path}: no command beside it prints {number}")
    if not asked.check:
        asked.path.write_text(after)
        return 0
    if before != after:
        print(f"{asked.path}: out of date; python -m tests.docs.design_note {asked.path}")
    return int(before != after or bool(stray))


if __name__ == "__main__":
    sys.exit(main())
