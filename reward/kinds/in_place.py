"""Which arguments test code looks at after a call that may have changed them.

A call that returns a value leaves its arguments as they were for the tests, because the tests may compute from them what they
expect: a candidate that empties a list must not pass `assert f(xs) == sorted(xs)`. Some tests do look at what the call has left
in an argument, as after `k = remove(nums, 3)` in `assert nums[:k] == [2, 2]`. The contents of such a variable are compared with
what does not depend on it.
"""

import ast
import builtins

Function = ast.FunctionDef | ast.AsyncFunctionDef
Sides = list[tuple[ast.AST, ast.AST]]
TOP = "<module>"
_BUILTINS = frozenset(vars(builtins))
_COPYING = ("list", "dict", "set", "tuple", "frozenset", "bytearray", "sorted", "copy", "deepcopy")


def looked_at(trees: tuple[ast.Module, ...]) -> list[tuple[str, str]]:
    """The variables, each with the name of the function that they belong to, or TOP."""
    return sorted({(scope, name) for tree in trees for scope, nodes in _scopes(tree) for name in _of_scope(nodes)})


def _scopes(tree: ast.Module) -> list[tuple[str, list[ast.AST]]]:
    """What belongs to the top and to each function, without the functions inside."""
    found: list[tuple[str, list[ast.AST]]] = [(TOP, [])]
    waiting: list[tuple[ast.AST, list[ast.AST]]] = [(tree, found[0][1])]
    while waiting:
        node, scope = waiting.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Function):
                found.append((child.name, []))
                waiting.append((child, found[-1][1]))
            else:
                scope.append(child)
                waiting.append((child, scope))
    return found


def _of_scope(nodes: list[ast.AST]) -> set[str]:
    if not (passed := _first_calls(nodes)):
        return set()
    assigned = _assigned(nodes, passed)
    looked_at: set[str] = set()
    computed_from: set[str] = set()  # both what the candidate returns and what it is compared with
    for one, other in _compared(nodes):
        looked_at |= _shown(one) - _sources(other, assigned)
        computed_from |= (_sources(one, assigned) - _shown(one)) & _sources(other, assigned)
    return looked_at - computed_from


def _compared(nodes: list[ast.AST]) -> Sides:
    sides: Sides = [(node.left, node.comparators[0]) for node in nodes if isinstance(node, ast.Compare)]
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.startswith("assert"):
            sides += [(node.args[0], node.args[1])] if len(node.args) > 1 else []
    return sides + [(right, left) for left, right in sides]


def _assigned(nodes: list[ast.AST], passed: dict[str, int]) -> dict[str, set[str]]:
    """The variables that each variable is computed from. A copy that is made before a call depends on nothing that it changes."""
    found: dict[str, set[str]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign):
            sources = _names(node.value)
            if _is_copy(node.value):
                sources -= {name for name, line in passed.items() if node.lineno < line}
            for name in (part.id for target in node.targets for part in ast.walk(target) if isinstance(part, ast.Name)):
                found.setdefault(name, set()).update(sources)
    return found


def _is_copy(node: ast.expr) -> bool:
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, ast.Slice)
    return isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in _COPYING


def _first_calls(nodes: list[ast.AST]) -> dict[str, int]:
    """The variables that are passed to a function which may change them, with the line where they first are."""
    found: dict[str, int] = {}
    for node in nodes:
        if (
            isinstance(node, ast.Call)
            and not _is_copy(node)
            and not (isinstance(node.func, ast.Name) and node.func.id in _BUILTINS)
        ):
            for name in set().union(*map(_names, (*node.args, *(keyword.value for keyword in node.keywords)))):
                found[name] = min(node.lineno, found.get(name, node.lineno))
    return found


def _sources(node: ast.AST, assigned: dict[str, set[str]]) -> set[str]:
    """The variables that an expression is computed from."""
    found: set[str] = set()
    new = _names(node)
    while new:
        found |= new
        new = {source for name in new for source in assigned.get(name, ())} - found
    return found


def _shown(node: ast.AST) -> set[str]:
    """The variables whose contents an expression shows: not those that it passes to the candidate."""
    if isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id in _BUILTINS):
        return set()
    own = {node.id} - _BUILTINS if isinstance(node, ast.Name) else set()
    return own.union(*(_shown(child) for child in ast.iter_child_nodes(node)))


def _names(node: ast.AST) -> set[str]:
    """The variables in an expression, other than those that say which part of it is meant."""
    own = {node.id} - _BUILTINS if isinstance(node, ast.Name) else set()
    parts = [node.value] if isinstance(node, ast.Subscript) else ast.iter_child_nodes(node)
    return own.union(*(_names(part) for part in parts))
