"""Reasoning comes before an answer and is no part of it. Pure, never raises, and linear in the length of the text.

A completion that opens with a tag such as `<think>` holds reasoning up to the tag that closes it. Where it never closes, there is
no answer. The prompt may have opened the reasoning; then the completion only holds the closing tag.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

AUTO, NONE = "auto", "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """How a model family marks where its reasoning begins and ends."""

    opening: str
    closing: str


KNOWN = (
    Tags(opening="<think>", closing="</think>"),  # DeepSeek-R1, Qwen3, GLM, MiniMax, Phi-4 and most others
    Tags(opening="<thinking>", closing="</thinking>"),
    Tags(opening="<thought>", closing="</thought>"),  # EXAONE Deep
    Tags(opening="<reasoning>", closing="</reasoning>"),
    Tags(opening="<seed:think>", closing="</seed:think>"),  # Seed-OSS
    Tags(opening="[THINK]", closing="[/THINK]"),  # Magistral
    Tags(opening="◁think▷", closing="◁/think▷"),  # Kimi
    Tags(opening="<|begin_of_thought|>", closing="<|end_of_thought|>"),  # Sky-T1
)


@lru_cache(maxsize=64)
def read_tags(rule: str) -> tuple[Tags, ...]:
    """The tags that `reasoning` names: `auto`, `none`, or an opening and a closing tag. Raises ValueError."""
    if rule in (AUTO, NONE):
        return KNOWN if rule == AUTO else ()
    words = rule.split()
    if len(words) != 2 or words[0] == words[1]:
        raise ValueError(f"{rule!r:.80} must be auto, none, or two different tags with a blank between, as in '<plan> </plan>'")
    return (Tags(opening=words[0], closing=words[1]),)


def never_ends(text: str, tags: Sequence[Tags]) -> str:
    """The reason for a text whose reasoning never ends."""
    opened = next((one for one in tags if text.lstrip().startswith(one.opening)), None)
    return f"the reasoning never ends: there is no {opened.closing if opened else 'end'}"


def end_of_thoughts(text: str, tags: Sequence[Tags]) -> int | None:
    """Where the answer starts in a text that opens with its reasoning; None where the reasoning never ends."""
    start = 0
    while opened := _opening(text, start, tags):
        end = text.find(opened.closing, start)
        if end < 0:
            return None
        start = end + len(opened.closing)
    return start


def answer_after(text: str, tags: Sequence[Tags]) -> str | None:
    """The text without its reasoning; None where the reasoning never ends."""
    start = end_of_thoughts(text, tags)
    if start is None:
        return None
    closings = ((text.find(one.closing, start), one) for one in tags)
    found = min(((at, one) for at, one in closings if at >= 0), key=lambda pair: pair[0], default=None)
    if found and text.find(found[1].opening, start, found[0]) < 0:  # the prompt opened it
        start = found[0] + len(found[1].closing)
    return text[start:]


@lru_cache(maxsize=64)
def closing_pattern(tags: tuple[Tags, ...]) -> re.Pattern[str]:
    """Matches a closing tag; group 1 is there where the tag stands alone on its line."""
    closing = "|".join(re.escape(one.closing) for one in tags) or r"(?!)"
    return re.compile(rf"(^[ \t]*)?(?:{closing})(?(1)[ \t]*$)", re.MULTILINE)


def _opening(text: str, start: int, tags: Sequence[Tags]) -> Tags | None:
    """The tag that opens the text behind `start`, but for white space."""
    while start < len(text) and text[start].isspace():
        start += 1
    return next((one for one in tags if text.startswith(one.opening, start)), None)
