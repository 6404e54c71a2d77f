"""The table of figures: its page is current, and no name is described twice."""

from collections import Counter
from pathlib import Path

import pytest

from trainer.metrics.table import SECTIONS, find, page

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"


def test_the_page_is_what_the_table_says() -> None:
    assert PAGE.read_text() == page(), "python -m trainer.metrics.table docs/metrics.md"


def test_no_figure_is_described_twice() -> None:
    names = Counter(figure.name for figures in SECTIONS.values() for figure in figures)
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("mismatch/lag_12_abs_logprob", "mismatch/lag_N_abs_logprob"),
        ("reward/part/tests_passed/mean", "reward/part/NAME/mean"),
        ("loss/user/masked", "loss/user/NAME"),
        ("grad_norm", "grad_norm"),
        ("grad_normal", None),
        ("mismatch/lag_/x_abs_logprob", None),
    ],
)
def test_a_figure_is_found_by_its_name_or_by_the_pattern_of_its_kind(name: str, entry: str | None) -> None:
    found = find(name)
    assert (found and found.name) == entry
