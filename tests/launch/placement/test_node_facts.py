"""The reports of several nodes arrive through one output, line by line and mixed."""

import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from launch.placement.node_facts import lines, read

REPORTS = st.lists(
    st.dictionaries(st.text(max_size=5), st.text(max_size=3000) | st.integers(), max_size=4), min_size=1, max_size=4
)


@given(reports=REPORTS, seed=st.integers())
def test_reports_are_read_whatever_the_order_of_their_lines(reports: list[dict[str, Any]], seed: int) -> None:
    mixed = [line for report in reports for line in lines(report)]
    random.Random(seed).shuffle(mixed)
    assert all(len(line.encode()) < 1024 for line in mixed)
    found = read("\n".join(["srun: a message", *mixed]))
    assert sorted(map(repr, found)) == sorted(map(repr, reports))


def test_report_with_a_lost_line_is_no_report() -> None:
    whole, cut = lines({"node": "n1", "x": "y" * 2000}), lines({"node": "n2", "x": "y" * 2000})
    assert [report["node"] for report in read("\n".join(whole + cut[:-1]))] == ["n1"]
