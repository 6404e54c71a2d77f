import shutil
import subprocess
from pathlib import Path

from launch.processes.logs import last_lines, open_log


def start(log: Path, *command: str) -> None:
    with open_log(log, command) as out:
        subprocess.run(command, stdout=out, check=True)


def test_process_starts_though_its_log_has_no_room(tmp_path: Path) -> None:
    (tmp_path / "judge-0.log").symlink_to("/dev/full")
    start(tmp_path / "judge-0.log", "true")


def test_log_whose_folder_was_cleared_away_is_begun_again(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "judge-0.log"
    for _ in range(2):
        start(log, "echo", "it runs")
        assert last_lines(log) == ["it runs"]
        shutil.rmtree(log.parent)
