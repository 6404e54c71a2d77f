"""How a problem is graded: the records behind the `task` object of a problem's JSONL line, and their checks.

    {"kind": "calls", "entry_point": "f", "tests": [{"args": [2], "expected": 4}]}
    {"kind": "stdio", "tests": [{"input": "2\\n", "output": "4\\n"}], "tolerance": 1e-6}
    {"kind": "asserts", "entry_point": "f", "tests": ["assert f(2) == 4", "def check(candidate): …"]}

Fields of all: `setup` (code that runs before the candidate's: imports, helpers of the prompt), `cpu_limit_s` (of the whole
completion), `test_cpu_limit_s` (of one test), `memory_limit_mb`, `credit` ("all" | "fraction"), `tolerance`. Values in `args`,
`kwargs` and `expected` are plain data in the JSON form of `reward/jail/codec.py`. Results are compared with their exact types, or
with `"match": "json"` (in `calls`) as JSON would have them, which is what sets need whose expected values come from JSON.
"""

import ast
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from reward import claims
from reward.claims import Claim
from reward.jail import codec

CREDITS = ("all", "fraction")
MATCHES = ("exact", "json")
KINDS = ("calls", "stdio", "asserts")


class TaskError(ValueError):
    """A task that cannot be graded; the message says where, what, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What a task gets where it says nothing itself."""

    cpu_limit_s: float = 8.0
    memory_limit_mb: int = 1024
    credit: str = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTest:
    """One call. `args` and `kwargs` stay in their JSON form: only a job ever decodes them."""

    args: list[Any]
    kwargs: dict[str, Any]
    expected: object


@dataclass(frozen=True, slots=True, kw_only=True)
class StdioTest:
    input: str
    output: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What every kind has."""

    setup: str
    cpu_limit_s: float  # of the whole completion
    test_cpu_limit_s: float  # of one test
    memory_limit_mb: int
    credit: str  # all | fraction
    tolerance: float | None  # relative and absolute; None: exact


@dataclass(frozen=True, slots=True, kw_only=True)
class CallsTask(Task):
    """A function, called with the arguments of each test; what it returns must be the expected value."""

    entry_point: str  # a function, or a method as in Solution.solve
    match: str  # exact: in type too | json: as JSON would have both
    tests: tuple[CallTest, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StdioTask(Task):
    """A program, run once a test; what it prints must be the expected output."""

    tests: tuple[StdioTest, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Some test code that passes as a whole or not."""

    code: str
    inline: bool  # it asserts outside of any function
    claims: tuple[Claim, ...]  # all that it does, where that is nothing but plain comparisons
    words: frozenset[str]  # every name in it


@dataclass(frozen=True, slots=True, kw_only=True)
class AssertsTask(Task):
    """Test code that runs in a jail of its own, against proxies of what the candidate defines."""

    entry_point: str  # what `check(candidate)` gets; may be empty where no test has a `check`
    tests: tuple[Unit, ...]
    named: tuple[str, ...]  # every name that the tests use: classes among them are the candidate's interface
    called: str  # the function that all tests call, where all of them are claims


_SHARED = frozenset(("kind", "tests", "setup", "cpu_limit_s", "test_cpu_limit_s", "memory_limit_mb", "credit", "tolerance"))
_FIELDS = {"calls": _SHARED | {"entry_point", "match"}, "stdio": _SHARED, "asserts": _SHARED - {"tolerance"} | {"entry_point"}}


def parse_task(data: Mapping[str, Any], *, defaults: Defaults = Defaults()) -> CallsTask | StdioTask | AssertsTask:
    """The task that `data` describes. Raises TaskError."""
    if not isinstance(data, Mapping):
        raise TaskError(f"task: must be an object, got {type(data).__name__}")
    kind = data.get("kind")
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise TaskError(f"task.kind: {kind!r} is not known: use one of {', '.join(KINDS)}")
    if unknown := sorted(set(data) - _FIELDS[kind]):
        raise TaskError(f"task.{unknown[0]}: no such field in a {kind!r} task: it has {', '.join(sorted(_FIELDS[kind]))}")
    shared = _shared(data, defaults)
    tests = data.get("tests")
    if not isinstance(tests, list) or not tests:
        raise TaskError("task.tests: must be a list of at least one test: a problem without tests cannot be graded")
    if kind == "stdio":
        return StdioTask(tests=tuple(_stdio_test(test, i) for i, test in enumerate(tests)), **shared)
    if kind == "asserts":
        units = tuple(_unit(test, i) for i, test in enumerate(tests))
        entry_point = _entry_point(data["entry_point"]) if data.get("entry_point") else ""
        named = {word for unit in units for word in unit.words}
        called = ""
        if all(unit.claims for unit in units):
            called = claims.called((claim for unit in units for claim in unit.claims), entry_point, shared["setup"])
        return AssertsTask(entry_point=entry_point, tests=units, named=tuple(sorted(named)), called=called, **shared)
    if (match := data.get("match", "exact")) not in MATCHES:
        raise TaskError(f"task.match: {match!r} is not known: use one of {', '.join(MATCHES)}")
    return CallsTask(
        match=match,
        entry_point=_entry_point(data.get("entry_point")),
        tests=tuple(_call_test(test, i) for i, test in enumerate(tests)),
        **shared,
    )


