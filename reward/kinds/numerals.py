r"""Numbers as people write them: `1,234.5`, `\$3`, `-\frac{1}{2}`, `2 1/2`, `50\%`, `12 apples`, `90^\circ`. Pure and exact.

What does not change a number is dropped: signs of currencies, degrees, a unit in letters after the number, commas between
thousands, spaces. A percent sign is remembered. Units are not compared.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_CHARACTERS = 200

_DROPPED = re.compile(
    r"\\[!,;: ]|~|\\?\$|[\u20ac\u00a3\u00a5]|\^\s*(?:\\circ|\{\s*\\circ\s*\})|\u00b0|\\degree"
    r"|\\(?:left|right)(?![a-z])|\\displaystyle|\*\*"
)
_PERCENT = re.compile(r"\s*(?:\\?%|\s(?:percent|per cent))$")
_UNIT = re.compile(r"\s*\\(?:text|mbox|mathrm|textrm|textbf|textnormal)\s*\{([^{}]*)\}(?:\^\{?\d\}?)?$")
_WORDS = re.compile(r"\s+([A-Za-z]{2,}[A-Za-z./ ]*)(?:\^\{?\d\}?)?$")
_CHANGES_VALUE = re.compile(
    r"\b(?:pi|sqrt|sin|cos|tan|cot|sec|csc|log|ln|exp|infinity|inf|infty|half|third|quarter|dozen|hundred|thousand|million|billion"
    r"|trillion|and|or|to|times|plus|minus|over|by|mod|choose|factorial|percent|squared|cubed)\b",
    re.IGNORECASE,
)
_DIGITS = r"(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)"
_FRACTION = r"\\[dtc]?frac\s*(?:\{\s*(?P<top>[-+]?\d+)\s*\}|(?P<top1>\d))\s*(?:\{\s*(?P<bottom>[-+]?\d+)\s*\}|(?P<bottom1>\d))"
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)\s*(?:(?P<whole>\d+)\s*{_FRACTION}"
    rf"|{_FRACTION.replace('(?P<', '(?P<a_')}"
    rf"|(?P<mixed>\d+)\s+(?P<over>\d+)\s*/\s*(?P<under>\d+)"
    rf"|(?P<number>{_DIGITS})(?:\s*/\s*(?P<divisor>{_DIGITS}))?)",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Numeral:
    value: Fraction
    percent: bool

    def equals(self, got: "Numeral", tolerance: float | None = None) -> bool:
        """Whether an answer is this number. 50% equals both 50 and 0.5, as people mean either; 50% equals no other percentage."""
        if _close(got.value, self.value, tolerance):
            return True
        if self.percent == got.percent:
            return False
        return _close(got.value / (100 if got.percent else 1), self.value / (100 if self.percent else 1), tolerance)


def read_numeral(text: str) -> Numeral | None:
    """The number that the text is, or None where it is anything else."""
    if len(text) > MAX_CHARACTERS:
        return None
    text = _DROPPED.sub("", text.replace("\u2212", "-").replace("{,}", ",")).strip().rstrip(".").strip()
    text, percent = _without(_PERCENT, text)
    if not percent:
        text = without_unit(text)
    found = _NUMBER.fullmatch(text)
    value = _value(found.groupdict()) if found else None
    return None if value is None else Numeral(value, percent)


def _without(ending: re.Pattern[str], text: str) -> tuple[str, bool]:
    found = ending.search(text)
    return (text[: found.start()].strip(), True) if found else (text, False)


def without_unit(text: str) -> str:
    r"""Without `\text{…}` or words at the end, unless these change the value or are all there is."""
    for ending in (_UNIT, _WORDS):
        found = ending.search(text)
        if found and found.start() and not _CHANGES_VALUE.search(found[1]):
            text = text[: found.start()].strip()
    return text


def _value(parts: dict[str, str | None]) -> Fraction | None:
    """None for a division by 0."""
    top = parts["top"] or parts["top1"] or parts["a_top"] or parts["a_top1"] or parts["over"]
    bottom = parts["bottom"] or parts["bottom1"] or parts["a_bottom"] or parts["a_bottom1"] or parts["under"]
    whole = parts["whole"] or parts["mixed"] or "0"
    if top is None or bottom is None:
        top, bottom = parts["number"] or "0", parts["divisor"] or "1"
    divisor = _decimal(bottom)
    if not divisor:
        return None
    value = _decimal(whole) + _decimal(top) / divisor
    return -value if parts["sign"] == "-" else value


def _decimal(digits: str) -> Fraction:
    return Fraction(digits.replace(",", "").rstrip(".") or "0")


def _close(got: Fraction, expected: Fraction, tolerance: float | None) -> bool:
    """`reward.kinds.compare_data.is_close`, exactly."""
    return got == expected or (
        tolerance is not None and abs(got - expected) <= Fraction(tolerance) * max(Fraction(1), abs(expected))
    )
