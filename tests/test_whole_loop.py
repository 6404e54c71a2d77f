"""The real thing, small: `python -m launch experiment=debug` with real Megatron and SGLang, and parts of it killed on the way."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from conf.compose.run_folder import METRICS
from launch.report.metrics_file import Metrics, MetricsFile

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

PROJECT = Path(__file__).resolve().parents[1]
STEPS = 8
DEADLINE_S = 900
SMALL = [
    f"trainer.steps={STEPS}", "trainer.eval_completions=1", "trainer.checkpoint_every=2", "algo.groups_per_step=6",
    "algo.completions_per_group=4", "algo.minibatches=2", "rollout.lease_s=8", "data.heldout=[]",
]  # fmt: skip


PARTS = [
    "reward.parts.brevity={kind: python, function: 'my_rewards:brevity', weight: 0.1}",
    "reward.parts.short={kind: length, target: 20, most: 60, weight: 0.2}",
]


@contextmanager
def launched(output: Path, name: str, *overrides: str, cwd: Path = PROJECT) -> Iterator[subprocess.Popen[str]]:
    """A run started as a user would, in its own process group; nothing of it outlives the test."""
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    log = (output / f"{name}.out").open("a+")
    command = [sys.executable, "-m", "launch", *overrides]
    launcher = subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=log, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        yield launcher
    finally:
        for process in [*family(launcher.pid), psutil.Process(launcher.pid)] if launcher.poll() is None else []:
            process.kill()
        launcher.wait()


def family(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def find(launcher: subprocess.Popen[str], *words: str) -> list[psutil.Process]:
    """Processes of the run whose command line holds all the words, torchrun's own left out."""
    found = []
    for process in family(launcher.pid):
        try:
            line = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if all(word in line for word in words) and "torch.distributed.run" not in line and "torchrun" not in line:
            found.append(process)
    return found


def metrics(run: Path) -> list[Metrics]:
    return MetricsFile(run / METRICS, from_start=True).new_lines()


