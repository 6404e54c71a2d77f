"""Checks of the problems and their prompts: readable, gradable, short enough, and held out where they should be."""

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conf.schema import ConfigError, RunConfig
from conf.shapes import ModelError, read_shape
from launch.doctor.case import Case, everywhere, existing
from launch.doctor.finding import Check, Finding, failure, ok, skipped, warning
from launch.doctor.model_folder import CONFIG
from reward.readers.heldout import question
from reward.readers.reading import Reading
from reward.readers.run_problems import options_of
from reward.readers.sources import HUB
from rollout.prompts.problems import Problem, ProblemError
from rollout.prompts.render import Renderer

FIRST_ROWS = 1000  # a launch reads these of each file; the queue server reads all
MAX_RENDERED = 2000
REFUSED_FRACTION = 0.05
TOO_LONG_FRACTION = 0.05
JUDGE_S = 60.0
TINY_JOB = {
    "id": "doctor", "prompt": "Add.", "solution": "def add(a, b):\n    return a + b\n",
    "task": {"kind": "calls", "entry_point": "add", "tests": [{"args": [1, 2], "expected": 3}]},
}  # fmt: skip


@dataclass(slots=True)
class Found:
    """What the sources of one setting hold."""

    problems: list[Problem] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)  # why a run would not start with them


def read_local(config: RunConfig, sources: Sequence[str], most_rows: int | None) -> Found:
    """The problems of sources that lie on this machine, and what was refused."""
    found, places = Found(), dict[str, str]()
    try:
        options = options_of(config)
    except ConfigError as error:
        return Found(mistakes=[str(error)])
    for source in (source for source in sources if not source.startswith(HUB)):
        reading = Reading(source=source, options=options, most_rows=most_rows)
        found.readings.append(reading)
        try:
            found.problems.extend(gradable.problem for gradable in reading.problems(places))
        except ProblemError as error:
            found.mistakes.append(str(error))
            continue
        found.mistakes.extend(str(refusal) for refusal in reading.refusals if refusal.in_own_format)
        if not reading.formats and not found.mistakes:
            found.mistakes.append(f"no problem can be used: {reading}")
    return found


def _check_problems(case: Case, most_rows: int | None) -> Finding:
    lines, later, lost = list[str](), list[str](), False
    data = case.config.data
    if settings := read_local(case.config, [], None).mistakes:
        return failure(settings[0], "mend the setting")
    if data.reader:
        return skipped(f"the queue server reads them, with data.reader={data.reader}")
    for key, sources in (("data.train", data.train), ("data.heldout", data.heldout)):
        remote = [source for source in sources if source.startswith(HUB)]
        if remote and importlib.util.find_spec("datasets") is None:
            return failure(f"{key}: {remote[0]} needs the package `datasets`", "pip install datasets, or use a JSONL file")
        made_later = [source for source in sources if case.made_later(source)]
        later += made_later
        found = read_local(case.config, [source for source in sources if source not in made_later], most_rows)
        if found.mistakes:
            many = f" (and {len(found.mistakes) - 1} more)" if len(found.mistakes) > 1 else ""
            return failure(f"{key}: {found.mistakes[0]}{many}", f"mend or remove the row, or name another source in {key}")
        for reading in found.readings:
            first = f"the first {most_rows} rows of " if reading.rows == most_rows else ""
            lines.append(f"{key}: {first}{reading}")
            lost |= len(reading.refusals) > REFUSED_FRACTION * reading.rows
    if later:
        return skipped(f"{later[0]} is made at the launch (model.prepare={case.config.model.prepare})")
    if lost:
        return warning("\n".join(lines), "mend the rows that are refused, or accept the loss")
    return ok("\n".join(lines)) if lines else skipped("all are remote")


def first_problems(case: Case) -> Finding:
    return _check_problems(case, FIRST_ROWS)


def all_problems(case: Case) -> Finding:
    return _check_problems(case, None)


def held_out(case: Case) -> Finding:
    """No held-out problem is trained on. Such a problem would measure memory, not skill."""
    data = case.config.data
    if data.heldout_fraction:
        return ok("equal prompts are held out together")
    if not data.heldout or data.reader:
        return skipped("no held-out problems" if not data.heldout else f"they are read with data.reader={data.reader}")
    trained = {question(problem) for problem in read_local(case.config, data.train, None).problems}
    kept = read_local(case.config, data.heldout, None).problems
    if not kept:
        return skipped("none could be read here")
    if both := [problem.id for problem in kept if question(problem) in trained]:
        return warning(
            f"{len(both)} of {len(kept)} held-out problems are trained on too, {both[0]!r} first", "take them out of data.train"
        )
    return ok(f"none of {len(kept)} is in data.train")


def prompts(case: Case) -> Finding:
    """The tokenizer loads, fits the model's embedding and has a template, and the prompts are short enough."""
    folder, data = Path(case.config.model.path), case.config.data
    if not (folder / CONFIG).is_file():
        return skipped("there is no model folder")
    try:
        renderer = Renderer.of(str(folder), data)
        problems = [] if data.reader else read_local(case.config, data.train, MAX_RENDERED).problems
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
