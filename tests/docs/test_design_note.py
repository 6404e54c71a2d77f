"""The design note says what its commands say."""

from pathlib import Path

import pytest

from tests.docs.design_note import BLOCK, OURS, renewed, stray_numbers

NOTE = Path(__file__).parents[2] / "docs/kestrel_256.md"


@pytest.fixture(scope="module")
def note() -> str:
    return NOTE.read_text()


def test_blocks_of_the_planner_are_what_it_prints_now(note: str) -> None:
    assert sum(found[1] == OURS for found in BLOCK.finditer(note)) > 10
    assert renewed(note) == note, f"python -m tests.docs.design_note docs/{NOTE.name} makes them anew"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_other_block_is_what_its_command_prints_now(note: str) -> None:
    assert renewed(note, lambda command: f"-m {OURS} " not in command) == note


def test_every_number_of_the_prose_is_printed_beside_it(note: str) -> None:
    assert stray_numbers(note) == []


def test_number_that_no_command_of_its_section_prints_is_found() -> None:
    block = "```console\n$ python -m launch.plan x\nstep 12.5 s, TP8, 7,355 GPU-s\n```\n"
    assert stray_numbers(f"## One\n\n{block}\nIt takes 12.5 s at TP8 and 7,355 GPU-s, in bf16.\n") == []
    assert stray_numbers(f"## One\n\n{block}\nIt takes 12.6 s.\n") == ["12.6: It takes 12.6 s."]
    assert stray_numbers(f"## One\n\n{block}\n## Two\n\nIt takes 12.5 s.\n") == ["12.5: It takes 12.5 s."]
    assert stray_numbers(f"## One\n\n{block}\n1. First, TP4.\n") == ["4: 1. First, TP4."[:3] + "First, TP4."]


def test_block_that_is_out_of_date_is_made_anew_and_others_are_left() -> None:
    block = "```console\n$ python -m launch.plan experiment=kestrel_256 plan.show=[inputs]\nold\n```\n"
    other = "```console\n$ python -m launch.simulate --fast\nold\n```\n"
    made = renewed(block + other)
    assert "256 KiB per token" in made
    assert other in made
    assert renewed(made) == made