def wait_until(what: str, true: Callable[[], bool], launcher: subprocess.Popen[str], output: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        if launcher.poll() is not None:
            pytest.fail(f"the run ended with {launcher.returncode} before {what}:\n{said(output)}")
        if time.monotonic() > deadline:
            pytest.fail(f"{what} did not come within {DEADLINE_S} s:\n{said(output)}")
        time.sleep(0.3)


def said(output: Path) -> str:
    return "\n".join(file.read_text()[-6000:] for file in output.glob("*.out"))


def check_finished(run: Path, steps: int) -> None:
    """Every step once, the bound kept, and every token accounted for."""
    lines = [line for line in metrics(run) if line["step"] > 0]
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert max(line["lag/max_versions"] for line in lines) <= 2
    assert fmean(m for line in lines if (m := line.get("mismatch/same_version_abs_logprob"))) < 1e-4
    assert sum(line["trajectories/multi_version"] for line in lines) > 0
    assert sum(line["trajectories/resumed"] for line in lines) > 0
    page = (PROJECT / "docs/reading_a_run.md").read_text()
    assert [path.name for path in run.glob("[!.]*") if f"`{path.name}" not in page] == []
    status = json.loads((run / "summary.json").read_text())["queue"]["ledger"]
    assert status["trained_tokens"] == sum(line["tokens/trained"] for line in lines)
    assert status["waiting_tokens"] == 0 and not status["dropped_groups"]
    assert status["admitted_groups"] == steps * 6


def test_a_run_whose_worker_engine_judge_and_queue_server_are_killed_finishes_and_loses_nothing(tmp_path: Path) -> None:
    run, cwd = tmp_path / "chaos", tmp_path / "cwd"
    cwd.mkdir()
    (PROJECT / "cache").mkdir(exist_ok=True)
    (cwd / "cache").symlink_to(PROJECT / "cache")
    (cwd / "my_rewards.py").write_text((PROJECT / "docs/examples/my_rewards.py").read_text())
    words = ("experiment=debug", f"output={tmp_path}", "name=chaos", *SMALL, *PARTS)
    with launched(tmp_path, "chaos", *words, cwd=cwd) as launcher:
        victims = [
            ("an engine", ("--model-path=",)),
            ("the queue server", ("rollout.queue",)),
            ("a judge", ("-m reward",)),
            ("a rollout worker", ("-m rollout ",)),
        ]
        for step, (name, words) in enumerate(victims, start=1):
            wait_until(f"step {step}", lambda step=step: len(metrics(run)) > step, launcher, tmp_path)
            found = find(launcher, *words)
            assert found, f"no process of {name}"
            found[0].send_signal(signal.SIGKILL)
        launcher.wait(timeout=DEADLINE_S)
        assert launcher.returncode == 0, said(tmp_path)
    check_finished(run, STEPS)
    check_parts(run)


def check_parts(run: Path) -> None:
    """The parts of the reward stand in the metrics, the report and TensorBoard, and add up to it."""
    page = (run / "report.html").read_text()
    scalars = EventAccumulator(str(run / "tensorboard")).Reload().Tags()["scalars"]
    lines = [line for line in metrics(run) if line["step"] > 0]
    for part in ("calls", "brevity", "short", "function_failed"):
        assert part in page
        for name in (f"reward/part/{part}/{figure}" for figure in ("mean", "min", "max")):
            assert name in scalars and all(name in line for line in lines)
    for line in lines:
        tests, brevity, short = (line[f"reward/part/{part}/mean"] for part in ("calls", "brevity", "short"))
        assert line["reward/mean"] == pytest.approx(tests + 0.1 * brevity + 0.2 * short, abs=1e-5)
        assert 0 < brevity <= 1 and line["reward/part/function_failed/max"] == 0


def test_a_run_whose_trainer_is_killed_goes_on_from_its_checkpoint_and_once_done_with_more_steps(tmp_path: Path) -> None:
    run = tmp_path / "resumed"
    with launched(tmp_path, "first", "experiment=debug", f"output={tmp_path}", "name=resumed", *SMALL) as launcher:
        wait_until("step 5", lambda: len(metrics(run)) > 5, launcher, tmp_path)
        find(launcher, "-m trainer ")[0].send_signal(signal.SIGKILL)
        launcher.wait(timeout=120)
        assert launcher.returncode not in (0, None)
        left = [p for p in psutil.process_iter(["cmdline"]) if str(run) in " ".join(p.info["cmdline"] or [])]
        assert not left
    before = {line["step"]: line for line in metrics(run)}
    with launched(tmp_path, "second", f"resume={run}") as launcher:
        launcher.wait(timeout=DEADLINE_S)
        assert launcher.returncode == 0, said(tmp_path)
    check_finished(run, STEPS)
    after = {line["step"]: line for line in metrics(run)}
    again = [step for step in before if step > 2]  # steps that were done before the kill and are done again, or kept
    assert again
    for step in again:  # the same batches, so the same rewards and the same losses
        for name in ("reward/mean", "tokens/trained", "loss/total", "grad_norm"):
            assert after[step][name] == pytest.approx(before[step][name], rel=1e-3, abs=1e-5), (step, name)
    with launched(tmp_path, "third", f"resume={run}", f"trainer.steps={STEPS + 2}") as launcher:
        launcher.wait(timeout=DEADLINE_S)
        assert launcher.returncode == 0, said(tmp_path)
    check_finished(run, STEPS + 2)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_no_process(tmp_path: Path, number: int) -> None:
    with launched(tmp_path, "interrupted", "experiment=debug", f"output={tmp_path}", "name=interrupted", *SMALL) as launcher:
        wait_until("an engine", lambda: bool(find(launcher, "--model-path=")), launcher, tmp_path)
        members = family(launcher.pid)
        os.kill(launcher.pid, number)
        launcher.wait(timeout=30)
        _, alive = psutil.wait_procs(members, timeout=10)
        assert not alive
