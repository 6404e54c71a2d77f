"""The tests of an `asserts` task, read from their syntax tree and never run here."""

import ast
from dataclasses import dataclass
from functools import lru_cache

from reward.kinds import claims
from reward.kinds.claims import Claim
from reward.kinds.kind import TaskError

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Some test code that passes as a whole or not."""

    code: str
    inline: bool  # it asserts outside of any function, or in a function that it calls itself
    defines: frozenset[str]  # functions and classes
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
    definitions = [node for node in tree.body if isinstance(node, DEFINITIONS)]
    statements = [node for node in tree.body if not isinstance(node, DEFINITIONS)]
    called = {name for one in statements for node in ast.walk(one) if (name := _called_by_name(node))}  # as in `main()`
    inline = any(map(_asserts, (*statements, *(node for node in definitions if node.name in called))))
    if not inline and not definitions:
        raise TaskError("tests nothing: it has no assert, no test function and no TestCase")
    if any(isinstance(node, ast.Assert) and isinstance(node.test, ast.Tuple) for node in ast.walk(tree)):
        raise TaskError("an assert of a tuple always holds: write `assert a == b, 'message'` without parentheses")
    try:
        found = tuple(claims.read_claims(test))
    except claims.NotAClaim:
        found = ()
    defines = frozenset(node.name for node in definitions)
    return Unit(code=test, inline=inline, defines=defines, claims=found)


def _called_by_name(node: ast.AST) -> str:
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""


def _asserts(statement: ast.stmt) -> bool:
    """Whether it holds an `assert` or a `with pytest.raises(…)`."""
    return any(
        isinstance(node, ast.Assert) or (isinstance(node, ast.Attribute | ast.Name) and _name(node) == "raises")
        for node in ast.walk(statement)
    )


def _name(node: ast.Attribute | ast.Name) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id
