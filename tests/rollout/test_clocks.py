"""Nothing between the prompts and the trainer depends on the wall clock: it may jump."""

import ast
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
SOURCES = [*sorted((PROJECT / "rollout").glob("*.py")), PROJECT / "reward/judge.py", PROJECT / "reward/__main__.py"]
WALL_CLOCK = {
    ("time", "time"), ("time", "time_ns"), ("time", "localtime"), ("time", "gmtime"), ("time", "ctime"), ("datetime", "now"),
    ("datetime", "utcnow"), ("datetime", "today"), ("date", "today"), ("time", "CLOCK_REALTIME"),
}  # fmt: skip


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_wall_clock_is_read(path: Path) -> None:
    tree = ast.parse(path.read_text())
    reads = {
        (node.value.id, node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    imported = {(node.module, name.name) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in node.names}
    assert not (reads | imported) & WALL_CLOCK
    assert not {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} & {"st_mtime", "st_ctime", "st_atime"}
