"""Which names of the candidate the test code means, and which of them are classes whose operators it uses.

A name of the candidate reaches the tests only if it can be nothing else: it is the entry point, or the tests use it and neither
they, the setup, Python's builtins nor its library define it. So a candidate that defines `abs` or `zip` changes no test.

A class has an operator with plain data for the tests only if they visibly use that operator: on a name of that class, on
`Name(...)`, or on a variable that was assigned such a value. `Vector(1, 2) * 2` does so. `Circle(2).area() - 3.14` does not: an
area that the candidate returns as a `Circle` with a helpful `__sub__` must not pass, even if the tests use `len(circle)`.
"""

import ast
import builtins
import doctest
import symtable
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from reward.jail.proxy import METHODS
from reward.kinds import in_place

Node = TypeVar("Node", bound=ast.AST)
Nodes = list[ast.AST]
Variables = dict[str, list[tuple[tuple[int, int], set[str]]]]
PACKAGES = {"np": "numpy", "numpy": "numpy", "pd": "pandas", "pandas": "pandas", "plt": "matplotlib.pyplot"}
"""What test code means by these names, imported or not: never a class of the candidate."""
MODULES = sys.stdlib_module_names | {"pytest"} | PACKAGES.keys()
_BUILTINS = frozenset(vars(builtins))
_ORDER = ("lt", "le", "gt", "ge")
_OF_SYNTAX: dict[type[ast.AST], tuple[str, ...]] = {
    ast.Add: ("add",), ast.Sub: ("sub",), ast.Mult: ("mul",), ast.MatMult: ("matmul",), ast.Div: ("truediv",),
    ast.FloorDiv: ("floordiv",), ast.Mod: ("mod",), ast.Pow: ("pow",), ast.LShift: ("lshift",), ast.RShift: ("rshift",),
    ast.BitAnd: ("and_",), ast.BitOr: ("or_",), ast.BitXor: ("xor",), ast.USub: ("neg",), ast.UAdd: ("pos",),
    ast.Invert: ("invert",), ast.In: ("contains",), ast.NotIn: ("contains",), ast.Lt: _ORDER, ast.LtE: _ORDER, ast.Gt: _ORDER,
    ast.GtE: _ORDER,
}  # fmt: skip
_OF_FUNCTIONS = {
    **{name: (name,) for name in ("abs", "complex", "divmod", "float", "int", "len", "pow", "reversed", "round")},
    **{"max": _ORDER, "min": _ORDER, "sum": ("add",), "dict": ("getitem",)},
}
_OF_ASSERTIONS = {
    **{"assertIn": ("contains",), "assertNotIn": ("contains",), "assertAlmostEqual": ("sub", "abs", "round")},
    **{f"assert{name}": _ORDER for name in ("Less", "LessEqual", "Greater", "GreaterEqual")},
}
LIBRARY = {
    name: module
    for module, names in (
        ("collections", "Counter OrderedDict defaultdict deque namedtuple"),
        ("copy", "deepcopy"),
        ("functools", "reduce"),
        ("itertools", "combinations permutations"),
        ("math", "ceil comb cos exp factorial floor gcd hypot inf isclose isnan lcm log log10 log2 nan pi sin sqrt tan"),
        ("pytest", "approx raises"),
    )
    for name in names.split()
}
"""Names that tests use without importing them, because the reference solution imports them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """What some test code takes from the candidate, and what it takes from Python without importing it."""

    names: frozenset[str]
    operators: frozenset[tuple[str, str]]  # classes among the names, each with an operation that it has on plain data
    modules: frozenset[str]
    library: frozenset[str]  # names in LIBRARY
    in_place: tuple[tuple[str, str], ...]  # arguments that it looks at after a call, as after a sort in place


@lru_cache(maxsize=4096)  # the completions of a group come one after another, with the same tests
def read_interface(setup: str, tests: str, entry_point: str) -> Interface:
    """What `tests`, which run after `setup`, take from the candidate."""
    tests += _doctests(tests)
    trees = (ast.parse(setup), ast.parse(tests))
    if setup:
        ast.increment_lineno(trees[1], len(setup.splitlines()))
    nodes = [node for tree in trees for node in ast.walk(tree)]
    _name_parameter(nodes, entry_point)
    setup_used, setup_bound = _globals(setup)
    used, bound = _globals(tests)
    free = {name for name in (setup_used | used) - setup_bound - bound - _BUILTINS if not name.startswith("__")}
    called = {node.func.id for node in _of(ast.Call, nodes) if isinstance(node.func, ast.Name)}
    modules = (free & MODULES) - called - {entry_point}
    names = {name for name in free - modules if not name.startswith("assert")} | ({entry_point} - {""}) | _imported(nodes)
    library = (free & LIBRARY.keys()) - {entry_point} - _imported(nodes)
    names -= library if names - library else set()  # what is tested may itself have such a name
    return Interface(
        names=frozenset(names),
        operators=_operators(nodes, _classes(nodes, names, entry_point)),
        modules=frozenset(modules),
        library=frozenset(library - names),
        in_place=tuple(in_place.looked_at(trees)),
    )


def _name_parameter(nodes: Nodes, entry_point: str) -> None:
    """Writes the entry point's own name for the parameter of `check(candidate)`."""
    for check in _of(ast.FunctionDef, nodes):
        if check.name == "check" and check.args.args and entry_point.isidentifier():
            for node in _of(ast.Name, list(ast.walk(check))):
                node.id = entry_point if node.id == check.args.args[0].arg else node.id


