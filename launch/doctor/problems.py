"""Checks of the problems and of what makes prompts of them: readable, gradable, short enough, held out where they should be."""

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conf.schema import ConfigError, RunConfig
from conf.shapes import ModelError, read_shape
from launch.doctor.case import Case, everywhere, existing
from launch.doctor.finding import Check, Finding, failure, ok, skipped, warning
from launch.doctor.model_folder import CONFIG
from launch.processes.prepare import RECIPES, will_make
from reward.task import TaskError, parse_task
from rollout.prompts.problems import Problem, ProblemError, read_problem
from rollout.prompts.render import Renderer
from rollout.prompts.sources import HUB

FAST_BYTES = 4 * 1024**2  # of each file that are read at a launch; the queue server reads all of it
MOST_RENDERED = 2000
TOO_LONG_FRACTION = 0.05
JUDGE_S = 60.0
TINY_JOB = {
    "id": "doctor", "prompt": "Add.", "solution": "def add(a, b):\n    return a + b\n",
    "task": {"kind": "calls", "entry_point": "add", "tests": [{"args": [1, 2], "expected": 3}]},
}  # fmt: skip


@dataclass(slots=True)
class Read:
    """What was read of the files of one setting."""

    key: str
    problems: list[Problem] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)  # why, with file and line


def read_local(key: str, sources: Sequence[str], most_bytes: int | None) -> Read:
    """The problems of JSONL files, none skipped over in silence; data sets of the hub are left out."""
    found, seen = Read(key), dict[str, str]()
    for source in (s for s in sources if not s.startswith(HUB)):
        try:
            for where, line in _lines(Path(source), most_bytes):
                try:
                    problem = read_problem(line, where)
                    parse_task(problem.task)
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


def _lines(path: Path, most_bytes: int | None) -> Iterator[tuple[str, str]]:
    read = 0
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            read += len(line)
            if most_bytes is not None and read > most_bytes:
                return
            if line.strip():
                yield f"{path}:{number}", line


def _judge_problems(case: Case, most_bytes: int | None) -> Finding:
    counts = []
    data = case.config.data
    if data.reader:
        return skipped(f"the queue server reads them, with data.reader={data.reader}")
    for key, sources in (("data.train", data.train), ("data.heldout", data.heldout)):
        remote = [source for source in sources if source.startswith(HUB)]
        if remote and importlib.util.find_spec("datasets") is None:
            return failure(f"{key}: {remote[0]} needs the package `datasets`", "pip install datasets, or use a JSONL file")
        if len(remote) == len(sources):
            continue
        if later := [source for source in sources if source not in remote and case.made_later(source)]:
            return skipped(f"{later[0]} is made at the launch (model.prepare={case.config.model.prepare})")
        read = read_local(key, sources, most_bytes)
        if read.refused:
            total = len(read.refused) + len(read.problems)
            many = f" ({len(read.refused)} of {total} lines are refused)" if len(read.refused) > 1 else ""
            return failure(f"{key}: {read.refused[0]}{many}", f"mend or remove the line, or give the right file in {key}")
        if not read.problems:
            return failure(f"{key}: no problems in {', '.join(sources)}", "name files that hold problems, one JSON object a line")
        counts.append(f"{len(read.problems)} of {key}")
    return ok(" and ".join(counts) + (" are looked at" if most_bytes else "")) if counts else skipped("all are remote")


def check_files(config: RunConfig) -> None:
    """Before anything is made: the files are there, or will be. Raises ConfigError."""
    if config.data.reader:
        return  # it alone knows what a source is
    for key, sources in (("data.train", config.data.train), ("data.heldout", config.data.heldout)):
        for source in sources:
            if not (source.startswith(HUB) or Path(source).exists() or will_make(RECIPES[config.model.prepare], source)):
                raise ConfigError(f"{key}: cannot read the problems {source}: there is no such file")


def first_problems(case: Case) -> Finding:
    return _judge_problems(case, FAST_BYTES)


def all_problems(case: Case) -> Finding:
    return _judge_problems(case, None)


def held_out(case: Case) -> Finding:
    """A held-out problem that is trained on measures memory, not skill."""
    data = case.config.data
    if not data.heldout or data.reader:
        return skipped("no held-out problems" if not data.heldout else f"they are read with data.reader={data.reader}")
    trained = {_asked(problem) for problem in read_local("data.train", data.train, None).problems}
    kept = read_local("data.heldout", data.heldout, None).problems
    if not kept:
        return skipped("none could be read here")
    if both := [problem.id for problem in kept if _asked(problem) in trained]:
        return warning(
            f"{len(both)} of {len(kept)} held-out problems are trained on too, {both[0]!r} first", "take them out of data.train"
        )
    return ok(f"none of {len(kept)} is trained on")


def _asked(problem: Problem) -> str:
    return json.dumps([list(map(dict, problem.messages)), problem.prefill], sort_keys=True)


def prompts(case: Case) -> Finding:
    """The tokenizer loads, knows no more than the model, has a template, and the prompts are short enough."""
    folder = Path(case.config.model.path)
    if not (folder / CONFIG).is_file():
        return skipped("there is no model folder")
    try:
        renderer = Renderer.of(str(folder), case.config.data)
        problems = [] if case.config.data.reader else read_local("data.train", case.config.data.train, None).problems
        rendered = [renderer.render(problem) for problem in problems[:MOST_RENDERED]]
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
            f"the tokenizer has {len(tokenizer)} tokens, the model's embedding {rows} rows", "take the tokenizer of this model"
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
    """A right solution, run as a judge would run it and on the nodes where judges run, passes."""
    judges = [process for process in case.processes if process.role == "judge"]
    command = [judges[0].argv[0] if judges else sys.executable, "-m", "reward.check"]
    folder = existing(case.run_dir).resolve()  # the nodes share it
    try:
        file = tempfile.NamedTemporaryFile("w", prefix=".tiny-job-", suffix=".jsonl", dir=folder)  # noqa: SIM115 its errors are these
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
