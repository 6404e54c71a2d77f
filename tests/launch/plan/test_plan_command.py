"""The planner's command: its sections, files and messages."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from benchmarks.calibrate import POINTS
from conf.schema import ConfigError
from launch.plan.__main__ import run
from launch.plan.plan_report import SECTIONS
from launch.plan.table import table

PROJECT = Path(__file__).parents[3]


def test_command_prints_both_sets_of_assumptions_side_by_side() -> None:
    text = run(["experiment=kestrel_256", "plan.show=[answer]"])
    assert re.search(r"^\s+stated\s+calibrated$", text, re.MULTILINE)
    assert "fewest GPUs for 48 h" in text


def test_answer_comes_first_and_holds_what_was_asked() -> None:
    text = run(["experiment=kestrel_256", "plan.show=[answer,inputs]"])
    first, _, rest = text.partition("\n\n== inputs ==")
    assert rest and first.startswith("== answer ==\nkestrel-32b on 256 GPUs: 600 steps take ")
    asked = ("run, with failures", "one step", "limited by", "fewest GPUs for 48 h", "nodes, trainer + fleet", "trainer", "fleet")
    places = [re.search(rf"^{re.escape(what)}  ", first, re.MULTILINE) for what in asked]
    assert all(places) and [found.start() for found in places if found] == sorted(found.start() for found in places if found)
    assert next(iter(SECTIONS)) == "answer"


def test_cluster_too_small_for_the_target_is_told_how_large_one_must_be() -> None:
    """And an impossible target, where the search ends."""
    small = "cluster.nodes=8 trainer.dp=4 rollout.engines=8"
    of_small, of_large = (
        re.search(r"^fewest GPUs for 48 h +(.*)$", run(["experiment=kestrel_256", *more, "plan.show=[answer]"]), re.MULTILINE)
        for more in (small.split(), [])
    )
    assert of_small and of_large and of_small[1].split() == of_large[1].split()
    never = run(["experiment=kestrel_256", "plan.show=[answer]", "plan.target_hours=0.5"])
    assert "more than 2,048" in never


@pytest.mark.parametrize("section", [name for name in SECTIONS if name != "what_if"])  # slow: the design note's test runs it
def test_every_section_prints_something(section: str) -> None:
    text = run(["experiment=kestrel_256", f"plan.show=[{section}]"])
    assert len(text.splitlines()) >= 3
    assert not re.search(r"\b(nan|inf|None)\b", text)


def test_unknown_section_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="no section 'anser'; choose from answer, inputs, estimate"):
        run(["experiment=kestrel_256", "plan.show=[anser]"])


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.tp=3", "trainer.tp=3 does not divide the 40 attention heads of kestrel-32b"),
        ("trainer.tp=0", "trainer.tp=0: must be at least 1"),
    ],
)
def test_tp_is_refused_for_the_heads_before_the_lengths_that_it_cuts(override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run(["experiment=kestrel_256", override])


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("plan")
    out, figures = folder / "new/plan.json", folder / "plan.html"
    text = run(["experiment=kestrel_256", "plan.show=[configured]", f"plan.out={out}", f"plan.figures={figures}"])
    assert f"written: {out}" in text
    assert f"written: {figures}" in text
    return out, figures


def test_json_holds_the_plan(written: tuple[Path, Path]) -> None:
    out, _ = written
    record = json.loads(out.read_text())
    for name in ("stated", "calibrated"):
        best = record["best"][name]
        assert best["step_s"] == pytest.approx(max(best["bounds_s"].values()))
        gpu_s = sum(line["gpu_s"] for line in best["training"]["lines"].values())
        assert gpu_s == pytest.approx(best["training"]["gpu_s"])
        assert record["fewest"][name]["hours"] <= 48


def test_page_holds_every_figure(written: tuple[Path, Path]) -> None:
    page = written[1].read_text()
    drawn = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]
    assert len(drawn) == 6  # split, latency, memory; twice
    for title in ("Step time against split, stated", "Latency of the longest completion, calibrated", "Memory of a GPU, stated"):
        assert title in page


def test_points_of_the_figures_lie_inside_them(written: tuple[Path, Path]) -> None:
    for svg in re.findall(r"<svg.*?</svg>", written[1].read_text(), re.DOTALL):
        image = ElementTree.fromstring(svg)
        width, height = float(image.attrib["width"]), float(image.attrib["height"])
        for mark in [*image.iter("circle"), *image.iter("rect")]:
            x, y = float(mark.get("cx", mark.get("x", "-1"))), float(mark.get("cy", mark.get("y", "-1")))
            assert 0 <= x <= width
            assert 0 <= y <= height


def test_figures_are_a_picture_where_a_picture_is_asked_for(tmp_path: Path) -> None:
    run(["experiment=kestrel_256", "plan.show=[inputs]", f"plan.figures={tmp_path}/new/plan.png"])
    with Image.open(tmp_path / "new/plan.png") as picture:
        assert picture.width > 1000 and picture.convert("L").getextrema()[0] < 128
    with pytest.raises(ConfigError, match=r"plan.figures=plan.pdf: give a file that ends in .html or .png"):
        run(["experiment=kestrel_256", "plan.figures=plan.pdf"])


def test_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        run(["experiment=kestrel_256", "plan.show=[configured]", f"plan.out={blocked}/plan.json"])


def test_check_stands_alone() -> None:
    assert "56 points" in run([f"check={POINTS}"])
    with pytest.raises(ConfigError, match="leave out 'experiment=debug'"):
        run([f"check={POINTS}", "experiment=debug"])
    with pytest.raises(ConfigError, match="check= names nothing: give it a file"):
        run(["check="])


def test_command_ends_with_a_line_and_a_code_not_a_traceback() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for arguments, said in (
        (["experiment=kestrel_256", "trainer.tp=16"], "plan: trainer.tp=16 does not divide"),
        (["experiment=kestrel_256", "plan.nose=1"], "plan: plan.nose: no such setting"),
        ([], ""),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "launch.plan", *arguments],
            cwd=PROJECT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 2
        assert done.stderr.strip().startswith(said)
        assert "Traceback" not in done.stderr


def test_table_aligns_numbers_right_and_words_left() -> None:
    text = table(("name", "value", "why"), [("a", "1.0", "because it is so"), ("bcd", "100.0", "no")])
    assert text.splitlines() == [
        "name  value  why",
        "----  -----  ----------------",
        "a       1.0  because it is so",
        "bcd   100.0  no",
    ]