def defines(code: str, name: str) -> bool:
    """Whether code binds a name, or the class of a method's name, among its globals."""
    owner = name.partition(".")[0]
    return owner in code and owner in _globals(code)[1]


def _globals(code: str) -> tuple[set[str], set[str]]:
    """The global names that code uses, and those that it binds itself, at its top or as `global` in a function."""
    top = symtable.symtable(code, "tests.py", "exec")
    used: set[str] = set()
    bound: set[str] = set()
    tables = [top]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            if table is not top and not symbol.is_global():
                continue
            if symbol.is_referenced():
                used.add(symbol.get_name())
            if symbol.is_assigned() or symbol.is_imported() or (table is top and symbol.is_namespace()):
                bound.add(symbol.get_name())
    return used, bound


def _doctests(tests: str) -> str:
    """The examples in the strings of test code that runs them with `doctest`, as one program."""
    if ">>>" not in tests:
        return ""
    strings = [
        node.value for node in ast.walk(ast.parse(tests)) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    parser = doctest.DocTestParser()
    code = "\n" + "".join(example.source for text in strings if ">>>" in text for example in parser.get_examples(text))
    try:
        symtable.symtable(code, "doctests.py", "exec")
    except (SyntaxError, ValueError):  # then none of them can run
        return ""
    return code


def _imported(nodes: Nodes) -> set[str]:
    """What is imported from the solution's module, or used as its attribute."""
    imported = {alias.name for node in _of(ast.ImportFrom, nodes) if node.module == "solution" for alias in node.names}
    modules = {alias.asname or alias.name for node in _of(ast.Import, nodes) for alias in node.names if alias.name == "solution"}
    attributes = (node for node in _of(ast.Attribute, nodes) if isinstance(node.value, ast.Name) and node.value.id in modules)
    used = {node.attr for node in attributes if not hasattr(builtins, node.attr)}
    return (imported | used) - {"*"}


def _classes(nodes: Nodes, names: set[str], entry_point: str) -> set[str]:
    """The names that must be classes, as the tests or the setup write them."""
    checked = {
        part.id
        for node in _of(ast.Call, nodes)
        if isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "issubclass") and len(node.args) == 2
        for part in ast.walk(node.args[1])
        if isinstance(part, ast.Name)
    }
    defined = {node.name for node in _of(ast.ClassDef, nodes)}
    capitalised = {name for name in names if name.lstrip("_")[:1].isupper()}
    if entry_point in capitalised:
        variables = _variables(nodes, {entry_point})
        if not any(_roots(node.value, {entry_point}, variables) for node in _of(ast.Attribute, nodes)):
            capitalised.discard(entry_point)  # a function may have such a name; what has attributes is a class
    return names & (checked | defined | capitalised)


def _operators(nodes: Nodes, classes: set[str]) -> frozenset[tuple[str, str]]:
    """The classes to whose instances the tests apply an operator, with the operator. One whose operands are all objects of the
    candidate needs no mention: it is always allowed."""
    if not classes:
        return frozenset()
    variables = _variables(nodes, classes)
    found: set[tuple[str, str]] = set()
    for names, operands in _applied(nodes):
        roots = [_roots(operand, classes, variables) for operand in operands]
        if len(roots) == 1 or not all(roots):
            found |= {(cls, name) for cls in set().union(*roots) for name in names}
    return frozenset(found)


