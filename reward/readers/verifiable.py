"""Sets whose rows carry what verifies an answer: `verification_info` (PRIME, SYNTHETIC-1) or `ground_truth` (Eurus, verl).

    {"prompt", "verification_info": {"test_cases": [{"type", "fn_name"?, "input", "output"}]}, "gold_standard_solution"?}
    {"prompt", "reward_model": {"ground_truth": {"inputs", "outputs", "fn_name"?}}}
    {"prompt", "ground_truth": ["assert f(1) == 2", …]}

Each may be an object, or JSON or a Python literal in a string. `prompt` is text or a list of messages.
"""

import ast
from typing import Any

from reward.kinds.extract import blocks
from reward.readers.contests import limited, tasks_of
from reward.readers.draft import Draft, RowRefused, as_json, text_of, user
from reward.readers.mbpp import entry_point


def read_verifiable(row: dict[str, Any], at_most: int) -> Draft:
    info = _info(row)
    solution = text_of(row, "gold_standard_solution", "solution", default="")
    found = blocks(solution)
    code = found[-1].code if found else solution
    if isinstance(info, list) or (isinstance(info, dict) and isinstance(info.get("functional"), str)):
        tasks = [_asserts_task(info if isinstance(info, list) else [info["functional"]], code)]
    elif isinstance(info, dict):
        tasks = limited(_tests_tasks(info, at_most), info, row)
    else:
        raise RowRefused("what verifies an answer is not tests", repr(info)[:80])
    return Draft(
        id=text_of(row, "problem_id", "id", "task_id", default="") or _index(row),
        messages=_messages(row),
        tasks=tasks,
        solutions=[code] if code.strip() else [],
    )


def _info(row: dict[str, Any]) -> Any:
    value = row.get("verification_info") or row.get("ground_truth") or (row.get("reward_model") or {}).get("ground_truth")
    if value is None:
        raise RowRefused("neither `verification_info` nor `ground_truth`")
    value = _object(value)
    if isinstance(value, dict) and "ground_truth" in value:
        value = _object(value["ground_truth"])
    return value


def _object(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return as_json(value, "verification_info")
    except RowRefused:
        try:
            return ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise RowRefused("what verifies an answer is neither JSON nor a literal", value[:80]) from None


def _tests_tasks(info: dict[str, Any], at_most: int) -> list[dict[str, Any]]:
    language = info.get("language") or "python"
    if not str(language).lower().startswith("python"):
        raise RowRefused("another language than Python", str(language))
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
    return tasks_of(inputs, outputs, function, "", at_most)


def _asserts_task(tests: list[Any], code: str) -> dict[str, Any]:
    if not tests or not all(isinstance(test, str) for test in tests):
        raise RowRefused("`ground_truth` is not a list of assertions")
    return {"kind": "asserts", "entry_point": entry_point(tests, code), "tests": tests}


def _messages(row: dict[str, Any]) -> list[dict[str, str]]:
    prompt = row.get("prompt") or row.get("messages")
    if isinstance(prompt, list) and prompt and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt):
        return [{"role": str(message["role"]), "content": str(message["content"])} for message in prompt]
    return user(text_of(row, "prompt", "question", "problem"))


def _index(row: dict[str, Any]) -> str:
    extra = row.get("extra_info") or {}
    if not isinstance(extra, dict) or "index" not in extra:
        raise RowRefused("no id")
    return "-".join(str(part) for part in (row.get("data_source"), extra.get("split"), extra["index"]) if part is not None)
