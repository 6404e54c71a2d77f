"""Assertions that are plain comparisons: `assert f(ARGUMENTS) == VALUE`, read from their syntax tree and never run.

Where all tests of a problem are such claims, they need no jail of their own: the calls are made in the candidate's, and what
comes back is compared here, with the meaning that Python gives the comparison. That is most test code that problem sets have.
"""

import ast
import builtins
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from reward.jail import codec
from reward.kinds.compare_data import equals, is_near, truth

MAX_VALUE_BITS = 4096  # the largest int that arithmetic over literals may produce
MOST_TOLERANCE = 1e300
OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


class NotAClaim(ValueError):
    """An assertion that cannot be taken by data; the message says what it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What is said of the result of one call."""

    function: str
    args: list[Any]
    kwargs: dict[str, Any] = field(default_factory=dict)
    relation: str  # == | is | true | false | near
    expected: Any
    tolerance: float = 0.0  # for `near`: the difference must be smaller

    def holds(self, data: Any) -> bool:
        """Whether it is true of a result in its JSON form, from hostile hands. Raises CodecError where that is none."""
        if self.relation == "==":
            return equals(data, self.expected)
        if self.relation == "is":
            return data is self.expected
        if self.relation == "near":
            return is_near(data, self.expected, self.tolerance)
        return truth(data) is (self.relation == "true")


def read_claims(code: str) -> list[Claim]:
    """The claims that test code consists of, at its top or inside a function `check(candidate)`. Raises NotAClaim."""
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NotAClaim(f"not Python: {error}") from None
    found = [claim for statement in _flat(body) if (claim := _claim(statement)) is not None]
    if not found:
        raise NotAClaim("no tests")
    return found


def called(claims: Iterable[Claim], entry_point: str, setup: str) -> str:
    """The candidate's function, if all these claims call one and the same. `candidate` is the entry point; another function is
    the candidate's where the setup cannot have defined it."""
    names = {entry_point if claim.function == "candidate" else claim.function for claim in claims}
    name = names.pop() if len(names) == 1 else ""
    return name if name == entry_point or (not entry_point and name not in setup) else ""


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    checks = 0
    for statement in body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "check" and len(statement.args.args) == 1 and not checks:
            checks += 1
            yield from statement.body
        elif not _does_nothing(statement):
            yield statement


def _does_nothing(statement: ast.stmt) -> bool:
    """A docstring, a stray constant, or literals that are given a name which no claim can use."""
    if isinstance(statement, ast.Assign):
        try:
            ast.literal_eval(statement.value)
        except (ValueError, TypeError, MemoryError, RecursionError):
            return False
        return all(isinstance(target, ast.Name) and target.id == "METADATA" for target in statement.targets)
    return isinstance(statement, ast.Pass) or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))


def _claim(statement: ast.stmt) -> Claim | None:
    if isinstance(statement, ast.Expr) and not isinstance(statement.value, ast.Call):
        return None  # a docstring or a stray name does nothing
    if not isinstance(statement, ast.Assert):
        raise NotAClaim("tests compute their inputs (loops, imports, assignments)")
    said = statement.test
    if isinstance(said, ast.Constant) and said.value:
        return None  # `assert True` holds for everybody
    if isinstance(said, ast.Call):
        return _of_call(said, "true", True)
    if isinstance(said, ast.UnaryOp) and isinstance(said.op, ast.Not):
        return _of_call(said.operand, "false", False)
    if isinstance(said, ast.Compare) and len(said.ops) == 1:
        left, right = said.left, said.comparators[0]
        match said.ops[0]:
            case ast.Eq():
                return _equality(left, right)
            case ast.Is() if isinstance(right, ast.Constant) and right.value in (True, False, None):
                return _of_call(left, "is", right.value)
            case ast.Lt():
                return _closeness(left, right)
    raise NotAClaim("an assertion of another form")


def _equality(left: ast.expr, right: ast.expr) -> Claim:
    for side in (left, right):
        if isinstance(side, ast.Call) and isinstance(side.func, ast.Name) and any(isinstance(a, ast.Call) for a in side.args):
            raise NotAClaim("the result is converted before it is compared")
    return _of_call(left, "==", value(right))


def _closeness(left: ast.expr, right: ast.expr) -> Claim:
    """`abs(f(ARGUMENTS) - VALUE) < TOLERANCE`"""
    if isinstance(left, ast.Call) and isinstance(left.func, ast.Name) and left.func.id == "abs" and len(left.args) == 1:
        difference = left.args[0]
        if isinstance(difference, ast.BinOp) and isinstance(difference.op, ast.Sub):
            number, tolerance = value(difference.right), value(right)
            if isinstance(number, int | float) and isinstance(tolerance, int | float) and abs(tolerance) < MOST_TOLERANCE:
                return _of_call(difference.left, "near", number, tolerance=float(tolerance))
    raise NotAClaim("an assertion of another form")


def _of_call(node: ast.expr, relation: str, expected: Any, *, tolerance: float = 0.0) -> Claim:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id in builtins.__dict__:
        raise NotAClaim("an assertion of another form")
    if any(keyword.arg is None for keyword in node.keywords):
        raise NotAClaim("an argument is not a literal")
    return Claim(
        function=node.func.id,
        args=[value(argument) for argument in node.args],
        kwargs={str(keyword.arg): value(keyword.value) for keyword in node.keywords},
        relation=relation,
        expected=expected,
        tolerance=tolerance,
    )


def value(node: ast.expr) -> Any:
    """What literals, or arithmetic over numbers and sums of strings and lists, stand for."""
    try:
        found = ast.literal_eval(node)
        codec.encode(found)
        return found
    except (ValueError, TypeError, MemoryError, RecursionError):  # a CodecError is a ValueError: `...` is no data
        pass
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return _arithmetic(node.op, value(node.left), value(node.right))
    if isinstance(node, ast.List):
        return [value(item) for item in node.elts]
    if isinstance(node, ast.Tuple):
        return tuple(value(item) for item in node.elts)
    raise NotAClaim("a value is not a literal")


def _arithmetic(op: ast.operator, left: Any, right: Any) -> Any:
    numbers = all(isinstance(side, int | float) for side in (left, right))
    sum_of_texts = isinstance(op, ast.Add) and type(left) is type(right) and isinstance(left, str | list)
    if not numbers and not sum_of_texts:
        raise NotAClaim("a value is not a literal")
    if isinstance(op, ast.Pow) and (abs(right) > MAX_VALUE_BITS or abs(left) > MAX_VALUE_BITS):
        raise NotAClaim("a value is too big")
    try:
        return OPERATORS[type(op)](left, right)
    except (ArithmeticError, TypeError) as error:
        raise NotAClaim("a value cannot be computed") from error
