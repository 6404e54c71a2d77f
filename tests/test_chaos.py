"""Random faults against the debug run's processes: nothing lost, nothing trained on twice, the bound kept, no hang.

A failure names the seed of its story; `python -m tests.chaos.story --seed N` tells that one again.
"""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.chaos.story import tell

FAULTS = 200
FAULTS_A_STORY = 14
AT_ONCE = 2  # stories; each spends half of its time waiting
DEADLINE_S = 240.0
FIRST_SEED = 1000


@pytest.mark.timeout(120)
def test_run_with_some_faults_ends_as_one_without(tmp_path: Path) -> None:
    tell(tmp_path / "story", seed=1, faults=10, steps=3, deadline_s=90.0)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_hundred_faults_lose_nothing_repeat_nothing_and_hang_nothing(tmp_path: Path) -> None:
    met: Counter[str] = Counter()
    seeds = iter(range(FIRST_SEED, FIRST_SEED + FAULTS))
    with ThreadPoolExecutor(AT_ONCE) as stories:
        while met.total() < FAULTS:
            told = [
                stories.submit(
                    tell, tmp_path / f"story-{seed}", seed=seed, faults=FAULTS_A_STORY, steps=12, deadline_s=DEADLINE_S
                )
                for seed, _ in zip(seeds, range(AT_ONCE), strict=False)
            ]
            for story in told:
                met += story.result()
    print(f"{met.total()} faults: {dict(sorted(met.items()))}")
    kinds = {fault.split()[0] for fault in met}
    assert kinds == {
        "kill", "freeze", "full", "clock", "stalled", "swallowing", "cut", "dead", "late", "erring", "nonsense",
    }, met  # fmt: skip
