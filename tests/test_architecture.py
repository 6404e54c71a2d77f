"""Rules about folders, imports and sizes, checked by reading the source."""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]
FOLDERS = ("conf", "reward", "rollout", "trainer", "launch")
SOURCES = sorted(path for folder in FOLDERS for path in (PROJECT / folder).rglob("*.py"))
TESTS = sorted((PROJECT / "tests").rglob("*.py"))
LONGEST_FUNCTION = 70
MOST_ENTRIES = 14

# What a folder may import of the others, beside itself: module names, each with all that lies in it. A longer name of the
# importing side wins. This is the one place where these rules stand; CONTRIBUTING.md points here.
MAY_IMPORT = {
    "conf": (),
    "reward": ("rollout.ledger.records",),  # a verdict is a record of the ledger
    "reward.check": ("rollout.ledger.records", "rollout.prompts.problems"),
    "reward.kinds.functions": ("conf.schema", "conf.user_code"),
    "reward.kinds.python": ("conf.schema", "conf.user_code", "rollout.ledger.records"),
    "reward.tools": ("conf.schema", "conf.user_code"),
    "reward.task": ("conf.schema", "conf.user_code", "rollout.ledger.records"),  # a run's settings are the defaults of tasks
    "reward.readers": ("conf.schema", "rollout.prompts.problems"),
    "reward.judge": ("conf", "rollout.ledger.records", "rollout.queue.client"),  # where reward meets the queue
    "reward.__main__": ("conf", "rollout.exit_codes", "rollout.prompts", "rollout.queue", "rollout.servers"),
    "rollout": ("conf",),
    "rollout.queue.__main__": ("conf", "reward.readers"),  # where the queue meets the problems
    "trainer": (
        "conf",
        "rollout.checkpoint_files",
        "rollout.engine_client",
        "rollout.ledger.records",
        "rollout.ledger.wire",
        "rollout.patched.tcp_store",
        "rollout.patched.weight_groups",
        "rollout.queue",
    ),
    "trainer.sft": (
        "conf",
        "rollout.ledger.records",
        "rollout.prompts.problems",
        "rollout.prompts.render",
        "rollout.worker.worker",
    ),
    "trainer.replay": ("conf", "rollout.checkpoint_files", "rollout.ledger"),  # no queue server runs that it could ask
    "launch": (
        "conf",
        "reward.readers",
        "reward.task",
        "rollout.checkpoint_files",
        "rollout.exit_codes",
        "rollout.guard",
        "rollout.ledger",
        "rollout.prompts",
        "rollout.queue.client",
        "rollout.queue.keys",
        "rollout.servers",
    ),
}
# Foreign package -> where it may be imported: folders and files.
FOREIGN = {
    "torch": ("trainer/", "rollout/patched/"),
    "megatron": ("trainer/",),
    "sglang": (),
    "hydra": ("conf/", "launch/plan/one_node.py", "__main__.py"),
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


def module_of(path: Path) -> str:
    parts = path.relative_to(PROJECT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def lies_in(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def may_import(path: Path, module: str) -> bool:
    package = module.partition(".")[0]
    if package in FOLDERS:
        mine = module_of(path)
        rule = max((name for name in MAY_IMPORT if lies_in(mine, name)), key=len)
        return any(lies_in(module, allowed) for allowed in (mine.partition(".")[0], *MAY_IMPORT[rule]))
    places = FOREIGN.get(package)
    return places is None or any(name_of(path).startswith(place) or path.name == place for place in places)


def test_files_import_only_what_their_folder_may() -> None:
    assert [f"{name_of(path)} imports {m}" for path in SOURCES for m in modules(path) if not may_import(path, m)] == []


def test_the_five_folders_do_not_import_one_another_in_a_circle() -> None:
    processes = {"reward.judge", "reward.__main__", "rollout.queue.__main__", "trainer.replay"}  # processes: nobody imports them
    arrows = {folder: set[str]() for folder in FOLDERS}
    for path in SOURCES:
        if module_of(path) not in processes:
            arrows[path.relative_to(PROJECT).parts[0]] |= {module.partition(".")[0] for module in modules(path)} & set(FOLDERS)
    assert in_a_circle(arrows) == []


@pytest.mark.parametrize("folder", sorted({path.parent for path in SOURCES if "cpu" not in path.parts}), ids=name_of)
def test_what_lies_in_a_folder_does_not_import_in_a_circle(folder: Path) -> None:
    """Its files and its subfolders, each subfolder taken as one."""
    package = module_of(folder)
    arrows: dict[str, set[str]] = {}
    for path in folder.rglob("*.py"):
        if path != folder / "__init__.py":
            mine = module_of(path)[len(package) + 1 :].partition(".")[0]
            inner = {m[len(package) + 1 :].partition(".")[0] for m in modules(path) if m.startswith(f"{package}.")}
            arrows[mine] = arrows.get(mine, set()) | inner
    assert in_a_circle(arrows) == []


def in_a_circle(arrows: Mapping[str, set[str]]) -> list[str]:
    """The nodes that lie on a circle, or that only circles lead to. An arrow to itself does not count."""
    left = {node: others & arrows.keys() - {node} for node, others in arrows.items()}
    while leaves := {node for node, others in left.items() if not others}:
        left = {node: others - leaves for node, others in left.items() if node not in leaves}
    return sorted(left)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_shows_at_most_14_entries(folder: str) -> None:
    shown = {
        path.relative_to(PROJECT / folder).parts[0] for path in (PROJECT / folder).rglob("*") if "__pycache__" not in path.parts
    }
    assert len(shown) <= MOST_ENTRIES, sorted(shown)


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
    assert [name_of(path) for path in SOURCES if not ast.get_docstring(tree(path)) and "cpu" not in path.parts] == []


def test_folders_have_no_drawer_for_everything() -> None:
    drawers = {"utils", "util", "common", "helpers", "manager", "misc"}
    assert not [name_of(path) for path in SOURCES if path.stem in drawers or set(path.parts) & drawers]
