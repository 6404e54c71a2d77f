"""The loggers of a run: what a resumed run keeps, and that a logger which fails never ends the training."""

import json
import logging
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from conf.schema import RunConfig
from trainer.metrics.loggers import Loggers


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
    writer = Loggers(tmp_path, RunConfig(), version=2)
    writer.write(3, {"reward/mean": 0.5}, {})
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
    writer = Loggers(tmp_path, RunConfig(), version=0)
    with no_file_may_grow():
        for step in range(1, 60):  # more events than TensorBoard's queue holds
            writer.write(step, {"reward/mean": 0.5}, {})
    writer.write(60, {"reward/mean": 0.5}, {})
    with no_file_may_grow():
        writer.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 60
    assert {line["step"] for line in lines} <= set(range(1, 61))


class FakeWandb(ModuleType):
    """Stands in for the package `wandb`, which is optional and needs a server."""

    def __init__(self, *, init_fails: bool = False, log_fails: bool = False) -> None:
        super().__init__("wandb")
        self.started: list[dict[str, Any]] = []
        self.logged: list[dict[str, float]] = []
        self.axes: list[tuple[str, str]] = []
        self._init_fails, self._log_fails = init_fails, log_fails

    def init(self, **options: Any) -> "FakeWandb":
        if self._init_fails:
            raise RuntimeError("api.wandb.ai cannot be reached")
        self.started.append(options)
        return self

    def define_metric(self, name: str, *, step_metric: str) -> None:
        self.axes.append((name, step_metric))

    def log(self, figures: dict[str, float]) -> None:
        if self._log_fails:
            raise ConnectionError("the service is gone")
        self.logged.append(figures)

    def finish(self) -> None:
        pass


def with_project() -> RunConfig:
    config = RunConfig(name="a-run")
    config.trainer.wandb_project = "project"
    return config


def test_a_resumed_run_goes_on_in_its_run_of_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for version, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        loggers = Loggers(tmp_path, with_project(), version=version)
        for step in steps:
            loggers.write(step, {"reward/mean": 0.5}, {})
        loggers.close()
    first, second = fake.started
    assert first["id"] == second["id"] and first["resume"] == second["resume"] == "allow"
    assert ("*", "step") in fake.axes
    assert [figures["step"] for figures in fake.logged] == [1, 2, 3, 3, 4]


def test_two_runs_are_two_runs_of_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        Loggers(tmp_path / name, with_project(), version=0).close()
    assert len({started["id"] for started in fake.started}) == 2


@pytest.mark.parametrize("fake", [FakeWandb(init_fails=True), FakeWandb(log_fails=True), None])
def test_a_logger_that_fails_costs_one_warning_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fake: FakeWandb | None
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", fake)  # None: the package is not installed
    caplog.set_level(logging.WARNING, logger="trainer")
    loggers = Loggers(tmp_path, with_project(), version=0)
    for step in range(1, 6):
        loggers.write(step, {"reward/mean": 0.5}, {"no code block": 3})
    loggers.close()
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1 and "figures are missing in Weights & Biases (training goes on)" in warnings[0]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert lines[0]["verdict_reasons"] == {"no code block": 3}