def _variables(nodes: Nodes, classes: set[str]) -> Variables:
    """What each variable is assigned, in order: where that takes effect, and the classes of which it is an instance."""
    variables: Variables = {}
    for target, value, end in sorted(_assignments(nodes), key=lambda one: one[2]):
        known = variables.setdefault(ast.unparse(target), [])
        if not known or known[-1][0] != end:
            known.append((end, set()))
        known[-1][1].update(_roots(value, classes, variables))
    return variables


def _end(node: ast.expr | ast.stmt) -> tuple[int, int]:
    return node.end_lineno or 0, node.end_col_offset or 0


def _held(node: ast.expr, variables: Variables) -> set[str]:
    """The classes of which a variable holds an instance where it is used. A variable is seen as used again for something else;
    one that is assigned further down, as in `setUp`, holds whatever it ever does."""
    known = variables.get(ast.unparse(node), [])
    before = [roots for end, roots in known if end <= (node.lineno, node.col_offset)]
    return before[-1] if before else set().union(*(roots for _, roots in known))


def _roots(node: ast.expr, classes: set[str], variables: Variables) -> set[str]:
    """The classes that an expression visibly is, or visibly is an instance of."""
    if isinstance(node, ast.Name) and node.id in classes:
        return {node.id}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return {node.func.id} if node.func.id in classes else _held(node.func, variables)
    if isinstance(node, ast.BinOp):
        return _roots(node.left, classes, variables) | _roots(node.right, classes, variables)
    if isinstance(node, ast.UnaryOp):
        return _roots(node.operand, classes, variables)
    if isinstance(node, ast.Name | ast.Attribute) and variables:
        return _held(node, variables)
    return set()


def _assignments(nodes: Nodes) -> Iterator[tuple[ast.expr, ast.expr, tuple[int, int]]]:
    """What is assigned to what, and where that takes effect. The items of a loop take effect at one place."""
    for node in _of(ast.Assign, nodes):
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple) and len(target.elts) == len(node.value.elts):
                yield from ((one, value, _end(node)) for one, value in zip(target.elts, node.value.elts, strict=True))
            yield target, node.value, _end(node)
    yield from ((node.target, node.value, _end(node)) for node in _of(ast.NamedExpr, nodes))
    for item in _of(ast.withitem, nodes):
        if item.optional_vars:
            yield item.optional_vars, item.context_expr, _end(item.optional_vars)
    for function in _of(ast.FunctionDef, nodes):  # a helper, or a fixture, whose name is a parameter of tests
        for result in ast.walk(function):
            if isinstance(result, ast.Return | ast.Yield) and result.value is not None:
                yield ast.Name(id=function.name), result.value, _end(result)
    for loop in _of(ast.For, nodes):
        if isinstance(loop.iter, ast.List | ast.Tuple):
            yield from ((loop.target, item, _end(loop.iter)) for item in loop.iter.elts)


def _applied(nodes: Nodes) -> Iterator[tuple[tuple[str, ...], Sequence[ast.expr]]]:
    """Every operator other than `==`, `is` and `not`, by the names that it has in `Proxy`, with its operands; and every
    method that has the name of one of plain data's."""
    for node in nodes:
        if isinstance(node, ast.BinOp):
            yield _OF_SYNTAX[type(node.op)], (node.left, node.right)
        elif isinstance(node, ast.UnaryOp):
            yield _OF_SYNTAX.get(type(node.op), ()), (node.operand,)
        elif isinstance(node, ast.Compare):
            sides = (node.left, *node.comparators)
            yield from ((_OF_SYNTAX.get(type(op), ()), sides[at : at + 2]) for at, op in enumerate(node.ops))
        elif isinstance(node, ast.Subscript):
            yield ("getitem",), (node.value,)
        elif isinstance(node, ast.Dict):  # {**value}
            yield from ((("getitem",), (value,)) for key, value in zip(node.keys, node.values, strict=True) if key is None)
        elif isinstance(node, ast.Attribute) and node.attr in METHODS:
            yield (node.attr,), (node.value,)
        elif isinstance(node, ast.AugAssign):
            yield _OF_SYNTAX[type(node.op)], (node.target, node.value)
        elif isinstance(node, ast.Call):
            yield _of_function(node.func), node.args


def _of_function(function: ast.expr) -> tuple[str, ...]:
    if isinstance(function, ast.Name):
        return _OF_FUNCTIONS.get(function.id, ())
    return _OF_ASSERTIONS.get(function.attr, ()) if isinstance(function, ast.Attribute) else ()


def _of(kind: type[Node], nodes: Nodes) -> Iterator[Node]:
    return (node for node in nodes if isinstance(node, kind))
