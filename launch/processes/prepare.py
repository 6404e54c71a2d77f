"""Makes the model and the problems that `model.prepare` asks for, once. They are cached under cache/.

Each of them is made by a script of the project in a temporary folder, which is renamed when it is complete. The folder holds a
hash of its recipe (the command, the script, and the inputs), so that it is made again when the recipe changes.
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

from launch.processes.child import kill_group, start_guarded
from launch.processes.lock import locked

CACHE = Path("cache")
HASH_FILE = ".made_from"
PROJECT = Path(__file__).resolve().parents[2]
ERROR_LINES = 15  # this many last lines of a failed script are shown
IDLE_THREADS = "passive"  # a thread that waits for another sleeps: spinning makes a busy machine several times slower
PATIENCE_S = 3600.0  # how long to wait for another launch that makes the same folder


class PrepareError(RuntimeError):
    """The script that makes a model or problems has failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A folder under cache/ and the script that makes it: `python -m MODULE ARGUMENTS --out FOLDER`."""

    target: Path  # below cache/
    what: str
    module: str
    arguments: tuple[str, ...] = ()
    out_file: str = ""  # a file in the folder, for --out; "": the folder itself
    needs: str = ""  # the target of an earlier recipe, for --data
    project: Path = PROJECT  # the folder of the module


DEBUG = (
    Recipe(target=Path("debug/data"), what="generated problems", module="reward.generated.code_problems"),
    Recipe(
        target=Path("debug/model"),
        what="the debug model, warm-started (its lines say how long this machine needs)",
        module="trainer.prepare.warm_start",
        needs="debug/data",
    ),
)
STUDENT = Recipe(target=Path("debug/student"), what="an untrained model", module="trainer.prepare.untrained", needs="debug/model")
RECIPES: dict[str, Sequence[Recipe]] = {  # by model.prepare
    "": (),
    "debug": DEBUG,
    "debug_student": (*DEBUG, STUDENT),
    "debug_math": (
        Recipe(target=Path("debug_math/data"), what="generated word problems", module="reward.generated.word_problems"),
        Recipe(
            target=Path("debug_math/model"),
            what="the debug model for word problems, warm-started",
            module="trainer.prepare.warm_start",
            needs="debug_math/data",
        ),
    ),
    "smollm2": (
        Recipe(target=Path("smollm2/model"), what="SmolLM2-135M-Instruct", module="trainer.prepare.import_gguf"),
        Recipe(
            target=Path("smollm2/humaneval"),
            what="HumanEval",
            module="reward.check.convert",
            arguments=("humaneval",),
            out_file="problems.jsonl",
        ),
        Recipe(
            target=Path("smollm2/mbpp"),
            what="MBPP",
            module="reward.check.convert",
            arguments=("mbpp",),
            out_file="problems.jsonl",
        ),
    ),
}


def prepare(recipes: Sequence[Recipe], say: Callable[[str], None], cache: Path = CACHE) -> None:
    """Makes each folder that is missing or out of date, in order. Raises PrepareError, ConfigError."""
    if all(_is_current(recipe, cache) for recipe in recipes):
        return
    # A second launch waits until the folders are there.
    holder = f"another launch that prepares {cache}"
    refusal = f"another launch has been preparing {cache} for {PATIENCE_S:.0f} s: end it, and launch again"
    with locked(cache, holder=holder, refusal=refusal, patience_s=PATIENCE_S, say=say):
        for recipe in recipes:
            if not _is_current(recipe, cache):
                _make(recipe, cache, say)


def will_make(recipes: Sequence[Recipe], path: str, cache: Path = CACHE) -> bool:
    """Whether the file or folder is not there yet and one of the recipes makes it."""
    targets = [cache / recipe.target for recipe in recipes]
    return any(Path(path).is_relative_to(target) and not target.exists() for target in targets)


def _is_current(recipe: Recipe, cache: Path) -> bool:
    record = cache / recipe.target / HASH_FILE
    return record.is_file() and record.read_text() == _hash(recipe, cache)


def _hash(recipe: Recipe, cache: Path) -> str:
    script = recipe.project / recipe.module.replace(".", "/")
    digest = hashlib.sha256(json.dumps([recipe.module, recipe.arguments]).encode())
    for path in sorted(script.rglob("*.py")) if script.is_dir() else [script.with_suffix(".py")]:
        digest.update(path.read_bytes() if path.is_file() else b"")
    if recipe.needs:
        record = cache / recipe.needs / HASH_FILE
        digest.update(record.read_bytes() if record.is_file() else b"")
    return digest.hexdigest()


def _make(recipe: Recipe, cache: Path, say: Callable[[str], None]) -> None:
    target = cache / recipe.target
    unfinished = target.with_name(f".{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    out = unfinished
    if recipe.out_file:
        unfinished.mkdir()
        out = unfinished / recipe.out_file
    data = ("--data", str(cache / recipe.needs)) if recipe.needs else ()
    started = time.monotonic()
    say(f"preparing {target}: {recipe.what}, made once")
    try:
        _run([sys.executable, "-m", recipe.module, *recipe.arguments, *data, "--out", str(out)], say)
    except KeyboardInterrupt:
        say(f"interrupted: the next launch makes {target} again")
        raise
    (unfinished / HASH_FILE).write_text(_hash(recipe, cache))
    if target.exists():
        shutil.rmtree(target)
    unfinished.rename(target)
    say(f"prepared {target} in {time.monotonic() - started:.0f} s")


def _run(argv: list[str], say: Callable[[str], None]) -> None:
    """Runs a script and repeats its output line by line."""
    read_end, write_end = os.pipe()
    try:
        script = start_guarded(argv, {"PYTHONUNBUFFERED": "1", "OMP_WAIT_POLICY": IDLE_THREADS}, output=write_end)
    finally:
        os.close(write_end)
    lines: list[str] = []
    try:
        with os.fdopen(read_end, errors="replace") as output:
            for line in output:
                lines.append(line.rstrip())
                say(f"    {line.rstrip()}")
        code = script.wait()
    finally:
        if script.poll() is None:
            kill_group(script)
    if code:
        raise PrepareError(f"`{subprocess.list2cmdline(argv[1:])}` ended with exit code {code}:\n" + _indented(lines))


def _indented(lines: list[str]) -> str:
    return "\n".join(f"    {line}" for line in lines[-ERROR_LINES:])
