"""Keeps a design note current: every console block in it is what its command prints now.

    python -m launch.plan.note docs/kestrel_256.md            runs the commands of `launch.plan` and rewrites their blocks
    python -m launch.plan.note docs/kestrel_256.md --all      those of other modules too, which may take minutes
    python -m launch.plan.note docs/kestrel_256.md --check    changes nothing; exit code 1 if a block is out of date

A block is fenced as `console`, its first line is `$ python -m module arguments`. `stray_numbers` finds what the prose says and
no block of its section does.
"""

import re
import shlex
import subprocess
import sys
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


def renewed(note: str, wanted: Callable[[str], bool] = lambda module: module == OURS) -> str:
    """The note with the blocks of the wanted modules made anew."""

    def block(found: re.Match[str]) -> str:
        module, arguments = found[1], found[2]
        if not wanted(module):
            return found[0]
        command = f"python -m {module} {arguments}".rstrip()
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
    path = Path(sys.argv[1])
    before = path.read_text()
    after = renewed(before, (lambda module: True) if "--all" in sys.argv else (lambda module: module == OURS))
    for stray in stray_numbers(after):
        print(f"{path}: no command beside it prints {stray}")
    if "--check" not in sys.argv:
        path.write_text(after)
        return 0
    if before != after:
        print(f"{path}: out of date; python -m launch.plan.note {path}")
    return int(before != after or bool(stray_numbers(after)))


if __name__ == "__main__":
    sys.exit(main())
