"""The kind `format`: 1 if the answer has the wanted form, else 0.

    {"kind": "format", "pattern": "<think>.*</think>\\s*<answer>.*</answer>", "of": "completion"}

The regular expression must match all of the text, and a dot matches a line break too. `of` names the text: `answer` is what
follows the reasoning, and `completion` is all that the model wrote.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import regex  # type: ignore[import-untyped]

from reward.kinds.fields import read_text, refuse_unknown
from reward.kinds.kind import Answer, Defaults, Resources, Task, TaskError
from reward.kinds.thoughts import Tags, answer_after, never_ends
from rollout.ledger.records import Verdict

MATCH_S = 1.0  # some patterns take exponential time; Python's own `re` has no deadline
OF = ("answer", "completion")


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatTask(Task):
    figures: ClassVar[Mapping[str, float]] = {}

    pattern: "regex.Pattern[str]"
    of: str
    reasoning: tuple[Tags, ...]

    def grade(self, answer: Answer, resources: Resources) -> Verdict:
        text = answer.completion if self.of == "completion" else answer_after(answer.text, self.reasoning)
        if text is None:
            return Verdict(reward=0.0, reason=never_ends(answer.text, self.reasoning))
        try:
            matches = self.pattern.fullmatch(text, timeout=MATCH_S, concurrent=True) is not None
        except TimeoutError:
            return Verdict(reward=0.0, reason=f"the pattern was not matched within {MATCH_S:g} s")
        return Verdict(reward=float(matches), reason="" if matches else f"the {self.of} does not match the pattern")


def read_format_task(data: Mapping[str, Any], defaults: Defaults) -> FormatTask:
    refuse_unknown(data, "pattern", "of")
    pattern = read_text(data.get("pattern"), "task.pattern")
    try:
        compiled = regex.compile(pattern, regex.DOTALL)
    except regex.error as error:
        raise TaskError(f"task.pattern: {pattern!r:.80} is no regular expression: {error}") from None
    if (of := data.get("of", "answer")) not in OF:
        raise TaskError(f"task.of: {of!r:.80} is not known: use one of {', '.join(OF)}")
    return FormatTask(pattern=compiled, of=of, reasoning=defaults.reasoning)
