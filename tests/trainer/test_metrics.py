"""What is left of metrics.jsonl when a run goes on."""

import json
from pathlib import Path

import pytest

from conf.schema import RunConfig
from trainer.metrics import MetricsWriter


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
