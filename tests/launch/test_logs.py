import shutil
import subprocess
from pathlib import Path

import pytest

from launch.logs import last_lines, open_log


def full(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/full")


def gone(path: Path) -> None:
    shutil.rmtree(path.parent)


@pytest.mark.parametrize("harm", [full, gone])
def test_process_starts_though_its_log_cannot_be_written(harm, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "judge-0.log"
    log.parent.mkdir()
    with open_log(log, ["judge"]) as out:
        subprocess.run(["echo", "it runs"], stdout=out, check=True)
    assert last_lines(log) == ["it runs"]
    harm(log)
    with open_log(log, ["judge"]) as out:
        subprocess.run(["true"], stdout=out, check=True)
