"""Losses and advantages of the user's own: the documented examples train, and a mistake in one is named."""

from pathlib import Path
from shutil import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from conf.schema import AlgoConfig, ConfigError
from rollout.ledger.records import Group
from tests.trainer import ranks
from tests.trainer.megatron.test_policy import batch, config, model_folder
from trainer.learn.algorithm import load_algorithm
from trainer.learn.health import TrainingError
from trainer.learn.losses import LossInputs
from trainer.learn.sequences import Sequences

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def step_with(folder: str, run_dir: str, tp: int, pp: int, loss: str, advantage: str) -> dict[str, float]:
    """The figures of the second of two steps, when the policy is no longer the one that sampled."""
    from conf.shapes import Layout
    from trainer import process_groups
    from trainer.megatron.policy import load_policy
    from trainer.step import Stopwatch, train_step

    settings = config()
    settings.model.path, settings.model.dtype = folder, "float32"
    settings.algo.policy_loss, settings.algo.advantage, settings.algo.behaviour_correction = loss, advantage, "none"
    mesh = process_groups.initialize(Layout(tp=tp, pp=pp), seed=0, timeout_s=60)
    policy = load_policy(settings, mesh)
    algorithm = load_algorithm(settings.algo, Path(run_dir))
    figures = [train_step(policy, algorithm, batch(step), settings, Stopwatch()) for step in range(2)]
    process_groups.shutdown()
    return figures[-1]


def user_code(run_dir: Path, *files: Path) -> str:
    (run_dir / "user_code").mkdir(parents=True)
    for file in files:
        copy(file, run_dir / "user_code")
    return str(run_dir)


def test_the_documented_examples_train_and_their_figures_reach_every_rank(tmp_path: Path) -> None:
    from trainer.metrics.table import find

    folder = model_folder(tmp_path / "model", layers=2)
    run_dir = user_code(tmp_path / "run", EXAMPLES / "my_loss.py", EXAMPLES / "my_advantage.py")
    names = ("my_loss:dppo", "my_advantage:shorter_is_better")
    [plain] = ranks.run(step_with, 1, folder, run_dir, 1, 1, "ppo", "dr_grpo")
    first, last = ranks.run(step_with, 2, folder, run_dir, 1, 2, *names)  # the first pipeline stage sees no log-probs
    assert first["loss/user/masked_fraction"] == last["loss/user/masked_fraction"]
    assert 0 < first["loss/user/probability_moved"] < 1
    assert first["grad_norm"] > 1e-4 and first["grad_norm"] != pytest.approx(plain["grad_norm"])
    assert [name for name in first if find(name) is None] == []


def test_the_example_of_an_advantage_prefers_the_shorter_of_two_right_answers(tmp_path: Path) -> None:
    algorithm = load_algorithm(
        AlgoConfig(advantage="my_advantage:shorter_is_better"),
        Path(user_code(tmp_path, EXAMPLES / "my_advantage.py")),
    )
    lengths = (10, 20, 5)
    group = SimpleNamespace(trajectories=[SimpleNamespace(completion_tokens=n) for n in lengths], prompt_id="p")
    right, longer, wrong = algorithm.advantage(np.array([1.0, 1.0, 0.0]), group, AlgoConfig())  # type: ignore[arg-type]
    assert right > longer > wrong and right + longer + wrong == pytest.approx(0)


def algorithm_of(folder: Path, body: str):
    """`f` of a module that holds this body, as loss and as advantage."""
    module = f"mine_{abs(hash(str(folder)))}"  # a module is imported once in a process
    (folder / "user_code").mkdir()
    (folder / "user_code" / f"{module}.py").write_text(f"import torch\n\n\ndef f(*given):\n    {body}\n")
    return load_algorithm(AlgoConfig(policy_loss=f"{module}:f", advantage=f"{module}:f"), folder)


def loss_inputs(count: int) -> LossInputs:
    zeros = torch.zeros(count)
    sequences = Sequences(index=torch.zeros(count, dtype=torch.int64), count=1)
    return LossInputs(old=zeros, behaviour=zeros, behaviour_weights=zeros, advantages=zeros, reference=None, sequences=sequences)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return given[0].sum()", r"a tensor of shape \[\] for the loss: return one value per token, a tensor of shape \[3\]"),
        ("return 1.0", "a float for the loss"),
        ("return given[0].detach()", "without gradient"),
        ("return given[0], {'mine': given[0].mean()}", r"for the figure 'mine'"),
        ("return given[0], [1]", "figures of type list"),
    ],
)
def test_a_loss_that_returns_something_else_is_named_with_what_it_should_return(tmp_path: Path, body: str, message: str) -> None:
    algorithm = algorithm_of(tmp_path, body)
    with pytest.raises(TrainingError, match=rf"algo.policy_loss=mine_\d+:f returned .*{message}"):
        algorithm.policy_loss(torch.zeros(3, requires_grad=True), loss_inputs(3), AlgoConfig())


@pytest.mark.parametrize("body", ["return given[0][:1]", "return [float('nan')] * 4", "return None", "return 'x'"])
def test_an_advantage_that_returns_something_else_is_named_with_what_it_should_return(tmp_path: Path, body: str) -> None:
    algorithm = algorithm_of(tmp_path, body)
    group: Group = batch(groups=1).groups[0]
    with pytest.raises(TrainingError, match=r"algo.advantage=mine_\d+:f returned .* one finite number per completion, 4 in all"):
        algorithm.advantage(group.rewards.astype(np.float64), group, AlgoConfig())


def test_a_name_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"algo\.policy_loss=no_such_module:f"):
        load_algorithm(AlgoConfig(policy_loss="no_such_module:f"), tmp_path)
