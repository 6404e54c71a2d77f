"""Failures that workers and trainer write into their logs are shown at once."""

from pathlib import Path

from launch.report.log_messages import LONGEST, LogMessages
from tests.launch.stand_ins import PROJECT

STAMP = "2026-11-30 21:00:00,123"
FAILURE = (
    f"{STAMP} ERROR engine http://127.0.0.1:20009 died while starting: RuntimeError: 407 Proxy Authentication Required; "
    "the end of logs/engine-0.log:\n"
    "Traceback (most recent call last):\n"
    '  File "launch_server.py", line 7, in <module>\n'
    "RuntimeError: 407 Proxy Authentication Required\n"
)


def write(log_dir: Path, text: str, worker: int = 0) -> None:
    log_dir.mkdir(exist_ok=True)
    with (log_dir / f"worker-{worker}.log").open("a") as log:
        log.write(text)


def test_failure_is_shown_once_with_its_reason(tmp_path: Path) -> None:
    messages = LogMessages(tmp_path / "logs")
    assert messages.new() == []
    write(tmp_path / "logs", f"{STAMP} INFO engine-0 starts\n" + FAILURE)
    why = "RuntimeError: 407 Proxy Authentication Required"
    assert messages.new() == [f"worker-0: engine http://127.0.0.1:20009 died while starting: {why}"]
    assert messages.new() == []


def test_failures_of_an_earlier_launch_are_not_shown(tmp_path: Path) -> None:
    write(tmp_path / "logs", FAILURE)
    assert LogMessages(tmp_path / "logs").new() == []


def test_engine_that_fails_again_and_again_does_not_fill_the_screen(tmp_path: Path) -> None:
    messages = LogMessages(tmp_path / "logs")
    for port in range(20):
        write(tmp_path / "logs", FAILURE.replace("20009", str(20009 + port)))
        write(tmp_path / "logs", FAILURE, worker=1)
    assert len(messages.new()) == 2


def test_line_that_is_still_being_written_waits(tmp_path: Path) -> None:
    messages = LogMessages(tmp_path / "logs")
    write(tmp_path / "logs", f"{STAMP} ERROR engine-0 has gone")
    assert messages.new() == []
    write(tmp_path / "logs", ": it was killed by SIGKILL\n")
    assert messages.new() == ["worker-0: engine-0 has gone: it was killed by SIGKILL"]


def test_bytes_and_control_characters_of_a_log_do_not_reach_the_terminal(tmp_path: Path) -> None:
    messages = LogMessages(tmp_path / "logs")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/worker-0.log").write_bytes(f"{STAMP} ERROR a\x1b[31m".encode() + b"\xff" + b"z" * 9999 + b"\n")
    [line] = messages.new()
    assert line.isprintable() and len(line) <= LONGEST + len("worker-0: ")


def test_warnings_of_the_trainer_are_shown_but_those_of_workers_are_not(tmp_path: Path) -> None:
    messages = LogMessages(tmp_path / "logs")
    write(tmp_path / "logs", f"{STAMP} WARNING the prompt of group 7 is refused\n")
    for level in ("INFO", "WARNING"):
        (tmp_path / "logs/trainer-0.log").open("a").write(f"{STAMP} {level} the run learns nothing from its rewards\n")
    assert messages.new() == ["trainer-0: the run learns nothing from its rewards"]


def test_worker_and_trainer_log_in_the_format_that_is_read() -> None:
    for source in ("rollout/__main__.py", "trainer/__main__.py"):
        assert 'format="%(asctime)s %(levelname)s %(message)s"' in (PROJECT / source).read_text()
