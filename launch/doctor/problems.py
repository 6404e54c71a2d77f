"""Checks of the problems and their prompts: readable, gradable, short enough, and held out where they should be."""

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conf.shapes import ModelError, read_shape
from launch.doctor.case import Case, everywhere, existing
from launch.doctor.finding import Check, Finding, failure, ok, skipped, warning
from launch.doctor.model_folder import CONFIG
from reward.task import Defaults, TaskError, defaults_of, read_reward
from rollout.prompts.problems import Problem, ProblemError, read_problem
from rollout.prompts.render import Renderer
from rollout.prompts.sources import HUB

FAST_BYTES = 4 * 1024**2  # a launch reads this much of each file; the queue server reads all of it
MAX_RENDERED = 2000
PARQUET = b"PAR1"  # how every such file begins
TOO_LONG_FRACTION = 0.05
JUDGE_S = 60.0
TINY_JOB = {
    "id": "doctor", "prompt": "Add.", "solution": "def add(a, b):\n    return a + b\n",
    "task": {"kind": "calls", "entry_point": "add", "tests": [{"args": [1, 2], "expected": 3}]},
}  # fmt: skip


@dataclass(slots=True)
class Read:
    """What the files of one setting hold."""

    key: str
    problems: list[Problem] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)  # the reasons, each with file and line


def read_local(key: str, sources: Sequence[str], most_bytes: int | None, defaults: Defaults) -> Read:
    """The problems of JSONL files, and a reason for each line that is refused. Data sets of the hub are left out."""
    found, seen = Read(key), dict[str, str]()
    for source in (s for s in sources if not s.startswith(HUB)):
        if _is_parquet(Path(source)):
            found.refused.append(f"{source} is a Parquet file: save it as JSON lines, or set data.reader")
            continue
        try:
            for where, line in _lines(Path(source), most_bytes):
                try:
                    problem = read_problem(line, where)
                    read_reward(problem.task, defaults=defaults)
                except ProblemError as error:
                    found.refused.append(str(error))
                    continue
                except TaskError as error:
                    found.refused.append(f"{where}: problem {problem.id!r} cannot be graded: {error}")
                    continue
                if problem.id in seen:
                    found.refused.append(f"{where}: id {problem.id!r} was used before, at {seen[problem.id]}")
                    continue
                seen[problem.id] = where
                found.problems.append(problem)
        except OSError as error:
            found.refused.append(f"cannot read the problems {source}: {error.strerror}")
        except UnicodeDecodeError as error:
            found.refused.append(f"{source} is not UTF-8 text: {error}")
    return found


def _is_parquet(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(PARQUET)) == PARQUET
    except OSError:
        return False  # reading the lines says why


def _lines(path: Path, most_bytes: int | None) -> Iterator[tuple[str, str]]:
    read = 0
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            read += len(line)
            if most_bytes is not None and read > most_bytes:
                return
            if line.strip():
                yield f"{path}:{number}", line


def _check_problems(case: Case, most_bytes: int | None) -> Finding:
    counts, later = [], []
    data = case.config.data
    if data.reader:
        return skipped(f"the queue server reads them, with data.reader={data.reader}")
    for key, sources in (("data.train", data.train), ("data.heldout", data.heldout)):
        remote = [source for source in sources if source.startswith(HUB)]
        if remote and importlib.util.find_spec("datasets") is None:
            return failure(f"{key}: {remote[0]} needs the package `datasets`", "pip install datasets, or use a JSONL file")
        made_later = [source for source in sources if case.made_later(source)]
        later += made_later
        if not (local := [source for source in sources if source not in (*remote, *made_later)]):
            continue
        read = read_local(key, local, most_bytes, defaults_of(case.config))
        if read.refused:
            total = len(read.refused) + len(read.problems)
            many = f" ({len(read.refused)} of {total} lines are refused)" if len(read.refused) > 1 else ""
            return failure(f"{key}: {read.refused[0]}{many}", f"mend or remove the line, or name another file in {key}")
        if not read.problems:
            return failure(f"{key}: no problems in {', '.join(local)}", "name files that hold problems, one JSON object per line")
        counts.append(f"{len(read.problems)} of {key}")
    if later:
        return skipped(f"{later[0]} is made at the launch (model.prepare={case.config.model.prepare})")
    return ok(" and ".join(counts) + (" were read" if most_bytes else "")) if counts else skipped("all are remote")


def first_problems(case: Case) -> Finding:
    return _check_problems(case, FAST_BYTES)


def all_problems(case: Case) -> Finding:
    return _check_problems(case, None)


