"""Every command in README and on the pages works: each is run at its smallest, or the rule below says how else it is checked.

The commands are the indented lines that begin with `make`, `sbatch` or `.venv/bin/python`. A new command needs a rule only where
it cannot be run as it stands.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
PAGES = [PROJECT / "README.md", PROJECT / "CONTRIBUTING.md", *sorted((PROJECT / "docs").rglob("*.md"))]
COMMAND = re.compile(r"^ {4}((?:make|sbatch|\.venv/bin/python) .*(?:\\\n.*)*)", re.M)
DEADLINE_S = 900
STEPS = 13  # what `launch.advise` needs to learn from a run
SMALL = (
    "algo.groups_per_step=4", "algo.completions_per_group=2", "algo.minibatches=1", "data.heldout=[]",
    "trainer.checkpoint_every=4",
)  # fmt: skip
PROBLEM = '{"id": "one", "prompt": "Write one().", "solution": "def one():\\n    return 1\\n", '
PROBLEM += '"task": {"kind": "calls", "entry_point": "one", "tests": [{"args": [], "expected": 1}]}}\n'


@dataclass(frozen=True)
class Rule:
    pattern: str  # what the command's words, joined, must match
    more: tuple[str, ...] = ()  # words that make it small
    instead: str = ""  # why it is not run, and which test does what it says


RULES = (
    Rule(r"make (install|lint|test|test-all|docs|docs-build|peers)$", instead=".ci/run calls it, or serves until it is stopped"),
    Rule(r"make run(?! resume)", instead="the run that the other commands look at is made by it"),
    Rule(r"make run resume=", instead="test_a_run_is_resumed_as_the_page_says"),
    Rule(r"sbatch .*--wrap", instead="needs a cluster: an array of judges"),
    Rule(r"sbatch .*kestrel_256\.sh", instead="tests/launch/slurm/test_slurm.py"),
    Rule(r"-m launch .*experiment=smollm2", instead="tests/test_real_model.py"),
    Rule(r"-m launch -m ", instead="tests/launch/report/test_sweep_runs.py and test_a_sweep_and_its_report"),
    Rule(r"-m launch\.report\.sweep", instead="test_a_sweep_and_its_report"),
    Rule(r"my_loss|my_reader", instead="tests/trainer/test_user_code.py and tests/rollout/prompts/test_reader_example.py"),
    Rule(r"my_rewards", instead="tests/reward/kinds/test_python_example.py"),
    # The model of these tests has 256 positions.
    Rule(r"-m launch\.doctor .*data=files", more=("data.max_prompt_tokens=128",)),
    Rule(r"-m launch .*data=files", more=("dry_run=true", "data.max_prompt_tokens=128")),
    Rule(r"-m launch .*dry_run=true"),
    Rule(r"-m launch ", more=("dry_run=true",)),
    Rule(r"-m launch\.simulate ", more=("simulate.steps=2",)),
    Rule(r"-m pytest", instead="it is one of the tests"),
    Rule(r"-m benchmarks|benchmarks/", instead="a benchmark takes minutes; tests/launch/test_command.py sees that it starts"),
    Rule(r"-m launch\.view", instead="it serves until it is stopped; tests/launch/view"),
    Rule(r"-m conf\.compose\.reference", instead="tests/conf/test_reference.py"),
    Rule(r"-m rollout\.ledger\.new_ledger", instead="it changes the run; tests/rollout/ledger/test_new_ledger.py"),
    Rule(r"-m reward\.check\.convert", instead="tests/reward/readers"),
    Rule(r"-m trainer\.replay", instead="tests/trainer/test_replay.py"),
    Rule(r"-m trainer\.sft resume=", instead="tests/trainer/sft/test_finetuning.py"),
    Rule(
        r"-m trainer\.sft ",
        more=("model.dtype=float32", "data.max_prompt_tokens=128", "rollout.max_completion_tokens=64", "output=OUTPUT"),
    ),
)


def commands() -> Iterator[str]:
    """The words of each command, without what stands behind it on its line, and without what is optional."""
    for page in PAGES:
        for found in COMMAND.findall(page.read_text()):
            text = re.split(r"\s#|\s{2,}", re.sub(r"\\\n\s*", "", found), maxsplit=1)[0]
            yield re.sub(r"\s\[[^\]]*\](?=\s|$)", "", text).strip()


def rule_of(command: str) -> Rule:
    return next((rule for rule in RULES if re.search(rule.pattern, command)), Rule(""))


RUN = sorted({command for command in commands() if not rule_of(command).instead})


def run(words: list[str], *, codes: tuple[int, ...] = (0,)) -> str:
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode in codes, (
        f"{shlex.join(words)} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    )
    return done.stdout


def python(*words: str) -> list[str]:
    return [sys.executable, "-m", *words]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Settings of a small run: few completions, and a model that has seen few demonstrations, so that it is made in seconds."""
    made = tmp_path_factory.mktemp("made")
    run(python("reward.generated.code_problems", "--out", f"{made}/data", "--train=64", "--heldout=4", "--demonstrations=600"))
    run(python("trainer.prepare.warm_start", "--data", f"{made}/data", "--out", f"{made}/model"))
    return (*SMALL, "model.prepare=", f"model.path={made}/model", f"data.train=[{made}/data/train.jsonl]")


