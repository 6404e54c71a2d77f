"""The tests of an `asserts` task, read from their syntax tree and never run here."""

import ast
from dataclasses import dataclass
from functools import lru_cache

from reward.kinds import claims
from reward.kinds.claims import Claim
from reward.kinds.kind import TaskError


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Some test code that passes as a whole or not."""

    code: str
    inline: bool  # it asserts outside of any function
    claims: tuple[Claim, ...]  # all that it does, where that is nothing but plain comparisons


def read_unit(test: object, where: str) -> Unit:
    if not isinstance(test, str):
        raise TaskError(f"{where}: must be a string of Python code, got {type(test).__name__}")
    try:
        return _parse_unit(test)
    except TaskError as error:
        raise TaskError(f"{where}: {error}") from None


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
    return Unit(code=test, inline=inline, claims=found)


def _asserts(statement: ast.stmt) -> bool:
    """Whether it holds an `assert` or a `with pytest.raises(…)`."""
    return any(
        isinstance(node, ast.Assert) or (isinstance(node, ast.Attribute | ast.Name) and _name(node) == "raises")
        for node in ast.walk(statement)
    )


def _name(node: ast.Attribute | ast.Name) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id
