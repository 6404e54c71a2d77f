"""Rows that carry what verifies an answer: tests, or the answer itself.

    {"question", "answer": "… #### 72"}                                           GSM8K
    {"problem", "solution": "… $\\boxed{\\frac{1}{2}}$.", "level", "type"}          MATH
    {"prompt", "answer" or "ground_truth" or "solution"}                          TRL, prime-rl, Eurus
    {"prompt", "verification_info": {"test_cases": [{"type", "fn_name"?, "input", "output"}]}}      PRIME, SYNTHETIC-1
    {"prompt", "reward_model": {"ground_truth"}, "data_source", "ability", "extra_info"}            verl

`verification_info` and a ground truth may be objects, or JSON or a Python literal in a string. Tests are told by their form; what
is no test is an answer in mathematics. In a row of verl, it is one only where the row says so.
"""

import ast
from typing import Any

from reward.kinds.extract import blocks
from reward.readers.answers import math_task, prompt_of
from reward.readers.contests import limited, tasks_of
from reward.readers.draft import Draft, Options, Row, RowRefused, as_json, text_of
from reward.readers.mbpp import entry_point

ANSWERS = ("answer", "final_answer", "expected_answer", "ground_truth", "solution")
MATH_SOURCES = (
    "openai/gsm8k", "lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500", "math", "math_dapo",
    "math_dapo_reasoning", "numina_aops_forum", "numina_synthetic_math", "numina_amc_aime", "numina_synthetic_amc",
    "numina_cn_k12", "numina_olympiads",
)  # fmt: skip
"""What verl itself grades as mathematics, beside the sources that begin with `aime`."""
TESTS = frozenset(("inputs", "outputs", "test_cases", "functional"))  # an object of tests has one of these


def read_answer(row: Row, options: Options) -> Draft:
    column = next((name for name in ANSWERS if row.get(name) not in (None, "")), "")
    if not column:
        raise RowRefused("no answer")
    return _draft(row, row[column], column, options, text_of(row, "solution", default=""))


def read_verification_info(row: Row, options: Options) -> Draft:
    info = _object(row["verification_info"], "verification_info")
    truth = info.get("ground_truth", info) if isinstance(info, dict) else info
    return _draft(row, truth, "verification_info", options, text_of(row, "gold_standard_solution", default=""))


def read_verl(row: Row, options: Options) -> Draft:
    model, source = row["reward_model"], str(row.get("data_source", ""))
    if row.get("images") or row.get("videos"):
        raise RowRefused("images and videos are not supported")
    if not isinstance(model, dict) or model.get("ground_truth") is None:
        raise RowRefused("`reward_model` has no `ground_truth`; set data.task to grade these rows in another way")
    truth = model["ground_truth"]
    is_math = source in MATH_SOURCES or source.startswith("aime") or str(row.get("ability", "")).lower() == "math"
    if not is_math and not _are_tests(_object_or_text(truth)):
        raise RowRefused(f"no grader is known for data_source {source!r}; set data.task, or data.reader to give each row a task")
    return _draft(row, truth, "ground_truth", options)


def _draft(row: Row, truth: Any, column: str, options: Options, solution: str = "") -> Draft:
    tests = _object_or_text(truth)
    if not _are_tests(tests):
        return Draft(messages=prompt_of(row), tasks=[math_task(truth, column)], solutions=[solution] if solution else [])
    found = blocks(solution)
    code = found[-1].code if found else solution
    return Draft(
        id=text_of(row, "problem_id", "id", "task_id", default="") or None,
        messages=prompt_of(row),
        tasks=[_asserts_task(tests, code)] if isinstance(tests, list) else _tests_tasks(tests, row, code, options.at_most),
        solutions=[code] if code.strip() else [],
    )


def _are_tests(value: Any) -> bool:
    if isinstance(value, dict):
        return not TESTS.isdisjoint(value)
    return isinstance(value, list) and any(isinstance(test, str) and "assert" in test for test in value)


def _object_or_text(value: Any) -> Any:
    """What a string holds if it is an object or a list, else the value itself."""
    if not isinstance(value, str) or not value.lstrip().startswith(("{", "[")):
        return value
    try:
        return _object(value, "ground_truth")
    except RowRefused:
        return value


def _object(value: Any, column: str) -> Any:
    try:
        return as_json(value, column)
    except RowRefused:
        try:
            return ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise RowRefused(f"`{column}` is neither JSON nor a literal", value[:80]) from None


def _tests_tasks(info: Row, row: Row, code: str, at_most: int) -> list[dict[str, Any]]:
    language = info.get("language") or "python"
    if not str(language).lower().startswith("python"):
        raise RowRefused("another language than Python", str(language))
    if isinstance(info.get("functional"), str):
        return [_asserts_task([info["functional"]], code)]
    inputs, outputs, function = info.get("inputs"), info.get("outputs"), info.get("fn_name")
    if (cases := info.get("test_cases")) is not None:
        if not isinstance(cases, list) or not all(isinstance(case, dict) for case in cases):
            raise RowRefused("`test_cases` is not a list of tests")
        inputs, outputs = [case.get("input") for case in cases], [case.get("output") for case in cases]
        names = {case.get("fn_name") for case in cases if case.get("type") != "stdin_stdout"} - {None, ""}
        if len(names) > 1:
            raise RowRefused("tests of more than one kind")
        function = next(iter(names), None)
        if function:
            inputs, outputs = ([as_json(value, "test_cases") for value in side] for side in (inputs, outputs))
    return limited(tasks_of(inputs, outputs, function, "", at_most), info, row)


def _asserts_task(tests: list[Any], code: str) -> dict[str, Any]:
    if not all(isinstance(test, str) for test in tests):
        raise RowRefused("`ground_truth` is not a list of assertions")
    return {"kind": "asserts", "entry_point": entry_point(tests, code), "tests": tests}
