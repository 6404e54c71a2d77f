"""What design.md says about folders, imports and sizes, held by reading the source."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PROJECT = Path(__file__).parents[1]
FOLDERS = ("conf", "reward", "rollout", "trainer", "launch")
SOURCES = sorted(path for folder in FOLDERS for path in (PROJECT / folder).rglob("*.py"))
TESTS = sorted((PROJECT / "tests").rglob("*.py"))
LONGEST_FUNCTION = 70

# Folder -> the modules of ours that it may import; "rollout" stands for all of rollout.
ALLOWED = {
    "conf": {"conf"},
    "reward": {"reward"},
    "rollout": {"rollout", "conf"},
    "trainer": {"trainer", "conf", "rollout.types", "rollout.wire", "rollout.client", "rollout.keys", "rollout.engine_client"},
    "launch": {"launch", "conf", "rollout.guard", "rollout.ledger", "rollout.keys", "rollout.prompts", "reward.task"},
}
# The judge's process is where reward meets the queue; a replay has no queue server to ask.
ALLOWED_IN = {
    "reward/judge.py": {"reward", "conf", "rollout.types", "rollout.client"},
    "reward/__main__.py": {"reward", "conf", "rollout.client", "rollout.keys", "rollout.decoder", "rollout.prompts"},
    "trainer/replay.py": {"trainer", "conf", "rollout.types", "rollout.recorded"},
}
# Foreign package -> where it may be imported: folders and files.
FOREIGN = {
    "torch": ("trainer/", "rollout/cpu_engine/"),
    "megatron": ("trainer/",),
    "sglang": (),
    "hydra": ("conf/", "__main__.py"),
    "omegaconf": ("conf/", "__main__.py"),
}


def name_of(path: Path) -> str:
    return str(path.relative_to(PROJECT))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def modules(path: Path) -> Iterator[str]:
    """Every module that a file imports, names of `from package import module` resolved."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if is_module(inner) else node.module


def is_module(dotted: str) -> bool:
    path = PROJECT / dotted.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def may_import(path: Path, module: str) -> bool:
    package = module.partition(".")[0]
    if package in FOLDERS:
        allowed = ALLOWED_IN.get(name_of(path), ALLOWED[path.relative_to(PROJECT).parts[0]])
        return any(module == a or module.startswith(f"{a}.") for a in allowed)
    places = FOREIGN.get(package)
    return places is None or any(name_of(path).startswith(place) or path.name == place for place in places)


def test_files_import_only_what_their_folder_may() -> None:
    assert [f"{name_of(path)} imports {m}" for path in SOURCES for m in modules(path) if not may_import(path, m)] == []


def test_folders_do_not_import_one_another_in_a_circle() -> None:
    reached = {folder: set[str]() for folder in FOLDERS}
    for path in SOURCES:
        folder = path.relative_to(PROJECT).parts[0]
        entry = path.name == "__main__.py" or name_of(path) in ALLOWED_IN  # processes: nobody imports them
        if not entry:
            reached[folder] |= {module.partition(".")[0] for module in modules(path)} & set(FOLDERS) - {folder}
    while reached:
        leaves = {folder for folder, others in reached.items() if not others}
        assert leaves, f"an import cycle between {sorted(reached)}"
        reached = {folder: others - leaves for folder, others in reached.items() if folder not in leaves}


def test_functions_are_short() -> None:
    functions = [
        (node.end_lineno - node.lineno + 1, f"{name_of(path)}: {node.name}")
        for path in SOURCES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
    ]
    assert [f"{name} has {lines} lines" for lines, name in functions if lines > LONGEST_FUNCTION] == []


def test_nothing_is_unpickled() -> None:
    uses = [
        name_of(path)
        for path in SOURCES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if (node.value.id, node.attr) in {("pickle", "loads"), ("pickle", "load"), ("pickle", "Unpickler")}
    ]
    assert uses == []


def test_nobody_is_killed_by_name() -> None:
    words = {
        name_of(path): set(node.value.split())
        for path in [*SOURCES, *TESTS]
        if path != Path(__file__)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if {"pkill", "killall"} & set(node.value.split())
    }
    assert words == {}


def test_every_file_says_what_it_owns() -> None:
    assert [name_of(path) for path in SOURCES if not ast.get_docstring(tree(path)) and "cpu_engine" not in path.parts] == []


def test_folders_have_no_drawer_for_everything() -> None:
    drawers = {"utils", "util", "common", "helpers", "manager", "misc"}
    assert not [name_of(path) for path in SOURCES if path.stem in drawers or set(path.parts) & drawers]
