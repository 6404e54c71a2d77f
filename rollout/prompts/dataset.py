"""Problems become prompts: reading them, rendering them through the model's chat template, and their endless order.

A problem is one JSON object a line:

    {"id": "sum-1", "prompt": "Write ...", "task": {"kind": "calls", "tests": [...]}}

with `messages` instead of `prompt` for a conversation, `prefill` for the beginning of the answer, `"raw": true` for a prompt
that goes to the model verbatim, and `metadata`. What a task means is for `reward/` to say; here it only must have tests.
A source is a JSONL file or `hf://name?split=train`, whose rows have the same fields.
"""

import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import numpy as np

from rollout.ledger.records import Prompt


class ProblemError(ValueError):
    """A problem that cannot be used; the message names file and line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    id: str
    messages: Sequence[Mapping[str, str]]
    raw: str | None  # the prompt itself, if no template is to be applied
    prefill: str
    task: Mapping[str, Any]
    metadata: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompts:
    """What was read: the prompts, and the problems whose prompts are too long (id, tokens)."""

    usable: Sequence[Prompt]
    too_long: Sequence[tuple[str, int]] = field(default_factory=tuple)


class PromptStream:
    """Endless and resumable: position p is in epoch p // n, whose order depends on (seed, epoch) alone."""

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        if not prompts:
            raise ProblemError("there is no prompt to train on: every problem was refused, or the files are empty")
        self._prompts = prompts
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []

    @property
    def digest(self) -> str:
        """Of what comes at which position."""
        digest = hashlib.sha256(f"{self._seed}\n".encode())
        for prompt in self._prompts:
            digest.update(f"{prompt.id}\n{len(prompt.tokens)}\n".encode() + prompt.tokens.tobytes())
        return digest.hexdigest()

    def at(self, position: int) -> Prompt:
        epoch, place = divmod(position, len(self._prompts))
        if epoch != self._epoch:
            self._order = list(range(len(self._prompts)))
            random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
            self._epoch = epoch
        return self._prompts[self._order[place]]


def load_tokenizer(model_path: str) -> Any:
    """The tokenizer of a model's folder. Raises ProblemError."""
    import transformers  # slow

    # tokenizer.json as it is: AutoTokenizer of transformers 5 rebuilds it by the model's type, with that type's own rules
    # for splitting text, which are not those of a model that was trained with another tokenizer.
    verbatim = (Path(model_path) / "tokenizer.json").is_file()
    kind = transformers.PreTrainedTokenizerFast if verbatim else transformers.AutoTokenizer
    try:
        return kind.from_pretrained(model_path, local_files_only=True)
    except Exception as error:  # of a broken file tokenizers says no more than Exception, transformers KeyError
        raise ProblemError(f"no tokenizer in model.path={model_path}: {type(error).__name__}: {error}") from error


def load_prompts(sources: Sequence[str], tokenizer: Any, max_prompt_tokens: int) -> Prompts:
    """Reads and renders the problems of all sources. Raises ProblemError."""
    usable, too_long = [], []
    for problem in read_problems(sources):
        prompt = render(problem, tokenizer)
        if len(prompt.tokens) > max_prompt_tokens:
            too_long.append((prompt.id, len(prompt.tokens)))
        else:
            usable.append(prompt)
    return Prompts(usable=tuple(usable), too_long=tuple(too_long))


def read_problems(sources: Sequence[str]) -> list[Problem]:
    """The problems of all sources, in order. Raises ProblemError with file and line."""
    problems: list[Problem] = []
    seen: dict[str, str] = {}
    for source in sources:
        for where, row in _rows_of_dataset(source) if source.startswith("hf://") else _rows_of_file(source):
            problem = _problem(row, where)
            if problem.id in seen:
                raise ProblemError(f"{where}: id {problem.id!r} was used before, at {seen[problem.id]}")
            seen[problem.id] = where
            problems.append(problem)
    return problems


