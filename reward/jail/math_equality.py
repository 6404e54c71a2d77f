"""Are two answers equal as mathematics? Runs inside a job, with `math-verify`, which reads LaTeX into expressions of sympy.

Nothing that is written in an answer becomes Python code here. Sympy evaluates strings as Python, and the parser hands it each
number as one. So while an answer is read, a string is a number to sympy or an error. The limits of the job end what takes too
long: the timeouts of `math-verify` are signals, which only the main thread of a process may use and which cannot stop C code.
"""

import logging
import re
from typing import Any

from reward.jail.harness import write_frame

PACKAGES = ("sympy", "mpmath", "antlr4", "latex2sympy2_extended", "math_verify")
EXAMPLES = (
    (r"\frac{\sqrt{3}}{2}", r"\sqrt{3}/2"),
    (r"x^2 + 2x + 1", r"(x+1)^{2}"),
    (r"3x - 2y", r"2y - 3x"),
    (r"[0, 1) \cup (2, \infty)", r"(2, \infty) \cup [0, 1)"),
    (r"\left(3, \frac{\pi}{2}\right)", r"(3, \pi/2)"),
    (r"\begin{pmatrix} 1 & -2 \\ 3 & 4 \end{pmatrix}", r"\begin{bmatrix} 1 & -2 \\ 3 & 5 \end{bmatrix}"),
    (r"\{1, 2, -3\}", r"2, 1, -3"),
    (r"y = 2x + \frac{3}{4}", r"y - 2x = 0.75"),
    (r"x \le 5", r"5 \geq x"),
    (r"2^{10} \cdot 3! + \binom{5}{2}", r"6154"),
    (r"\log_2 8 + \ln e - \sin\frac{\pi}{6}", r"3.5"),
    (r"3 + 4i", r"4i + 3"),
    (r"1 \pm \sqrt{5}", r"1 + \sqrt{5}, 1 - \sqrt{5}"),
    (r"1.5 \times 10^{-3}", r"0.0015"),
    (r"|x| < 3", r"-3 < x < 3"),
)
"""Pairs that a zygote compares before it has jobs. The parser learns from them, and a job inherits what it has learnt."""
_NUMBER = re.compile(r"\d+|\d*\.\d+|\d+\.", re.ASCII)


def run(program: dict[str, Any]) -> None:
    write_frame(compare(program["truth"], program["answer"]))


def compare(truth: str, answer: str) -> dict[str, Any]:
    from math_verify import verify  # only the sandbox for this kind has the packages

    logging.disable()
    expressions = []
    for which, text in (("truth", truth), ("answer", answer)):
        try:
            expressions.append(_read(text))
        except Exception as error:  # noqa: BLE001 - the parser raises bare exceptions, and says so in words
            return {"unread": which, "error": f"{type(error).__name__}: {error}"[:200]}
    return {"equal": bool(verify(*expressions, timeout_seconds=None))}


def _read(text: str) -> Any:
    from latex2sympy2_extended.math_normalization import NormalizationConfig, normalize_latex
    from math_verify.parser import parse_latex_cached
    from sympy.core.sympify import converter

    plain = normalize_latex(text, NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="none"))
    converter[str] = _number
    try:
        return parse_latex_cached(plain)
    finally:
        del converter[str]  # sympy's own tables hold strings that it reads when it simplifies


def _number(text: str) -> Any:
    from sympy import Float, Integer

    if not _NUMBER.fullmatch(text):
        raise ValueError(f"{text[:20]!r} is not a number")
    return Float(text) if "." in text else Integer(int(text))