def _shared(data: Mapping[str, Any], defaults: Defaults) -> dict[str, Any]:
    setup = data.get("setup", "")
    if not isinstance(setup, str) or "\0" in setup:
        raise TaskError("task.setup: must be a string of Python code")
    credit = data.get("credit", defaults.credit)
    if credit not in CREDITS:
        raise TaskError(f"task.credit: {credit!r} is not known: use one of {', '.join(CREDITS)}")
    tolerance = data.get("tolerance")
    if tolerance is not None:
        tolerance = _positive(tolerance, "tolerance")
    cpu_limit_s = _positive(data.get("cpu_limit_s", defaults.cpu_limit_s), "cpu_limit_s")
    test_cpu_limit_s = _positive(data.get("test_cpu_limit_s", cpu_limit_s), "test_cpu_limit_s")
    memory_limit_mb = int(_positive(data.get("memory_limit_mb", defaults.memory_limit_mb), "memory_limit_mb"))
    if memory_limit_mb < 16:
        raise TaskError(f"task.memory_limit_mb: {memory_limit_mb} is too little for Python: give at least 16")
    return {
        "setup": setup,
        "cpu_limit_s": cpu_limit_s,
        "test_cpu_limit_s": min(test_cpu_limit_s, cpu_limit_s),
        "memory_limit_mb": memory_limit_mb,
        "credit": credit,
        "tolerance": tolerance,
    }


def _entry_point(name: object) -> str:
    if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")) or name.count(".") > 1:
        raise TaskError(f"task.entry_point: {name!r} must name a function, or a method as in 'Solution.solve'")
    return name


def _call_test(test: object, index: int) -> CallTest:
    where = f"task.tests[{index}]"
    fields = _object(test, where, required=("expected",), optional=("args", "kwargs"))
    args, kwargs = fields.get("args", []), fields.get("kwargs", {})
    if not isinstance(args, list):
        raise TaskError(f"{where}.args: must be a list, got {type(args).__name__}")
    if not isinstance(kwargs, dict):
        raise TaskError(f"{where}.kwargs: must be an object, got {type(kwargs).__name__}")
    for name, value in (("args", args), *kwargs.items()):
        _decode(value, f"{where}.{name}")
    return CallTest(args=args, kwargs=kwargs, expected=_decode(fields["expected"], f"{where}.expected"))


def _stdio_test(test: object, index: int) -> StdioTest:
    where = f"task.tests[{index}]"
    fields = _object(test, where, required=("input", "output"))
    for name, value in fields.items():
        if not isinstance(value, str):
            raise TaskError(f"{where}.{name}: must be a string, got {type(value).__name__}")
    return StdioTest(input=fields["input"], output=fields["output"])


def _unit(test: object, index: int) -> Unit:
    if not isinstance(test, str):
        raise TaskError(f"task.tests[{index}]: must be a string of Python code, got {type(test).__name__}")
    try:
        return _parse_unit(test)
    except TaskError as error:
        raise TaskError(f"task.tests[{index}]: {error}") from None


@lru_cache(maxsize=4096)  # the completions of a group come one after another, with the same tests
def _parse_unit(test: str) -> Unit:
    try:
        tree = ast.parse(test)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise TaskError(f"not Python: {error}") from None
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    inline = any(_asserts(node) for node in tree.body if not isinstance(node, definitions))
    if not inline and not any(isinstance(node, definitions) for node in tree.body):
        raise TaskError("tests nothing: it has no assert, no test function and no TestCase")
    try:
        found = tuple(claims.read_claims(test))
    except claims.NotAClaim:
        found = ()
    return Unit(code=test, inline=inline, claims=found, words=_words(tree))


def _asserts(statement: ast.stmt) -> bool:
    """Whether it holds an `assert` or a `with pytest.raises(…)`."""
    return any(
        isinstance(node, ast.Assert) or (isinstance(node, ast.Attribute | ast.Name) and _name(node) == "raises")
        for node in ast.walk(statement)
    )


def _name(node: ast.Attribute | ast.Name) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id


def _words(tree: ast.Module) -> frozenset[str]:
    return frozenset(_name(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute | ast.Name))


def _object(test: object, where: str, *, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> dict[str, Any]:
    if not isinstance(test, dict):
        raise TaskError(f"{where}: must be an object, got {type(test).__name__}")
    for name in required:
        if name not in test:
            raise TaskError(f"{where}.{name}: is missing")
    if unknown := sorted(set(test) - {*required, *optional}):
        raise TaskError(f"{where}.{unknown[0]}: no such field: a test has {', '.join((*required, *optional))}")
    return test


def _decode(value: object, where: str) -> object:
    try:
        return codec.decode(value)
    except codec.CodecError as error:
        raise TaskError(f"{where}: {error}") from None


def _positive(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise TaskError(f"task.{name}: must be a number above 0, got {value!r}")
    return float(value)
