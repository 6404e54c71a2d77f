"""The page of all settings is what the schema says, and the schema says something about each."""

from pathlib import Path

from conf.reference import main, page, settings

PROJECT = Path(__file__).parents[2]


def test_written_page_is_current() -> None:
    told = "run `python -m conf.reference conf/README.md`"
    assert (PROJECT / "conf/README.md").read_text() == page(), told


def test_every_setting_has_a_meaning() -> None:
    assert [setting.key for setting in settings() if not setting.meaning] == []


def test_every_member_of_a_group_says_what_it_is() -> None:
    rows = [line.split("|") for line in page().partition("## The run")[0].splitlines() if line.startswith("| `")]
    assert len(rows) == len(list((PROJECT / "conf").glob("*/*.yaml")))
    assert [row for row in rows if not row[3].strip()] == []


def test_choices_stand_in_the_meaning_even_where_the_comment_does_not_list_them() -> None:
    meaning = {setting.key: setting.meaning for setting in settings()}
    assert "constant | cosine" in meaning["trainer.lr_schedule"]
    assert "none | truncate | mask" in meaning["algo.behaviour_correction"]


def test_command_writes_the_file(tmp_path: Path) -> None:
    assert main([str(tmp_path / "README.md")]) == 0
    assert (tmp_path / "README.md").read_text() == page()
    assert main(["a", "b"]) == 2
