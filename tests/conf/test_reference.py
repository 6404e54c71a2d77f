"""The page of all settings is what the schema says, and the schema says something about each."""

from pathlib import Path

from conf import schema
from conf.compose.check import CHOICES
from conf.compose.reference import main, page, settings

PROJECT = Path(__file__).parents[2]


def test_written_page_is_current() -> None:
    told = "run `python -m conf.compose.reference docs/settings.md`"
    assert (PROJECT / "docs/settings.md").read_text() == page(), told


def test_every_setting_has_a_meaning() -> None:
    assert [setting.key for setting in settings() if not setting.meaning] == []


def test_every_member_of_a_group_says_what_it_is() -> None:
    rows = [line.split("|") for line in page().partition("## The run")[0].splitlines() if line.startswith("| `")]
    assert len(rows) == len(list((PROJECT / "conf").glob("*/*.yaml")))
    assert [row for row in rows if not row[3].strip()] == []


def test_every_choice_of_a_setting_stands_in_its_meaning() -> None:
    meaning = {setting.key: setting.meaning for setting in settings()}
    untold = [(key, choice) for key, allowed in CHOICES.items() for choice in allowed if choice not in meaning[key]]
    assert untold == []


def test_meaning_is_found_where_the_formatter_put_the_default_on_a_line_of_its_own() -> None:
    assert "policy_loss: str = (\n" in Path(schema.__file__).read_text()
    meaning = {setting.key: setting.meaning for setting in settings()}
    assert meaning["algo.policy_loss"].startswith("ppo: clips a ratio per token | gspo: ")


def test_command_writes_the_file(tmp_path: Path) -> None:
    assert main([str(tmp_path / "README.md")]) == 0
    assert (tmp_path / "README.md").read_text() == page()
    assert main(["a", "b"]) == 2
