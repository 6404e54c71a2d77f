"""What is drawn lies where its values are, and says what it is."""

import re
from itertools import pairwise
from math import nan
from pathlib import Path

import pytest
from PIL import Image

from launch.report.charts import LEFT, MOST_BARS, RIGHT, TITLE_Y, Axis, chart, decades, figure, stack, ticks
from launch.report.drawing import Box, Dot, Drawing, Line, Text, text_width, write_sheet
from launch.report.page import html_page, pre

X = Axis(name="step", whole=True)


def test_ticks_are_round_and_reach_around_the_values() -> None:
    assert ticks(0.0, 2.0, 5) == [0.0, 0.5, 1.0, 1.5, 2.0]
    for low, high in ((0.0, 0.0), (0.3, 0.30001), (-5.0, 7.0), (0.0, 2.3e-7), (1e9, 1e9 + 1)):
        found = ticks(low, high)
        assert found[0] <= low + 1e-9 * abs(low) and found[-1] >= high - 1e-9 * abs(high) and 2 <= len(found) <= 12


def test_chart_leaves_out_what_is_no_number_and_refuses_to_be_empty() -> None:
    drawn = chart("t", Axis(name="x"), {"a": [(0, 1), (1, nan), (2, 3)], "b": [(0, nan)]})
    assert "nan" not in drawn.svg()
    with pytest.raises(ValueError, match="no series has a point"):
        chart("t", Axis(name="x"), {"a": [(0, nan)]})


def test_line_goes_through_the_mean_of_points_that_share_their_x() -> None:
    drawn = chart("t", Axis(name="x"), {"a": [(0, 0), (0, 2), (1, 1)]})
    (line,) = [shape for shape in drawn.shapes if isinstance(shape, Line) and shape.width == 2.0]
    assert line.points[0][1] == line.points[1][1]


def test_both_renderings_show_the_same_shapes(tmp_path: Path) -> None:
    drawing = Drawing(40, 20, [Box(10, 5, 10, 10, "#ff0000", "a <hint>"), Text(2, 18, "a & b")])
    assert 'fill="#ff0000"' in drawing.svg() and "a &lt;hint&gt;" in drawing.svg() and "a &amp; b" in drawing.svg()
    image = drawing.image()
    assert image.getpixel((15, 6)) == (255, 0, 0) and image.getpixel((30, 2)) == (255, 255, 255)
    write_sheet([drawing, drawing], 2, tmp_path / "sheet.png", scale=1.0)
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.getpixel((16 + 15, 16 + 6)) == sheet.getpixel((16 + 40 + 15, 16 + 6)) == (255, 0, 0)


def boxes(drawing: Drawing) -> list[Box]:
    return [shape for shape in drawing.shapes if isinstance(shape, Box)]


def test_powers_of_ten_reach_around_the_values_and_are_few() -> None:
    assert decades(2e-7, 0.03) == [1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1]
    for low, high in ((1.0, 1.0), (3.0, 4.0), (1e-30, 1e30), (0.1, 1.0)):
        found = decades(low, high)
        assert found[0] <= low and found[-1] >= high and 2 <= len(found) <= 8


def test_logarithmic_axis_sets_decades_apart_evenly_and_leaves_zero_out() -> None:
    drawn = chart("t", X, {"a": [(0, 1e-6), (1, 1e-4), (2, 1e-2), (3, 0.0)]}, log=True)
    ys = [shape.y for shape in drawn.shapes if isinstance(shape, Dot)]
    assert len(ys) == 3 and ys[0] - ys[1] == pytest.approx(ys[1] - ys[2])


def test_parts_of_a_bar_lie_on_one_another_and_reach_its_sum() -> None:
    one, two, of_next = boxes(stack("t", X, {"a": [(1, 2.0), (2, 1.0)], "b": [(1, 3.0)]}))
    assert one.y == pytest.approx(two.y + two.height)  # the second on the first
    assert two.height == pytest.approx(1.5 * one.height) and of_next.height == pytest.approx(one.height / 2)
    assert one.x == two.x < one.x + one.width < of_next.x < 460 - RIGHT


def test_many_bars_become_the_means_of_neighbours() -> None:
    count = 10 * MOST_BARS
    bars = boxes(stack("t", X, {"a": [(i, float(i % 2)) for i in range(count)]}))
    assert len(bars) == MOST_BARS
    assert {round(bar.height, 6) for bar in bars} == {round(bars[0].height, 6)}
    assert "step 0 to 9: 0.5" in bars[0].hint
    assert all(left.x + left.width <= right.x for left, right in pairwise(bars))


@pytest.mark.parametrize("draw", [chart, stack])
def test_title_note_and_legend_stand_under_one_another(draw) -> None:  # type: ignore[no-untyped-def]
    """A long note ran into a long title, and a long name into the next."""
    names = {f"a rather long name of a line, the {i}th": [(0, 1.0), (1, 2.0)] for i in range(5)}
    drawn = draw("Effective sample size", X, names, note="of the behaviour weights; near 0 the run learns noise")
    words = [shape for shape in drawn.shapes if isinstance(shape, Text) and shape.anchor == "start"]
    assert len({text.y for text in words}) == len(words) and words[0].y == TITLE_Y
    assert all(text.x >= LEFT and text.x + text_width(text.words) < drawn.width for text in words)


def test_figures_are_written_as_a_person_writes_them() -> None:
    said = {0.0: "0", 0.609375: "0.609", 1.8e-07: "1.8e-07", 108.71: "108.7", 1253.4: "1,253", 15000: "15,000", 1e9: "1e+09"}
    assert {value: figure(value) for value in said} == said


def test_page_is_whole_and_says_what_it_was_given() -> None:
    drawn = html_page("a <run>", [pre("1 < 2"), ""], [chart("t", X, {"a": [(0, 1)]})])
    assert "<h1>a &lt;run&gt;</h1>" in drawn and "1 &lt; 2" in drawn and drawn.count("<figure>") == 1
    assert not re.search(r"(src|href)=", drawn)
    assert "<main" in html_page("nothing to draw", [], [])
