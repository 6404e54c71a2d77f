"""A cost, line by line: what takes how long, and why."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class CostLine:
    name: str
    gpu_s: float  # seconds of one GPU, summed over all that work on it
    why: str


def total(lines: Iterable[CostLine]) -> float:
    return sum(line.gpu_s for line in lines)


def count(value: float) -> str:
    """32e9 -> 32B, 15155200 -> 15.2M."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def gb(value: float) -> str:
    return f"{value / 1e9:,.1f} GB"


def several(count: int, what: str) -> str:
    """1 node, 2 nodes."""
    return f"{count:,} {what}{'s' if count != 1 else ''}"
