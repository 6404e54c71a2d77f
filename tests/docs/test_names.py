"""Every file, module and command that the documentation names exists."""

import re
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
PAGES = sorted([PROJECT / "README.md", PROJECT / "CONTRIBUTING.md", *(PROJECT / "docs").rglob("*.md")])
FOLDERS = "conf|reward|rollout|trainer|launch|tests|benchmarks|docs|requirements"
PATH = re.compile(rf"(?<![\w/.])((?:{FOLDERS})/(?:[\w./*-]*\.(?:py|md|sh|yaml|txt|png|csv|json|toml)|[\w./*-]*/(?!\w)))")
MODULE = re.compile(rf"-m ((?:{FOLDERS})(?:\.\w+)*)\b")
FUNCTION = re.compile(rf"`((?:{FOLDERS})/[\w/]+\.py):([\w.]+)`")


def name_of(page: Path) -> str:
    return str(page.relative_to(PROJECT))


def is_module(name: str) -> bool:
    path = PROJECT / name.replace(".", "/")
    return path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


@pytest.mark.parametrize("page", [page for page in PAGES if page.is_file()], ids=name_of)
def test_a_page_names_only_what_exists(page: Path) -> None:
    text = page.read_text()
    paths = {found.rstrip(".") for found in PATH.findall(text)}
    assert sorted(path for path in paths if not list(PROJECT.glob(path))) == []
    assert sorted(module for module in set(MODULE.findall(text)) if not is_module(module)) == []
    for path, function in FUNCTION.findall(text):
        last = function.rpartition(".")[2]
        assert re.search(rf"^\s*(?:async )?(?:def|class) {last}\b", (PROJECT / path).read_text(), re.M), f"{path}: {function}"


def test_every_target_of_make_that_a_page_names_exists() -> None:
    made = set(re.findall(r"^([a-z-]+):", (PROJECT / "Makefile").read_text(), re.M))
    named = {target for page in PAGES if page.is_file() for target in re.findall(r"^ {4}make ([a-z-]+)", page.read_text(), re.M)}
    assert named <= made


def test_every_message_that_troubleshooting_quotes_is_one_that_the_code_says() -> None:
    page = (PROJECT / "docs/troubleshooting.md").read_text()
    folders = FOLDERS.partition("|tests")[0].split("|")
    code = "\n".join(path.read_text() for folder in folders for path in sorted((PROJECT / folder).rglob("*.py")))
    code = re.sub(r'"\s*\n\s*f?"', "", code)  # a text that stands on several lines
    quoted = re.findall(r"^\| `([^`]+)` \|", page, re.M)
    assert quoted
    assert [message for message in quoted if message not in code] == []
