"""A recorded step comes out the same, from the run's folder alone, in its layout and in another."""

import contextlib
import io
import json
import re
from pathlib import Path

import pytest

from tests.rollout.stage import free_ports
from tests.trainer import ranks
from tests.trainer.stand_in_run import Run, make_run
from trainer.replay import Replay, ReplayError, main, plan, table


def replay(*arguments: str) -> tuple[int, str]:
    """A rank of a replay: exit code and what it said."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(arguments)
    return code, said.getvalue()


def differences(text: str) -> dict[str, float]:
    """By figure, of those that do not depend on the clock or on how the model is cut."""
    rows = re.findall(r"^(\w\S*) +(\S+) +(\S+) +(\S+e[+-]\d+)$", text, re.MULTILINE)
    return {row[0]: float(row[3]) for row in rows if not row[0].startswith(("time/", "packing/", "reference/host"))}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Run:
    """Five steps, with checkpoints of versions 3 and 5, and a reference that became version 4."""
    changes = {"trainer__steps": 5, "trainer__checkpoint_every": 3, "trainer__checkpoints_kept": 2, "data__heldout": []}
    run = make_run(tmp_path_factory.mktemp("replay"), free_ports(40), algo__reference_refresh_steps=2, **changes)
    with run.queue():
        run.train()
    return run


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_step_comes_out_as_it_was_recorded_in_whatever_layout(finished: Run, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    for size, settings, most in ((2, [f"profile={trace}"], 2e-8), (1, ["trainer.pp=1"], 1e-6)):
        (code, text), *_ = ranks.run(replay, size, str(finished.path), "step=5", *settings)
        assert code == 0, text
        seen = differences(text)
        assert {"loss/total", "grad_norm", "kl/reference", "reward/mean", "reference/version"} <= seen.keys()
        assert max(map(abs, seen.values())) <= most, text
    assert any(event.get("name") == "aten::mm" for event in json.loads(trace.read_text())["traceEvents"])
    # From older weights it is another step.
    (code, text), *_ = ranks.run(replay, 1, str(finished.path), "step=5", "trainer.pp=1", "catch_up=false")
    assert code == 0 and abs(differences(text)["grad_norm"]) > 1e-5, text
    refused(finished)


def refused(run: Run) -> None:
    assert plan(Replay.of(run.path, ["step=4"])).version == 3
    assert list(plan(Replay.of(run.path, ["step=5"])).batches) == [3, 4]
    with pytest.raises(ReplayError, match=r"batch of step 1, between version 0 and it, is not in the ledger.* steps 4 to 5"):
        plan(Replay.of(run.path, ["step=2"]))
    with pytest.raises(ReplayError, match="batch of step 6, between version 5 and it"):
        plan(Replay.of(run.path, ["step=9"]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([], "name the step"),
        (["step=0"], "name the step"),
        (["step"], "expected key=value"),
        (["step=3", "speed=2"], "speed: unknown setting"),
        (["step=3", "catch_up=perhaps"], "true or false"),
    ],
)
def test_what_is_not_understood_is_refused_with_what_is_meant(settings: list[str], message: str) -> None:
    with pytest.raises(ReplayError, match=message):
        Replay.of(Path("run"), settings)


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "step=1"]) == 1
    assert "is not the folder of a run" in capsys.readouterr().err


def test_the_table_shows_figures_that_were_not_recorded() -> None:
    lines = table({"loss/total": 0.5, "new": 1.0}, {"loss/total": 0.25}).splitlines()
    assert lines[1].split() == ["loss/total", "0.25", "0.5", "2.50e-01"]
    assert lines[2].split() == ["new", "-", "1", "-"]