@pytest.fixture(scope="module")
def finished_run(small: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run by `make run`, small."""
    output = tmp_path_factory.mktemp("outputs")
    words = " ".join((f"trainer.steps={STEPS}", *small, f"output={output}", "name=documented"))
    run(["make", "run", f"args={words}"])
    return output / "documented"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Problems of one's own."""
    folder = tmp_path_factory.mktemp("own")
    for name in ("problems", "train", "heldout"):
        (folder / f"{name}.jsonl").write_text(PROBLEM.replace('"id": "one"', f'"id": "{name}"'))
    completion = {"id": "problems", "completion": "```python\ndef one():\n    return 1\n```"}
    (folder / "completions.jsonl").write_text(json.dumps(completion) + "\n")
    for name in ("chats", "heldout_chats"):
        (folder / f"{name}.jsonl").write_text('{"prompt": "Write one().", "completion": "def one(): return 1"}\n')
    return folder


@pytest.mark.timeout(DEADLINE_S)
@pytest.mark.parametrize("command", RUN)
def test_the_command_works(command: str, small: tuple[str, ...], finished_run: Path, folder: Path, tmp_path: Path) -> None:
    places = {
        "outputs/NAME": str(finished_run),
        "FOLDER": next(word for word in small if word.startswith("model.path=")).partition("=")[2],
        "OUTPUT": str(tmp_path),
        **{file.name: str(file) for file in folder.iterdir()},
    }
    whole = " ".join((command, *rule_of(command).more))
    text = re.sub("|".join(map(re.escape, places)), lambda found: places[found[0]], whole)
    words = [sys.executable if word == ".venv/bin/python" else word for word in shlex.split(text)]
    warnings = (0, 1) if "launch.doctor" in command else (0,)  # a doctor may find something wrong with this machine
    assert run(words, codes=warnings)


@pytest.mark.timeout(DEADLINE_S)
def test_a_run_is_resumed_as_the_page_says(finished_run: Path) -> None:
    run(["make", "run", f"resume={finished_run}", f"args=trainer.steps={STEPS + 1}"])


@pytest.mark.timeout(DEADLINE_S)
def test_a_sweep_and_its_report(small: tuple[str, ...], tmp_path: Path) -> None:
    sweep = tmp_path / "multirun"
    job = ("experiment=debug", "trainer.steps=1", *small, f"hydra.sweep.dir={sweep}", "rollout.max_staleness=0,1")
    run(python("launch", "-m", *job))
    assert "max_staleness" in run(python("launch.report.sweep", str(sweep)))
