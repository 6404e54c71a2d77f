import shutil
import subprocess
from pathlib import Path

from conf.compose.run_folder import TRAINER_FAILURE
from launch.processes.logs import last_lines, open_log, read_exit


def start(log: Path, *command: str) -> None:
    with open_log(log, command) as out:
        subprocess.run(command, stdout=out, check=True)


def test_process_starts_although_the_disk_of_its_log_is_full(tmp_path: Path) -> None:
    (tmp_path / "judge-0.log").symlink_to("/dev/full")
    start(tmp_path / "judge-0.log", "true")


def test_log_whose_folder_was_removed_is_created_again(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "judge-0.log"
    for _ in range(2):
        start(log, "echo", "it runs")
        assert last_lines(log) == ["it runs"]
        shutil.rmtree(log.parent)


TORCHRUN = (
    "ValueError: connection closed by peer\n"
    "E1130 api.py:869] failed (exitcode: 1) local_rank: 2 (pid: 12) of binary: python\n"
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: trainer FAILED\n"
)


def test_first_failure_of_any_rank_stands_before_the_end_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "logs/trainer-1.log"
    with open_log(log, ["torchrun"]) as out:
        out.write(TORCHRUN.encode())
    (tmp_path / TRAINER_FAILURE).write_text("rank 0 on n1: model.path=/m is gone: bring it back\n")
    ended = read_exit("trainer-1", 1, log)
    assert ended.description == "trainer-1 (worker 2) ended with exit code 1"
    first, _, tail = ended.log_tail.partition("The end of ")
    assert "rank 0 on n1: model.path=/m is gone: bring it back" in first
    assert "connection closed by peer" in tail and "ChildFailedError" not in tail


def test_trainer_that_was_killed_before_it_could_write_why_has_its_log_alone(tmp_path: Path) -> None:
    log = tmp_path / "logs/trainer-0.log"
    open_log(log, ["torchrun"]).close()
    assert "first failure" not in read_exit("trainer-0", -9, log).log_tail


def test_failure_of_the_trainer_is_not_shown_for_other_processes(tmp_path: Path) -> None:
    (tmp_path / TRAINER_FAILURE).write_text("rank 0 on n1: boom\n")
    open_log(tmp_path / "logs/judge-0.log", ["judge"]).close()
    assert "boom" not in read_exit("judge-0", 1, tmp_path / "logs/judge-0.log").log_tail
