"""The gradient of a step, and its figures, are the same for every layout and every packing of the same batch."""

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pytest
import torch

from conf.schema import RunConfig
from tests.trainer import ranks
from tests.trainer.megatron.test_policy import batch, config, model_folder


@dataclass(frozen=True, kw_only=True)
class Case:
    """Settings of `trainer`, on tp x pp x cp x dp ranks."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    tokens: int = 64
    more: dict[str, Any] = field(default_factory=dict)
    algo: dict[str, Any] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    def __str__(self) -> str:
        sizes = "-".join(f"{key}{value}" for key, value in asdict(self).items() if isinstance(value, int) and value != 1)
        return "-".join([sizes, *(key if value is True else f"{key}{value}" for key, value in self.more.items())])


SP = {"sequence_parallel": True}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
FAST = [Case(cp=2), Case(tp=2, pp=2, more=SP), Case(pp=2, more={"vpp": 2})]
SLOW = [
    Case(tokens=200),
    Case(tokens=33),
    Case(more={"recompute": "selective"}),
    Case(tp=2),
    Case(tp=2, more=SP | {"recompute": "full"}),
    Case(tp=4, more=SP),
    Case(pp=2),
    Case(pp=4, tokens=40),
    Case(pp=2, dp=2, more={"vpp": 2} | OVERLAP),
    Case(dp=2),
    Case(dp=2, more={"overlap_grad_reduce": True}),
    Case(dp=4, tokens=40, more=OVERLAP),
    Case(cp=4),
    Case(cp=2, dp=2, more=OVERLAP),
    Case(tp=2, cp=2, more=SP),
    Case(tp=2, cp=2, more={"recompute": "full"}),
    Case(pp=2, cp=2),
    Case(pp=2, cp=2, more={"vpp": 2, "recompute": "selective"}),
]


def settings(folder: str, case: Case) -> RunConfig:
    made = config(case.tokens)
    made.model.path, made.model.dtype = folder, "float32"
    for name, value in {"tp": case.tp, "pp": case.pp, "cp": case.cp, "dp": case.dp, **case.more}.items():
        setattr(made.trainer, name, value)
    for name, value in case.algo.items():
        setattr(made.algo, name, value)
    return made


def gradients(folder: str, case: Case) -> tuple[dict[str, float], list[dict[str, torch.Tensor]]]:
    """One step on two minibatches: its figures, and for each minibatch the gradient under the names of Hugging Face."""
    from megatron.core.utils import get_model_config

    from conf.shapes import layout_of
    from tests.trainer.jobs import exported
    from trainer import process_groups
    from trainer.learn.algorithm import load_algorithm
    from trainer.megatron.policy import load_policy
    from trainer.step import Stopwatch, train_step

    run = settings(folder, case)
    policy = load_policy(run, process_groups.initialize(layout_of(run.trainer), seed=0, timeout_s=60))
    megatron = get_model_config(policy.chunks[0])
    finalize, seen = megatron.finalize_model_grads_func, []

    def finalize_and_look(*args: Any, **options: Any) -> None:
        finalize(*args, **options)
        weights = [p.data.clone() for p in policy.parameters()]
        # A rank has its part of the reduced gradient; laid into the weights, it is gathered and exported as they are.
        for chunk in policy.chunks:
            for buffer in chunk.buffers:
                buffer.param_data.copy_(buffer.grad_data)
            chunk.start_param_sync(force_sync=True)
        seen.append(exported(policy.chunks, policy.shape, policy.mesh))
        for parameter, weight in zip(policy.parameters(), weights, strict=True):
            parameter.data.copy_(weight)
        for group in (group for chunk in policy.chunks for group in chunk.bucket_groups):
            group.param_gather_dispatched = False  # the gather that counts is the one after the optimizer step

    megatron.finalize_model_grads_func = finalize_and_look
    figures = train_step(policy, load_algorithm(run.algo), batch(), run, Stopwatch())
    process_groups.shutdown()
    return figures, seen


def on_all_ranks(folder: str, case: Case) -> tuple[dict[str, float], list[dict[str, torch.Tensor]]]:
    results = ranks.run(gradients, case.world, folder, case)
    minibatches = zip(*(seen for _, seen in results), strict=True)
    return results[0][0], [{name: g for part in parts for name, g in part.items()} for parts in minibatches]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = model_folder(tmp_path_factory.mktemp("model"))
    return folder, *on_all_ranks(folder, Case())


@pytest.mark.parametrize("case", FAST + [pytest.param(case, marks=pytest.mark.slow) for case in SLOW], ids=str)
def test_the_gradient_is_the_same_in_every_layout_and_packing(alone, case):
    folder, figures, [first, second] = alone
    other_figures, [other_first, other_second] = on_all_ranks(folder, case)
    assert_same(other_first, first, 1e-5)
    # The second minibatch is seen by weights that AdamW moved: it divides by the gradient's size, near zero by its rounding.
    assert_same(other_second, second, 1e-3)
    for name in ("loss/total", "kl/reference", "grad_norm", "clip/fraction", "entropy/mean", "mismatch/abs_logprob"):
        assert other_figures[name] == pytest.approx(figures[name], rel=1e-4, abs=1e-6), name


OF_SEQUENCES = {"policy_loss": "gspo", "behaviour_level": "sequence", "loss_normalisation": "sequence", "entropy_coef": 0.05}
OF_GROUPS = {"advantage": "rloo", "kl_in": "reward", "kl_estimator": "k1"}


@pytest.mark.parametrize("case", [Case(cp=2), pytest.param(Case(tp=2, pp=2, dp=2, more=SP), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("algo", [OF_SEQUENCES, OF_GROUPS], ids=["sequences", "groups"])
def test_what_belongs_to_whole_sequences_and_groups_is_the_same_however_they_are_cut(alone, case, algo):
    """Ratios and weights of sequences whose tokens lie on several ranks; rewards that need the KL of other ranks' tokens."""
    folder = alone[0]
    figures, [gradient, _] = on_all_ranks(folder, replace(Case(), algo=algo))
    other_figures, [other_gradient, _] = on_all_ranks(folder, replace(case, algo=algo))
    assert_same(other_gradient, gradient, 1e-5)
    for name in (
        "loss/total",
        "kl/reference",
        "behaviour/weight_mean",
        "behaviour/ess_fraction",
        "behaviour/weight_p99",
        "entropy/mean",
    ):
        assert other_figures[name] == pytest.approx(figures[name], rel=1e-4, abs=1e-6), name


def assert_same(gradient: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    """Each tensor to `tolerance` of the largest entry of the whole gradient."""
    assert gradient.keys() == expected.keys()
    largest = max(g.abs().max().item() for g in expected.values())
    assert largest > 1e-3
    worst = max(((gradient[name] - g).abs().max().item() / largest, name) for name, g in expected.items())
    assert worst[0] < tolerance, worst
