"""Sets of contest problems: APPS, TACO, CodeContests, LiveCodeBench.

APPS, TACO       {"question", "input_output": JSON of {"inputs", "outputs", "fn_name"?}, "solutions": JSON list, "starter_code"}
CodeContests     {"name", "description", "public_tests": {"input", "output"}, "private_tests", "generated_tests",
                  "solutions": {"language", "solution"}}
LiveCodeBench    {"question_id", "question_content", "public_test_cases": JSON list of {"input", "output", "testtype"},
                  "private_test_cases": the same, also packed, "starter_code", "metadata": JSON of {"func_name"}}

Where a row says how much time or memory a test may use, its task says so too (`contest_limits`).
"""

import base64
import binascii
import json
import pickletools
import zlib
from typing import Any

from reward.readers.contest_limits import contest_limits
from reward.readers.draft import ASK_FUNCTION, ASK_PROGRAM, Draft, Options, Row, RowRefused, as_json, text_of, user
from reward.readers.pairs import calls_tasks, stdio_task

SOLUTIONS = 3  # at most this many solutions per problem are tried
MODULES = (
    "bisect", "collections", "copy", "datetime", "functools", "heapq", "itertools", "json", "math", "operator", "random", "re",
    "statistics", "string", "sys", "typing",
)  # fmt: skip
STARTER_SETUP = "".join(
    [
        *(f"from {module} import *\n" for module in MODULES if module not in ("json", "sys")),
        "from builtins import *\n",  # math.pow and others do not take the place of Python's own
        f"import {', '.join(MODULES)}\n",
        "sys.setrecursionlimit(50_000)\n",
    ]
)
"""The imports that a contest's site adds to a starter such as `class Solution`: people write `List` and `inf` without any."""

PYTHON3 = (3, "PYTHON3")  # in CodeContests


def read_apps(row: Row, options: Options) -> Draft:
    tests = as_json(row.get("input_output"), "input_output")
    if not isinstance(tests, dict):
        raise RowRefused("no `input_output`")
    starter, function = text_of(row, "starter_code", default=""), tests.get("fn_name")
    solutions = as_json(row.get("solutions") or [], "solutions")
    return Draft(
        id=f"apps-{row['problem_id']}" if "problem_id" in row else None,
        messages=ask(text_of(row, "question", "description"), starter, bool(function)),
        tasks=limited(tasks_of(tests.get("inputs"), tests.get("outputs"), function, starter, options.at_most), row),
        solutions=[solution for solution in solutions if isinstance(solution, str)][:SOLUTIONS],
    )


def read_codecontests(row: Row, options: Options) -> Draft:
    inputs: list[Any] = []
    outputs: list[Any] = []
    for key in ("public_tests", "private_tests", "generated_tests"):
        tests = as_json(row.get(key) or {}, key)
        inputs += tests.get("input", [])
        outputs += tests.get("output", [])
    solutions = as_json(row.get("solutions") or {}, "solutions")
    pairs = zip(solutions.get("language", []), solutions.get("solution", []), strict=False)
    return Draft(
        id=f"codecontests-{text_of(row, 'name')}",
        messages=user(text_of(row, "description"), ASK_PROGRAM),
        tasks=limited([stdio_task(inputs, outputs, options.at_most)], row),
        solutions=[solution for language, solution in pairs if language in PYTHON3][:SOLUTIONS],
    )


def read_livecodebench(row: Row, options: Options) -> Draft:
    tests = [*_cases(row.get("public_test_cases"), "public_test_cases")]
    tests += _cases(row.get("private_test_cases"), "private_test_cases")
    kinds = {test.get("testtype", "stdin") for test in tests}
    if len(kinds) > 1:
        raise RowRefused("tests of more than one kind")
    starter = text_of(row, "starter_code", default="")
    inputs, outputs = [test.get("input") for test in tests], [test.get("output") for test in tests]
    function = None
    if kinds == {"functional"}:
        metadata = as_json(row.get("metadata") or {}, "metadata")
        function = metadata.get("func_name")
        if not function:
            raise RowRefused("no name of the function")
        inputs = [[as_json(line, "input") for line in str(text).split("\n") if line.strip()] for text in inputs]
        outputs = [as_json(text, "output") for text in outputs]
    return Draft(
        id=f"livecodebench-{text_of(row, 'question_id', 'question_title')}",
        messages=ask(text_of(row, "question_content"), starter, bool(function)),
        tasks=limited(tasks_of(inputs, outputs, function, starter, options.at_most)[-1:], row),  # no output is wrapped here
    )


def tasks_of(inputs: Any, outputs: Any, function: Any, starter: str, at_most: int) -> list[dict[str, Any]]:
    if not function:
        return [stdio_task(inputs, outputs, at_most)]
    if not isinstance(function, str):
        raise RowRefused("the name of the function is none", repr(function)[:80])
    if "class Solution" in starter and "." not in function:
        function = f"Solution.{function}"
    tasks = calls_tasks(function, inputs, outputs, at_most)
    return [{**task, "setup": STARTER_SETUP} for task in tasks] if starter.strip() else tasks


def limited(tasks: list[dict[str, Any]], *rows: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**task, **contest_limits(*rows)} for task in tasks]


def ask(question: str, starter: str, is_function: bool) -> list[dict[str, str]]:
    given = f"Start from this code:\n\n```python\n{starter.strip()}\n```" if starter.strip() else ""
    return user(question, given, ASK_FUNCTION if is_function else ASK_PROGRAM)


def _cases(value: Any, what: str) -> list[dict[str, Any]]:
    if isinstance(value, str) and not value.lstrip().startswith("["):
        value = _unpacked(value, what)
    cases = as_json(value or [], what)
    if not isinstance(cases, list) or not all(isinstance(case, dict) for case in cases):
        raise RowRefused(f"`{what}` is not a list of tests")
    return cases


def _unpacked(value: str, what: str) -> Any:
    """LiveCodeBench packs its private tests: base64 of zlib of a pickled string of JSON. The pickle is read for that string and
    never run."""
    try:
        packed = zlib.decompress(base64.b64decode(value, validate=True))
        found = [argument for _, argument, _ in pickletools.genops(packed) if isinstance(argument, str)]
        return json.loads(found[0])
    except (binascii.Error, zlib.error, ValueError, LookupError, RecursionError) as error:
        raise RowRefused(f"`{what}` cannot be unpacked", str(error)[:80]) from None
