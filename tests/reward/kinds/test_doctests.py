"""Functions of real packages, graded by the examples in their docstrings: as they are they pass, with an empty body they fail.

`more-itertools`, `toolz`, `boltons` and `inflection` are offered to the jobs, so that a function finds what its module gives it.
The examples run as they stand, by `doctest` in the tests' jail; those that are plain calls with plain results are also read as
claims and as calls.
"""

import ast
import doctest
import importlib
import io
import pkgutil
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from reward.jail import codec
from reward.kinds.claims import Claim, NotAClaim, read_claims
from reward.sandbox.host import PRELOAD, Settings
from reward.sandbox.sandbox import Sandbox
from reward.task import parse_task
from rollout.ledger.records import Verdict
from tests.reward.graded import grade

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TOO_LONG = ("is_prime",)  # it has examples that take a minute
NEED_ONE_PROCESS = {  # with the tests' own classes or functions (to subclass, inspect or search for), files or environment
    "cachedmethod", "complement", "copy_function", "expandpath", "format_exp_repr", "get_all", "get_all_subclasses",
    "instanceproperty", "is_arity", "issubclass", "iter_find_files", "make_sentinel", "mro_items",
}  # fmt: skip
SETUP = "import os, socket, time"  # which the examples take from their modules
PACKAGES = ("more_itertools", "toolz", "boltons", "inflection")
RUN_EXAMPLES = """
import doctest
def test_examples():
    test = doctest.DocTestParser().get_doctest({examples!r}, dict(globals()), "examples", None, 0)
    said = []
    found = doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    assert found.attempted and not found.failed, said
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    module: str
    name: str
    source: str  # with its decorators
    emptied: str  # the same, but it returns None
    examples: str  # the docstring

    def program(self, source: str) -> str:
        """The function with all names of its module around it."""
        return f"import {self.module} as around\nglobals().update(vars(around))\n{source}\n"

    def holds_here(self, source: str) -> bool:
        """Whether the examples pass in this process, which is what the sandbox has to agree with."""
        names: dict[str, Any] = {"__name__": "solution"}
        exec(compile(self.program(source), self.name, "exec"), names)
        with redirect_stdout(io.StringIO()):
            test = doctest.DocTestParser().get_doctest(self.examples, names, self.name, None, 0)
            found = doctest.DocTestRunner(verbose=False).run(test, out=lambda _: None)
        return found.attempted > 0 and not found.failed

    def claims(self) -> str:
        """The examples as assertions. Raises NotAClaim where they are more than plain comparisons."""
        lines = []
        for example in doctest.DocTestParser().get_examples(self.examples):
            try:
                ast.literal_eval(example.want.strip())
            except (ValueError, SyntaxError):
                raise NotAClaim(example.want) from None
            lines.append(f"assert (\n{example.source}\n) == {example.want.strip()}")  # a comment may follow the source
        claims = read_claims("\n".join(lines))
        if {claim.function for claim in claims} != {self.name}:
            raise NotAClaim("another function is called")
        return "\n".join(lines)


def functions() -> Iterator[Function]:
    for package in map(importlib.import_module, PACKAGES):
        names = [package.__name__, *(found.name for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."))]
        for name in names if hasattr(package, "__path__") else [package.__name__]:
            if "tests" not in name and "cython" not in name:
                yield from functions_of(name)


def functions_of(module: str) -> Iterator[Function]:
    path = importlib.util.find_spec(module).origin  # type: ignore[union-attr]
    for node in ast.parse(Path(str(path)).read_text(encoding="utf-8")).body:
        if (
            isinstance(node, ast.FunctionDef)
            and node.name not in TOO_LONG
            and ">>>" in (examples := ast.get_docstring(node) or "")
        ):
            source = ast.unparse(node)
            node.body = [ast.Return(value=ast.Constant(None))]
            yield Function(module=module, name=node.name, source=source, emptied=ast.unparse(node), examples=examples)


@pytest.fixture(scope="module")
def known() -> list[Function]:
    """Those whose examples tell the function from an empty one, as far as this process can say."""
    return [one for one in functions() if one.holds_here(one.source) and not one.holds_here(one.emptied)]


@pytest.fixture(scope="module")
def furnished(known: list[Function]) -> Iterator[Sandbox]:
    with Sandbox(Settings(modules=(*PRELOAD, *{one.module for one in known}), packages=PACKAGES)) as sandbox:
        yield sandbox


def graded(task: dict[str, Any], one: Function, source: str, sandbox: Sandbox) -> Verdict:
    parsed = parse_task({"entry_point": one.name, "cpu_limit_s": 4, **task})
    return grade(parsed, f"~~~~python\n{one.program(source)}\n~~~~", sandbox=sandbox)


def call_test(claim: Claim) -> dict[str, Any]:
    kwargs = {name: codec.encode(value) for name, value in claim.kwargs.items()}
    return {"args": codec.encode(claim.args), "kwargs": kwargs, "expected": codec.encode(claim.expected)}


def test_examples_run_in_two_jails(known: list[Function], furnished: Sandbox) -> None:
    failed, passed = {}, []
    for one in known:
        task = {"kind": "asserts", "setup": SETUP, "tests": [RUN_EXAMPLES.format(examples=one.examples)]}
        if (verdict := graded(task, one, one.source, furnished)).reward < 1:
            failed[one.name] = verdict.reason
        if graded(task, one, one.emptied, furnished).reward == 1:
            passed.append(one.name)
    assert len(known) > 300
    assert (failed.keys(), passed) == (NEED_ONE_PROCESS, []), failed


def test_plain_examples_are_claims_and_calls(known: list[Function], furnished: Sandbox) -> None:
    counted, wrong = 0, []
    for one in known:
        try:
            code = one.claims()
        except NotAClaim:
            continue
        counted += 1
        calls = [call_test(claim) for claim in read_claims(code)]
        for task in ({"kind": "asserts", "tests": [code]}, {"kind": "calls", "tests": calls}):
            for source, reward in ((one.source, 1.0), (one.emptied, 0.0)):
                if (verdict := graded(task, one, source, furnished)).reward != reward:
                    wrong.append(f"{one.module}.{one.name}, {task['kind']}: {verdict.reward} ({verdict.reason})")
    assert counted > 50
    assert wrong == []
