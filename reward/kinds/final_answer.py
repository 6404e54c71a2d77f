"""The final answer out of what a model wrote. Pure, never raises, and linear in the length of the text.

A text has one final answer or none. What the model wrote before it counts for nothing, so no completion gains by many answers.
"""

import re

FORMATS = ("auto", "boxed", "number", "letter")
"""`auto`: the last box; otherwise what follows the last "the answer is"; otherwise the last number."""

_BOX = re.compile(r"\\f?boxed\s*(\{|[^\s{}\\])")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_CUE = re.compile(r"####[ \t]*|\banswer[ \t*_]*(?:is|are|was|:|=)(?:[ \t]+(?:is|are)\b)?[\s:*_]*", re.IGNORECASE)
_END_OF_CUE = re.compile(r"\n|\.(?=\s|$)|[,;][ \t]+(?=[A-Za-z])|[ \t]+(?:because|since|as|which|where)\b")
_INLINE = re.compile(r"\$\$(.+?)\$\$|\$(?![\d,.]+(?:\s|$))(.+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?"
_NUMBER = re.compile(
    r"(?:(?<![\w)\]}])[-+\u2212])?(?:\\?\$[ ]?)?"
    rf"(?:\\[dt]?frac\{{-?\d+\}}\{{\d+\}}|(?:{_DIGITS}|\.\d+)(?:/\d+)?)(?:\s?\\?%)?",
    re.ASCII,
)
_LETTER = re.compile(r"\(?([A-Z])(?:[).:]|$|\s)")
_ONLY_LETTER = re.compile(r"\(?([A-Z])[).:]*")
_FONTS = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\b|[{}$*_\\]")
_LETTER_IN_BRACKETS = re.compile(r"\(([A-Z])\)")
_LONGEST_CUE = 1000  # characters


def final_answer(text: str, form: str) -> str:
    """The final answer, or the empty string."""
    match form:
        case "boxed":
            return boxed(text)
        case "number":
            return last_number(text)
        case "letter":
            return option_letter(text)
        case _:
            return boxed(text) or after_cue(text) or last_number(text)


def boxed(text: str) -> str:
    r"""What the last `\boxed{…}` holds; nothing if it never closes."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    box = _BOX.match(text, start) if start >= 0 else None
    if box is None:
        return ""
    if box[1] != "{":
        return box[1]  # `\boxed 5`
    depth = 1
    for brace in _BRACE.finditer(text, box.end()):
        depth += (brace[0] == "{") - (brace[0] == "}")
        if not depth:
            return text[box.end() : brace.start()].strip()
    return ""


def after_cue(text: str) -> str:
    """What follows the last "the answer is", "answer:" or "####", up to the end of its sentence."""
    *_, end_of_cue = (0, *(cue.end() for cue in _CUE.finditer(text)))
    said = text[end_of_cue : end_of_cue + _LONGEST_CUE] if end_of_cue else ""
    if formula := _INLINE.match(said):
        return next(group for group in formula.groups() if group).strip()
    end = _END_OF_CUE.search(said)
    return said[: end.start() if end else None].strip(" \t*_`")


def last_number(text: str) -> str:
    *_, number = ("", *(found[0] for found in _NUMBER.finditer(text)))
    return number


def option_letter(text: str) -> str:
    """The letter of an option: in a box, after "the answer is", as all of the last line, or last in brackets."""
    for place in (boxed(text), after_cue(text)):
        if letter := _LETTER.match(_bare(place)):
            return letter[1]
    if letter := _ONLY_LETTER.fullmatch(_bare(text.strip().rpartition("\n")[2])):
        return letter[1]
    in_brackets = _LETTER_IN_BRACKETS.findall(text)
    return str(in_brackets[-1]) if in_brackets else ""


def _bare(text: str) -> str:
    """Without fonts and the word "option"."""
    return _FONTS.sub("", text).strip().removeprefix("option ").removeprefix("Option ")
