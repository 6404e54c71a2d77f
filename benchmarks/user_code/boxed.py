"""A reward of one's own, for benchmarks/rewards.py."""

from collections.abc import Mapping


def ends_in_box(completion: str, metadata: Mapping[str, str]) -> float:
    return float(completion.replace(",", "").endswith(f"\\boxed{{{metadata['truth']}}}$."))