def held_out(case: Case) -> Finding:
    """No held-out problem is trained on. Such a problem would measure memory, not skill."""
    data = case.config.data
    if not data.heldout or data.reader:
        return skipped("no held-out problems" if not data.heldout else f"they are read with data.reader={data.reader}")
    trained = {_question(problem) for problem in read_local("data.train", data.train, None, defaults_of(case.config)).problems}
    kept = read_local("data.heldout", data.heldout, None, defaults_of(case.config)).problems
    if not kept:
        return skipped("none could be read here")
    if both := [problem.id for problem in kept if _question(problem) in trained]:
        return warning(
            f"{len(both)} of {len(kept)} held-out problems are trained on too, {both[0]!r} first", "take them out of data.train"
        )
    return ok(f"none of {len(kept)} is in data.train")


def _question(problem: Problem) -> str:
    return json.dumps([list(map(dict, problem.messages)), problem.prefill], sort_keys=True)


def prompts(case: Case) -> Finding:
    """The tokenizer loads, fits the model's embedding and has a template, and the prompts are short enough."""
    folder = Path(case.config.model.path)
    if not (folder / CONFIG).is_file():
        return skipped("there is no model folder")
    try:
        renderer = Renderer.of(str(folder), case.config.data)
        problems = (
            []
            if case.config.data.reader
            else read_local("data.train", case.config.data.train, None, defaults_of(case.config)).problems
        )
        rendered = [renderer.render(problem) for problem in problems[:MAX_RENDERED]]
    except ProblemError as error:
        return failure(str(error), "mend the tokenizer's files or the problem")
    try:
        return judge_prompts(case, renderer.tokenizer, [len(prompt.tokens) for prompt in rendered])
    except ModelError as error:
        return failure(str(error), "give the folder of a supported model")


def judge_prompts(case: Case, tokenizer: Any, lengths: Sequence[int]) -> Finding:
    rows = read_shape(case.config.model.path).vocabulary
    if len(tokenizer) > rows:
        return failure(
            f"the tokenizer has {len(tokenizer)} tokens, but the model's embedding has {rows} rows",
            "use the tokenizer of this model",
        )
    if tokenizer.eos_token_id is None:
        return failure(
            "the tokenizer has no end-of-sequence token: completions would never stop", "set eos_token in tokenizer_config.json"
        )
    limit = case.config.data.max_prompt_tokens
    too_long = sum(length > limit for length in lengths)
    if lengths and too_long == len(lengths):
        return failure(f"all of {len(lengths)} prompts are longer than data.max_prompt_tokens={limit}", "raise it")
    if too_long > TOO_LONG_FRACTION * len(lengths):
        return warning(
            f"{too_long} of {len(lengths)} prompts are longer than data.max_prompt_tokens={limit}", "raise it, or accept the loss"
        )
    return ok(f"{len(tokenizer)} tokens; {len(lengths)} prompts of up to {max(lengths, default=0)} of {limit} tokens")


def sandbox(case: Case) -> Finding:
    """A right solution passes in the sandbox, on the nodes where judges run."""
    judges = [process for process in case.processes if process.role == "judge"]
    command = [judges[0].argv[0] if judges else sys.executable, "-m", "reward.check"]
    folder = existing(case.run_dir).resolve()  # the nodes share it
    try:
        file = tempfile.NamedTemporaryFile("w", prefix=".tiny-job-", suffix=".jsonl", dir=folder)  # noqa: SIM115 the errors below are those of opening it
    except OSError as error:
        return skipped(f"{folder} cannot be written: {error.strerror}")
    with file:
        file.write(json.dumps(TINY_JOB) + "\n")
        file.flush()
        asked = everywhere([*command, file.name], case.config, case.run_dir, judges)
        if asked[0] == command[0] and case.config.cluster.container:
            return skipped("the judges' Python is in a container, and this is asked outside of it")
        return run_tiny_job(asked)


def run_tiny_job(command: Sequence[str]) -> Finding:
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=JUDGE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return failure(f"a tiny job could not be judged: {error}", "mend the judges' Python environment")
    if answer.returncode:
        said = " ".join((answer.stderr or answer.stdout).split())[-300:]
        return failure(
            f"a tiny job did not pass: {said}", "allow user namespaces or install bubblewrap on the judges' nodes: docs/reward.md"
        )
    return ok("a tiny job passed")


CHECKS = (
    Check(name="problems", run=first_problems),
    Check(name="all problems", run=all_problems, fast=False),
    Check(name="held-out problems", run=held_out, fast=False),
    Check(name="prompts", run=prompts, fast=False),
    Check(name="sandbox", run=sandbox, fast=False),
)
