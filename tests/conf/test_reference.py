"""The page of all settings is what the schema says, and the schema says something about each."""

from pathlib import Path

from conf.compose.reference import page, write_page
from conf.schema import RULES, settings

PROJECT = Path(__file__).parents[2]


def test_written_page_is_current() -> None:
    told = "run `python -m conf.compose.reference docs/settings.md`"
    assert (PROJECT / "docs/settings.md").read_text() == page(), told


def test_every_setting_has_a_meaning() -> None:
    assert [key for key, rule in RULES.items() if not rule.meaning] == []


def test_every_number_has_a_bound_and_every_text_has_choices_or_says_that_any_text_will_do() -> None:
    wanted = {int: lambda rule: rule.bounds, float: lambda rule: rule.bounds, str: lambda rule: rule.choices or rule.any_text}
    kinds = {key: kind for key, kind, _ in settings()}
    assert [key for key, rule in RULES.items() if kinds[key] in wanted and not wanted[kinds[key]](rule)] == []
    assert {kinds[key] for key, rule in RULES.items() if rule.bounds} == {int, float}
    assert {kinds[key] for key, rule in RULES.items() if rule.choices} == {str}


def test_every_preset_says_what_it_is() -> None:
    rows = [line.split("|") for line in page().partition("## run")[0].splitlines() if line.startswith("| `")]
    assert len(rows) == len(list((PROJECT / "conf").glob("*/*.yaml")))
    assert [row for row in rows if not row[3].strip()] == []


def test_every_choice_of_a_setting_has_a_meaning_on_the_page() -> None:
    lines = {line.split("`")[1]: line for line in page().splitlines() if line.startswith("| `")}
    untold = [(key, name) for key, rule in RULES.items() for name in rule.choices if f"""`{name or '""'}`: """ not in lines[key]]
    assert untold == []
    assert [key for key, rule in RULES.items() if not all(rule.choices.values())] == []


def test_command_writes_the_file_or_prints_the_page(tmp_path: Path, monkeypatch, capsys) -> None:
    for words in ([], [str(tmp_path / "page.md")]):
        monkeypatch.setattr("sys.argv", ["reference", *words])
        write_page(page, "")
    assert (tmp_path / "page.md").read_text() == capsys.readouterr().out == page()
