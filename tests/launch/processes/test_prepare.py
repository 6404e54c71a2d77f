"""Preparation, with small scripts instead of the project's own."""

import fcntl
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from conf.schema import RULES
from launch.processes.lock import LOCK_FILE
from launch.processes.prepare import RECIPES, PrepareError, Recipe, prepare

SCRIPT = """
import pathlib, sys
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
data = pathlib.Path(sys.argv[sys.argv.index("--data") + 1]) if "--data" in sys.argv else None
print("working")
out.mkdir()
(out / "made").write_text("from " + (data / "made").read_text() if data else "nothing")
"""


@pytest.fixture
def recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Recipe, Recipe]:
    (tmp_path / "first_script.py").write_text(SCRIPT)
    (tmp_path / "second_script.py").write_text(SCRIPT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return (
        Recipe(target=Path("t/data"), what="data", module="first_script", project=tmp_path),
        Recipe(target=Path("t/model"), what="model", module="second_script", needs="t/data", project=tmp_path),
    )


def test_folders_are_made_in_order_and_once(recipes: tuple[Recipe, Recipe], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    said: list[str] = []
    prepare(recipes, said.append, cache)
    assert (cache / "t/model/made").read_text() == "from nothing"
    assert "    working" in said
    said.clear()
    prepare(recipes, said.append, cache)
    assert said == []


def test_folder_whose_script_changed_is_made_again_with_its_dependents(recipes: tuple[Recipe, Recipe], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    prepare(recipes, lambda line: None, cache)
    (tmp_path / "first_script.py").write_text(SCRIPT.replace("nothing", "something"))
    prepare(recipes, lambda line: None, cache)
    assert (cache / "t/model/made").read_text() == "from something"


def test_failed_script_leaves_no_folder_that_looks_complete_and_says_why(recipes: tuple[Recipe, Recipe], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (tmp_path / "second_script.py").write_text(SCRIPT + "sys.exit('no memory')\n")
    with pytest.raises(PrepareError, match=r"(?s)second_script.*exit code 1.*no memory"):
        prepare(recipes, lambda line: None, cache)
    assert (cache / "t/data/made").exists()
    assert not (cache / "t/model").exists()


def test_launch_that_waits_for_another_says_so_and_then_finds_the_folders(recipes: tuple[Recipe, Recipe], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    said: list[str] = []
    with (cache / LOCK_FILE).open("w") as lock, ThreadPoolExecutor() as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = pool.submit(prepare, recipes, said.append, cache)
        deadline_s = time.monotonic() + 20
        while not said and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert said == [f"waiting for another launch that prepares {cache} (0 s of 3600 s at most)"]
        fcntl.flock(lock, fcntl.LOCK_UN)
        waiting.result(timeout=60)
    assert (cache / "t/model/made").exists()


def test_every_choice_of_model_prepare_has_a_recipe_and_nothing_is_made_for_none(tmp_path: Path) -> None:
    assert set(RECIPES) == set(RULES["model.prepare"].choices)
    prepare(RECIPES[""], pytest.fail, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
