"""Code out of a completion.

With a prefill (the beginning of the answer, which the prompt already held) the completion goes on from it, and the program is
`prefill + completion` up to the end of that code. Without one the program is the last fenced block: one tagged as Python if
there is any, else one without a tag. A block that never closes reaches to the end of the text.
"""

from dataclasses import dataclass

MAX_CODE_BYTES = 1 << 19
PYTHON_TAGS = frozenset(("python", "python3", "py", "py3", "python2", "pycon", "sage", "pypy3"))
_THINK_END = "</think>"


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
    closed: bool = True


def extract(completion: str, *, prefill: str = "") -> Extracted:
    """The program in `completion`. Never raises, whatever the text."""
    found = _from_prefill(completion, prefill) if prefill else _from_blocks(completion)
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
    fence, indent, tag = "", 0, ""
    lines: list[str] = []
    for line in text.split("\n"):
        marker = _fence(line)
        if not fence and marker:
            fence, tag, lines = marker, _tag(line, marker), []
            indent = len(line) - len(line.lstrip(" \t"))
        elif fence and marker.startswith(fence) and line.strip() == marker:
            found.append(Block(tag=tag, code=_code(lines)))
            fence = ""
        elif fence:
            lines.append(_outdent(line, indent))
    if fence:
        found.append(Block(tag=tag, code=_code(lines), closed=False))
    return found


def _from_blocks(completion: str) -> Extracted:
    if not completion.strip():
        return Extracted(reason="the completion is empty")
    _, _, answer = completion.rpartition(_THINK_END)
    found = blocks(answer)
    for wanted in (PYTHON_TAGS, frozenset(("",))):
        for block in reversed(found):
            if block.tag in wanted:
                return Extracted(code=block.code)
    if found:
        tags = ", ".join(sorted({block.tag[:20] for block in found}))
        return Extracted(reason=f"no Python code block: only {tags}"[:200])
    return Extracted(reason="no code block")


def _from_prefill(completion: str, prefill: str) -> Extracted:
    """A prefill may itself open a block; then the block decides. Otherwise a fence can only end the code, unless the
    completion starts over in a block of its own."""
    opened = blocks(prefill)
    if opened:
        inside = blocks(prefill + completion)
        block = inside[len(opened) - 1]
        return Extracted(code=block.code, open_ended=not block.closed)
    lines = completion.split("\n")
    border = next((i for i, line in enumerate(lines) if _fence(line)), None)
    if border is None:
        return Extracted(code=prefill + completion, open_ended=True)
    before = "\n".join(lines[:border])
    if not before.strip():
        return _from_blocks(completion)
    return Extracted(code=prefill + before + "\n", open_ended=True)


def _fence(line: str) -> str:
    """The run of backticks or tildes that a fence line starts with, or nothing."""
    text = line.strip()
    for mark in ("`", "~"):
        run = text[: len(text) - len(text.lstrip(mark))]
        if len(run) >= 3 and "`" not in text[len(run) :]:
            return run
    return ""


def _tag(line: str, marker: str) -> str:
    words = line.strip()[len(marker) :].strip().strip("{}").lstrip(".").replace(",", " ").split()
    return words[0].lower() if words else ""


def _outdent(line: str, indent: int) -> str:
    return line[min(indent, len(line) - len(line.lstrip(" \t"))) :]


def _code(lines: list[str]) -> str:
    return "\n".join(lines) + "\n" if lines else ""
