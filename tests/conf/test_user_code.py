"""A setting may name the user's own code; what cannot be loaded is refused with the reason, and the run keeps a copy."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conf.compose.check import check_each
from conf.compose.load import read_run, write_run
from conf.schema import AlgoConfig, ConfigError, DataConfig, ModelConfig, RunConfig, TrainerConfig
from conf.user_code import changes, load, named

SETTING = "algo.policy_loss"


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of its own for each test, whose modules are forgotten afterwards."""
    (folder := tmp_path / "work").mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def config(loss: str) -> RunConfig:
    return RunConfig(
        model=ModelConfig(path="m"),
        data=DataConfig(train=["t.jsonl"]),
        algo=AlgoConfig(policy_loss=loss),
        trainer=TrainerConfig(tokens_per_microbatch=20_480),
    )


def refusal(name: str, run: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load(name, run, setting=SETTING)
    return str(caught.value).replace(str(Path.cwd()), "WORK")


def test_a_function_of_a_file_and_one_of_a_package_are_loaded(working_folder: Path, run: Path) -> None:
    (working_folder / "my_loss.py").write_text("def dppo(): return 1")
    (working_folder / "mine").mkdir()
    (working_folder / "mine/__init__.py").touch()
    (working_folder / "mine/one.py").write_text("from mine.two import TWO\ndef f(): return TWO")
    (working_folder / "mine/two.py").write_text("TWO = 2")
    assert load("my_loss:dppo", run, setting=SETTING)() == 1
    assert load("mine.one:f", run, setting=SETTING)() == 2


@pytest.mark.parametrize(
    ("code", "name", "said"),
    [
        ("x = 1", "other:f", "there is no other.py, and no other/ with an __init__.py, in "),
        ("x = 1", "mod:f", "WORK/mod.py has no f"),
        ("x = 1", "mod:x", "x must be a function or a class; it is int"),
        ("x = 1", "mod.deeper:f", "WORK/mod.py cannot be imported: ModuleNotFoundError: No module named 'mod.deeper'"),
        ("\n1 / 0", "mod:f", "WORK/mod.py cannot be imported: WORK/mod.py:2: ZeroDivisionError: division by zero"),
        ("def f(:", "mod:f", "WORK/mod.py cannot be imported: WORK/mod.py:1: SyntaxError: invalid syntax"),
        ("import absent_package", "mod:f", "WORK/mod.py:1: ModuleNotFoundError: No module named 'absent_package'"),
        ("import sys\nsys.exit(3)", "mod:f", "WORK/mod.py:2: SystemExit: 3"),
        ("import json\njson.loads('')", "mod:f", "WORK/mod.py:2: json.decoder.JSONDecodeError: Expecting value"),
        ("x = 1", "mod:", "must be module:object, as in my_module:my_function"),
        ("x = 1", "../mod:f", "must be module:object"),
        ("x = 1", "trainer:f", "kestrel itself has a package trainer: give your module another name"),
    ],
)
def test_what_cannot_be_loaded_is_refused_with_the_reason(
    working_folder: Path, run: Path, code: str, name: str, said: str
) -> None:
    (working_folder / "mod.py").write_text(code)
    message = refusal(name, run)
    assert message.startswith(f"{SETTING}={name}: ") and said in message


def test_a_module_whose_name_is_taken_must_be_renamed(working_folder: Path, run: Path) -> None:
    (working_folder / "json.py").write_text("def f(): pass")
    assert "the name json is taken by" in refusal("json:f", run)


def test_the_run_uses_its_own_copy_and_names_its_digest(working_folder: Path, run: Path) -> None:
    (working_folder / "copied.py").write_text("def f(): return 'begun with'")
    write_run(config("copied:f"), run)
    (working_folder / "copied.py").write_text("def f(): return 'changed since'")
    assert load("copied:f", run, setting=SETTING)() == "begun with"
    digests = read_run(run).user_code
    assert list(digests) == ["copied:f"] and digests["copied:f"].startswith("sha256:")


def test_a_resume_says_which_code_changed_and_which_it_uses(working_folder: Path, run: Path) -> None:
    (working_folder / "copied.py").write_text("def f(): return 1")
    write_run(config("copied:f"), run)
    assert list(changes(read_run(run), run)) == []
    (working_folder / "copied.py").write_text("def f(): return 2")
    (said,) = changes(read_run(run), run)
    assert "differs from the run's own copy" in said and str(working_folder / "copied.py") in said
    (run / "user_code/copied.py").write_text("def f(): return 3")
    (said,) = changes(read_run(run), run)
    assert "has changed since the run last started; the changed code is used" in said
    write_run(stored := read_run(run), run)
    (working_folder / "copied.py").unlink()
    assert list(changes(stored, run)) == []


def test_a_package_is_copied_whole_and_any_change_in_it_is_seen(working_folder: Path, run: Path) -> None:
    (working_folder / "pack/inner").mkdir(parents=True)
    for file in ("pack/__init__.py", "pack/inner/__init__.py", "pack/inner/table.txt"):
        (working_folder / file).touch()
    write_run(config("pack.inner:f"), run)
    assert (run / "user_code/pack/inner/table.txt").is_file()
    (run / "user_code/pack/inner/table.txt").write_text("changed")
    assert len(list(changes(read_run(run), run))) == 1


def loaded_alone(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "conf.user_code", *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == (2 if done.stderr else 0)
    return done.stderr


def test_a_neighbour_that_would_be_left_behind_is_refused(working_folder: Path, run: Path) -> None:
    (working_folder / "neighbour.py").touch()
    (working_folder / "first.py").write_text("import neighbour\ndef f(): pass")
    said = loaded_alone(str(run), "algo.policy_loss=first:f")
    assert "neighbour.py, which is not copied into the run's folder: put both into one package" in said
    (working_folder / "neighbour.py").write_text("def g(): pass")
    assert loaded_alone(str(run), "algo.policy_loss=first:f", "algo.advantage=neighbour:g") == ""


def test_settings_that_take_user_code_take_a_name_and_the_others_do_not() -> None:
    own = config("my_loss:dppo")
    check_each(own)
    assert [(one.setting, one.name, one.role) for one in named(own)] == [("algo.policy_loss", "my_loss:dppo", "trainer")]
    own.algo.kl_estimator = "my_kl:f"
    with pytest.raises(ConfigError, match=r"algo\.kl_estimator='my_kl:f': choose one of"):
        check_each(own)
