"""The lock on a run's folder, and how long a launcher waits for it."""

import fcntl
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from conf.compose.load import read_run
from conf.schema import ConfigError
from launch.processes.lock import LOCK_FILE
from launch.processes.run_dir import check_run_dir, locked_run_dir

PROJECT = Path(__file__).parents[3]


def test_second_launcher_is_refused_at_once(tmp_path: Path) -> None:
    said: list[str] = []
    with (
        locked_run_dir(tmp_path),
        pytest.raises(ConfigError, match="in use by another launcher"),
        locked_run_dir(tmp_path, say=said.append),
    ):
        raise AssertionError("both hold it")
    assert said == []


@pytest.mark.parametrize("run_dir", ["file", "file/run", "file/deep/run"])
def test_folder_below_a_file_is_refused_by_that_files_name(tmp_path: Path, run_dir: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"/file is not a folder"):
        check_run_dir(tmp_path / run_dir, resumed=False)


def test_folder_that_cannot_be_written_is_refused_before_anything_is_made() -> None:
    """Even root cannot write to /proc."""
    with pytest.raises(ConfigError, match=r"/proc cannot be written"):
        check_run_dir(Path("/proc/outputs/run"), resumed=False)
    with pytest.raises(ConfigError, match=r"/proc/cache cannot be written"), locked_run_dir(Path("/proc/cache")):
        pass


@pytest.mark.parametrize("text", [b"a: [", b"\xff\xfe", b"- a", b"name: [1"])
def test_damaged_configuration_is_refused_by_name(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "config.yaml").write_bytes(text)
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        read_run(tmp_path)


def test_requeued_job_waits_until_the_lock_of_a_dead_node_is_released(tmp_path: Path) -> None:
    said: list[str] = []
    lock = (tmp_path / LOCK_FILE).open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    threading.Timer(1.0, lock.close).start()
    with locked_run_dir(tmp_path, patience_s=60.0, say=said.append):
        assert lock.closed
    assert len(said) == 1 and "60 s at most" in said[0]


def test_requeued_job_does_not_wait_without_a_limit(tmp_path: Path) -> None:
    with (
        locked_run_dir(tmp_path),
        pytest.raises(ConfigError, match="another launcher"),
        locked_run_dir(tmp_path, patience_s=0.2, say=lambda text: None),
    ):
        raise AssertionError("both hold it")


def test_killed_launcher_leaves_no_lock(tmp_path: Path) -> None:
    code = """
import os, pathlib, sys
from launch.processes.run_dir import locked_run_dir
with locked_run_dir(pathlib.Path(sys.argv[1])):
    os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=PROJECT, timeout=60)
    assert done.returncode == -9 and (tmp_path / LOCK_FILE).exists()
    with locked_run_dir(tmp_path):
        pass