def read_problem(line: str, where: str) -> Problem:
    """The problem of one line of JSON. Raises ProblemError, which names `where`."""
    return _problem(_parsed(line, where), where)


def _parsed(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ProblemError(f"{where}: broken JSON at column {error.colno}: {error.msg}") from error


def render(problem: Problem, tokenizer: Any) -> Prompt:
    """The tokens that the model continues, the prefill included."""
    text = problem.raw
    if text is None:
        if not tokenizer.chat_template:
            raise ProblemError(
                f'problem {problem.id!r} needs a chat template and the tokenizer has none: add one, or set "raw": true'
            )
        text = tokenizer.apply_chat_template(list(problem.messages), tokenize=False, add_generation_prompt=True)
    tokens = tokenizer.encode(text + problem.prefill, add_special_tokens=False)
    if not tokens:
        raise ProblemError(f"problem {problem.id!r} has an empty prompt")
    return Prompt(
        id=problem.id,
        tokens=np.array(tokens, dtype=np.int32),
        task=problem.task,
        prefill=problem.prefill,
        metadata=problem.metadata,
    )


def _rows_of_file(source: str) -> Iterator[tuple[str, Any]]:
    try:
        with open(source, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                yield f"{source}:{number}", _parsed(line, f"{source}:{number}")
    except OSError as error:
        raise ProblemError(f"cannot read the problems {source}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ProblemError(f"{source} is not UTF-8 text: {error}") from error


def _rows_of_dataset(source: str) -> Iterator[tuple[str, Any]]:
    try:
        import datasets  # optional dependency
    except ImportError as error:
        raise ProblemError(f"{source}: needs the package `datasets`: run `pip install datasets`, or use a JSONL file") from error
    parts = urlsplit(source)
    options = dict(parse_qsl(parts.query))
    try:
        rows = datasets.load_dataset(parts.netloc + parts.path, split=options.pop("split", "train"), **options)
    except (OSError, ValueError, TypeError) as error:
        raise ProblemError(f"cannot load {source}: {error}") from error
    for number, row in enumerate(rows):
        yield f"{source} row {number}", {name: value for name, value in row.items() if value is not None}


def _problem(row: Any, where: str) -> Problem:
    def need(condition: bool, what: str) -> None:
        if not condition:
            raise ProblemError(f"{where}: {what}")

    need(isinstance(row, dict), f"a problem is a JSON object, got {type(row).__name__}")
    need(isinstance(row.get("id"), str) and bool(row["id"]), "`id` must be a string")
    need(("prompt" in row) != ("messages" in row), "a problem has either `prompt` or `messages`")
    task = row.get("task")
    need(isinstance(task, dict) and isinstance(task.get("kind"), str), "`task` must be an object with a `kind`")
    need(isinstance(task.get("tests"), list) and bool(task["tests"]), "`task.tests` must be a list of at least one test")
    need(isinstance(row.get("prefill", ""), str), "`prefill` must be a string")
    need(isinstance(row.get("raw", False), bool), "`raw` must be true or false")
    need(isinstance(row.get("metadata", {}), dict), "`metadata` must be an object")
    raw = row.get("raw", False)
    if "prompt" in row:
        need(isinstance(row["prompt"], str) and bool(row["prompt"]), "`prompt` must be a string that is not empty")
        messages = [{"role": "user", "content": row["prompt"]}]
    else:
        messages = row["messages"]
        well_formed = isinstance(messages, list) and bool(messages) and all(_is_message(m) for m in messages)
        need(well_formed, "`messages` must be a list of objects with the strings `role` and `content`")
        need(not raw, "`raw` goes with `prompt`, not with `messages`")
    return Problem(
        id=row["id"],
        messages=messages,
        raw=row["prompt"] if raw else None,
        prefill=row.get("prefill", ""),
        task=task,
        metadata=row.get("metadata", {}),
    )


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(name), str) for name in ("role", "content"))
