"""Makes the model and the problems that `model.prepare` asks for, once: they are cached under cache/.

Each thing is made by a script of the project, into a temporary folder that is renamed when it is whole; in it lies
the hash of what made it (its command, its script, what it was made from), so that it is made again when that changes.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.processes.child import end_group, start_guarded
from launch.processes.lock import locked

CACHE = Path("cache")
HASH_FILE = ".made_from"
PROJECT = Path(__file__).resolve().parents[2]
SAID_LINES = 15  # of a script that failed
PATIENCE_S = 3600.0  # for another launch that makes the same


class PrepareError(RuntimeError):
    """A script that should have made a model or problems failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """One folder under cache/ and the script that makes it: `python -m MODULE ARGUMENTS --out FOLDER`."""

    target: Path  # under the cache
    what: str
    module: str
    arguments: tuple[str, ...] = ()
    out_file: str = ""  # "": --out is the folder itself
    needs: str = ""  # target of an earlier recipe: given as --data
    project: Path = PROJECT  # where the module lies


RECIPES: dict[str, Sequence[Made]] = {  # by model.prepare
    "": (),
    "debug": (
        Made(target=Path("debug/data"), what="generated problems", module="reward.generated"),
        Made(
            target=Path("debug/model"),
            what="the debug model, warm-started (about 2 minutes on two idle cores)",
            module="trainer.prepare.warm_start",
            needs="debug/data",
        ),
    ),
    "smollm2": (
        Made(target=Path("smollm2/model"), what="SmolLM2-135M-Instruct", module="trainer.prepare.import_gguf"),
        Made(
            target=Path("smollm2/humaneval"),
            what="HumanEval",
            module="reward.readers",
            arguments=("humaneval",),
            out_file="problems.jsonl",
        ),
        Made(
            target=Path("smollm2/mbpp"),
            what="MBPP",
            module="reward.readers",
            arguments=("mbpp",),
            out_file="problems.jsonl",
        ),
    ),
}


def prepare(recipes: Sequence[Made], say: Callable[[str], None], cache: Path = CACHE) -> None:
    """Makes what is missing or out of date, in order. Raises PrepareError, ConfigError."""
    if all(_is_current(made, cache) for made in recipes):
        return
    # A second launch waits, and then finds it made.
    other = f"another launch, which prepares {cache}"
    refused = f"another launch has been preparing {cache} for {PATIENCE_S:.0f} s: end it, and launch again"
    with locked(cache, other=other, refused=refused, patience_s=PATIENCE_S, say=say):
        for made in recipes:
            if not _is_current(made, cache):
                _make(made, cache, say)


def makes(recipes: Sequence[Made], path: str, cache: Path = CACHE) -> bool:
    """Whether this file or folder is part of what one of the recipes has yet to make."""
    targets = [cache / made.target for made in recipes]
    return any(Path(path).is_relative_to(target) and not target.exists() for target in targets)


def _is_current(made: Made, cache: Path) -> bool:
    record = cache / made.target / HASH_FILE
    return record.is_file() and record.read_text() == _hash(made, cache)


def _hash(made: Made, cache: Path) -> str:
    script = made.project / made.module.replace(".", "/")
    digest = hashlib.sha256(json.dumps([made.module, made.arguments]).encode())
    for path in sorted(script.rglob("*.py")) if script.is_dir() else [script.with_suffix(".py")]:
        digest.update(path.read_bytes() if path.is_file() else b"")
    if made.needs:
        record = cache / made.needs / HASH_FILE
        digest.update(record.read_bytes() if record.is_file() else b"")
    return digest.hexdigest()


def _make(made: Made, cache: Path, say: Callable[[str], None]) -> None:
    target = cache / made.target
    unfinished = target.with_name(f".{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    out = unfinished
    if made.out_file:
        unfinished.mkdir()
        out = unfinished / made.out_file
    data = ("--data", str(cache / made.needs)) if made.needs else ()
    started = time.monotonic()
    say(f"preparing {target}: {made.what}, made once")
    try:
        _run([sys.executable, "-m", made.module, *made.arguments, *data, "--out", str(out)], say)
    except KeyboardInterrupt:
        say(f"interrupted: the next launch makes {target} anew")
        raise
    (unfinished / HASH_FILE).write_text(_hash(made, cache))
    if target.exists():
        shutil.rmtree(target)
    unfinished.rename(target)
    say(f"prepared {target} in {time.monotonic() - started:.0f} s")


def _run(argv: list[str], say: Callable[[str], None]) -> None:
    """Runs a script, saying its lines as they come."""
    read_end, write_end = os.pipe()
    try:
        script = start_guarded(argv, {"PYTHONUNBUFFERED": "1"}, output=write_end)
    finally:
        os.close(write_end)
    said: list[str] = []
    try:
        with os.fdopen(read_end, errors="replace") as output:
            for line in output:
                said.append(line.rstrip())
                say(f"    {line.rstrip()}")
        code = script.wait()
    finally:
        if script.poll() is None:
            end_group(script)
    if code:
        raise PrepareError(f"`{subprocess.list2cmdline(argv[1:])}` ended with exit code {code}:\n" + _indented(said))


def _indented(lines: list[str]) -> str:
    return "\n".join(f"    {line}" for line in lines[-SAID_LINES:])
