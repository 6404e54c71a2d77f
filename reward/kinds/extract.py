"""Code out of a completion. Pure, never raises, and linear in the length of the text.

Reasoning comes first and does not count (`thoughts.py`).

With a prefill (the beginning of the answer, which the prompt already held) the completion continues it, and the program is
`prefill + completion` up to the end of that code. Without a prefill the program is the last fenced block that defines what the
tests ask for, so that an example of its use may follow; otherwise the last block tagged as Python, otherwise the last without a
tag. A block that never closes reaches to the end of the text.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from reward.kinds.thoughts import KNOWN, Tags, closing_pattern, end_of_thoughts, never_ends

MAX_CODE_BYTES = 1 << 19
_PYTHON_TAG = re.compile(r"(?:i?python|pypy|pycon|py|sage)[\d.]*(?![a-z\d_])|.*\.py$")
_LONGEST_TAG = 100
_DEFINITION = re.compile(
    r"^[ \t]*(?:(?:async[ \t]+)?def|class)[ \t]+(\w+)|^(\w+)[ \t]*(?::[^=\n]*)?=(?!=)", re.MULTILINE
)  # one for all names, because compiling it costs more than searching
_FENCE = re.compile(r"^([ \t]*)(?:([^`\s][^`\n]*)(?=`))?(`{3,}(?=[^`\n]*$)|~{3,})(.*)$", re.MULTILINE)
_LIST_ITEM = re.compile(r"(?:[-*+]|\d{1,3}[.)])[ \t]+")
_NO_TAG = re.compile(r"[^\w\s{.]|\.(?!\w)|[ \t]+\S+[ \t]")  # text behind a fence that is no tag
_DEEPEST_FENCE = 3  # blanks before a fence; with more it is a line of an indented text, such as a docstring (CommonMark)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extracted:
    """The program, or why there is none. `open_ended`: prose may follow the code without a border."""

    code: str = ""
    reason: str = ""
    open_ended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    tag: str
    code: str
    start: int  # where the code lies in the text
    end: int
    closed: bool


def extract(completion: str, *, prefill: str = "", defines: str = "", tags: tuple[Tags, ...] = KNOWN) -> Extracted:
    """The program in `completion`. `defines` is the name of the function or class that the tests ask for; `tags`
    are those around reasoning."""
    if not (prefill + completion).strip():
        return Extracted(reason="the completion is empty")
    start = end_of_thoughts(prefill + completion, tags)
    if start is None:
        return Extracted(reason=never_ends(prefill + completion, tags))
    completion = completion[max(0, start - len(prefill)) :]
    prefill = prefill[start:]
    found = _from_prefill(completion, prefill, defines, tags) if prefill.strip() else _from_blocks(completion, defines, tags)
    if found.reason:
        return found
    if not found.code.strip():
        return Extracted(reason="the completion holds no code")
    if len(found.code.encode("utf-8", "surrogatepass")) > MAX_CODE_BYTES:
        return Extracted(reason=f"the code is longer than {MAX_CODE_BYTES} bytes")
    if "\0" in found.code:
        return Extracted(reason="the code holds null bytes")
    return found


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a Markdown text, in order."""
    found: list[Block] = []
    opening: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        if opening is None:
            opening = fence if _opens(fence) else None
        elif _closes(fence, opening):
            found.append(_block(text, opening, fence.start(), closed=True))
            opening = None
    if opening is not None:
        found.append(_block(text, opening, len(text), closed=False))
    return found


def _opens(fence: re.Match[str]) -> bool:
    """Behind other text, as in `<answer>```python`, only a fence with a tag of Python opens a block."""
    before, tag = fence[2], _tag(fence[4])
    return not before or _LIST_ITEM.fullmatch(before) is not None or _PYTHON_TAG.match(tag) is not None


