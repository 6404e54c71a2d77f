"""What is left of metrics.jsonl when a run goes on, and when there is no room for it."""

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from conf.schema import RunConfig
from trainer.learn.metrics import MetricsWriter


@pytest.mark.parametrize(
    "damage",
    [
        b'{"step": 2, "tim',
        b"\x00\x00\x00\n",
        b"\xff\xfe{\n",
        b"[1, 2]\n",
        b'"step"\n',
        b'{"time": 1.5}\n',
        b'{"step": "two"}\n',
        b"\n",
    ],
)
def test_a_run_goes_on_behind_its_version_whatever_a_crash_left_in_the_file(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = [b'{"step": %d, "time": 1.5}\n' % step for step in range(4)]
    path.write_bytes(whole[0] + (damage if damage.endswith(b"\n") else b"") + b"".join(whole[1:]) + damage)
    writer = MetricsWriter(tmp_path, RunConfig(), version=2)
    writer.write(3, {"reward/mean": 0.5})
    writer.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert lines[3]["reward/mean"] == 0.5


@contextmanager
def no_file_may_grow() -> Iterator[None]:
    """As on a full disk, for this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's thread
def test_a_full_disk_ends_no_training_and_its_lines_come_when_there_is_room_again(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, RunConfig(), version=0)
    with no_file_may_grow():
        for step in range(1, 60):  # more events than TensorBoard's queue holds
            writer.write(step, {"reward/mean": 0.5})
    writer.write(60, {"reward/mean": 0.5})
    with no_file_may_grow():
        writer.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 60
    assert {line["step"] for line in lines} <= set(range(1, 61))
