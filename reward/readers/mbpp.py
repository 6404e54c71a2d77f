"""MBPP, in both of its common forms.

    {"task_id", "text", "code", "test_list", "test_setup_code", "challenge_test_list"}     the full set
    {"task_id", "prompt", "code", "test_imports", "test_list"}                             the sanitized one

The problem shows its tests, as it does to everybody, because the name of the function stands only there. The challenge tests are
left out. Setup code that uses what the solution defines (`root = Node(1)`) is part of each test; other setup code runs first.
"""

import ast
from typing import Any

from reward.readers.draft import ASK_FUNCTION, Draft, Options, Row, RowRefused, text_of, user


def read_mbpp(row: Row, _: Options) -> Draft:
    tests = row.get("test_list")
    if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
        raise RowRefused("`test_list` is not a list of assertions")
    code = text_of(row, "code", default="")
    name = entry_point(tests, code)
    imports, setup = row.get("test_imports"), text_of(row, "test_setup_code", default="").strip()
    if setup and _names(setup, ast.Name) & _names(code, ast.ClassDef, ast.FunctionDef):
        tests, setup = [f"{setup}\n{test}" for test in tests], ""
    if isinstance(imports, list):
        setup = "\n".join([*map(str, imports), setup]).strip()
    task: dict[str, Any] = {"kind": "asserts", "entry_point": name, "tests": tests}
    if setup:
        task["setup"] = setup + "\n"
    shown = "Your code should pass these tests:\n\n```python\n" + "\n".join(tests) + "\n```"
    return Draft(
        id=f"mbpp-{text_of(row, 'task_id')}",
        messages=user(text_of(row, "text", "prompt"), shown, ASK_FUNCTION),
        tasks=[task],
        solutions=[code] if code.strip() else [],
    )


def _names(code: str, *kinds: type[ast.AST]) -> set[str]:
    """What nodes of these kinds are called."""
    try:
        nodes = list(ast.walk(ast.parse(code)))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RowRefused("the setup code or the solution is not Python", str(error)) from None
    return {getattr(node, "id", "") or getattr(node, "name", "") for node in nodes if isinstance(node, kinds)}


def entry_point(tests: list[str], code: str) -> str:
    """The function of the solution that the first test names; without a solution, the first that it calls."""
    try:
        defined = [node.name for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)]
        nodes = list(ast.walk(ast.parse(tests[0])))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RowRefused("the tests or the solution are not Python", str(error)) from None
    called = [node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    named = [name for name in called if name in defined] or ([] if defined else called[-1:])
    if not named:
        raise RowRefused("no test calls a function of the solution")
    return named[0]