def _closes(fence: re.Match[str], opening: re.Match[str]) -> bool:
    """A block of Python also ends at a fence that other text follows, as in "```</answer>"."""
    if fence[2] or not fence[3].startswith(opening[3]) or _indent(fence) > _indent(opening) + _DEEPEST_FENCE:
        return False
    is_python = _PYTHON_TAG.match(_tag(opening[4])) is not None
    return not fence[4].strip() or (is_python and _NO_TAG.match(fence[4]) is not None)


def _indent(fence: re.Match[str]) -> int:
    return len(fence[1].expandtabs(4))


def _block(text: str, opening: re.Match[str], end: int, *, closed: bool) -> Block:
    start = min(opening.end() + 1, end)
    code = text[start:end]
    if not closed and opening.end() < end:
        code += "\n"
    margin = len(opening[1])
    if opening[2] and _LIST_ITEM.fullmatch(opening[2]) and code.startswith(" " * (margin + len(opening[2]))):
        margin += len(opening[2])
    if margin:
        code = "\n".join(line[min(margin, len(line) - len(line.lstrip(" \t"))) :] for line in code.split("\n"))
    return Block(tag=_tag(opening[4]), code=code, start=start, end=end, closed=closed)


def _tag(info: str) -> str:
    words = info[:_LONGEST_TAG].strip().strip("{}").lstrip(".").replace(",", " ").split()
    return words[0].lower() if words else ""


def _from_blocks(text: str, defines: str, tags: tuple[Tags, ...]) -> Extracted:
    found = _without_thoughts(text, blocks(text), defines, tags)
    if block := _choose(found, defines):
        return Extracted(code=block.code)
    if found:
        languages = ", ".join(sorted({block.tag[:20] for block in found}))
        return Extracted(reason=f"no Python code block: only {languages}"[:200])
    return Extracted(reason="no code block")


def _without_thoughts(text: str, found: Sequence[Block], defines: str, tags: tuple[Tags, ...]) -> Sequence[Block]:
    """The blocks of the answer, in a text whose reasoning the prompt may have opened. A program, or prose behind it, may also
    hold a closing tag such as `</think>`: it ends the reasoning only if an answer follows, or if it stands on its own line
    outside of code."""
    inside = iter(found)
    block = next(inside, None)
    for tag in closing_pattern(tags).finditer(text):
        while block is not None and block.end <= tag.start():
            block = next(inside, None)
        is_code, is_alone = block is not None and block.start <= tag.start(), tag[1] is not None
        if is_alone or not is_code:
            behind = blocks(text[tag.end() :])
            return behind if _holds_answer(behind, defines) or (not is_code and is_alone) else found
    return found


def _holds_answer(found: Sequence[Block], defines: str) -> bool:
    answers = (block for block in found if block.code.strip() and (block.closed or _PYTHON_TAG.match(block.tag)))
    return any(not defines or _defines(block, defines) for block in answers)


def _choose(found: Sequence[Block], defines: str) -> Block | None:
    python = [block for block in found if _PYTHON_TAG.match(block.tag)]
    untagged = [block for block in found if not block.tag]
    for candidates in (python, untagged) if defines else ():
        if block := next((block for block in reversed(candidates) if _defines(block, defines)), None):
            return block
    return next(reversed(python or untagged), None)


def _defines(block: Block, name: str) -> bool:
    return any(name in found.groups() for found in _DEFINITION.finditer(block.code))


def _from_prefill(completion: str, prefill: str, defines: str, tags: tuple[Tags, ...]) -> Extracted:
    """A prefill may itself open a block; then the block decides. Otherwise a fence can only end the code, unless the
    completion starts over in a block of its own."""
    opened = blocks(prefill)
    if opened:
        inside = blocks(prefill + completion)
        block = inside[len(opened) - 1]
        return Extracted(code=block.code, open_ended=not block.closed)
    border = next(
        (fence.start() for fence in _FENCE.finditer(completion) if not fence[2] and _indent(fence) <= _DEEPEST_FENCE), None
    )
    if border is not None and not completion[:border].strip():
        return _from_blocks(completion, defines, tags)
    return Extracted(code=prefill + completion[:border], open_ended=True)
