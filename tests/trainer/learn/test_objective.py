"""The losses against hand-computed tables, laws that hold for every input, and independent formulas over padded rows."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conf.schema import AlgoConfig
from trainer.learn.losses import LOSSES, LossInputs, cispo, clipped_surrogate, gspo
from trainer.learn.objective import behaviour_weights, kl, taught, token_losses
from trainer.learn.sequences import Sequences


def inputs(old: Tensor, advantages: Tensor, sequences: Sequences, **more: Tensor | None) -> LossInputs:
    """For a loss of which a test looks at the policy's part, unless it gives `more`."""
    plain = {"behaviour": old, "behaviour_weights": torch.ones_like(old), "reference": None}
    return LossInputs(old=old, advantages=advantages, sequences=sequences, **plain | more)


def clipped(figures: dict[str, Tensor], *names: str) -> list[str]:
    return [name for name in names if name_of(name) in figures and figures[name_of(name)].item()]


def name_of(bound: str) -> str:
    return f"clip/{bound}_fraction"


def one(count: int) -> Sequences:
    """All tokens in one sequence."""
    return Sequences(index=torch.zeros(count, dtype=torch.int64), count=1)


def logs(*ratios: float) -> Tensor:
    return torch.tensor(ratios, dtype=torch.float64).log()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "held"),
    [  # by hand: low 0.2, high 0.28, dual clip 3
        (1.0, 2.0, -2.0, -2.0, None),
        (1.2, 1.0, -1.2, -1.2, None),
        (1.5, 1.0, -1.28, 0.0, "high"),
        (1.5, -1.0, 1.5, 1.5, None),
        (0.5, 1.0, -0.5, -0.5, None),
        (0.5, -1.0, 0.8, 0.0, "low"),
        (4.0, -1.0, 3.0, 0.0, "dual"),
        (4.0, -2.0, 6.0, 0.0, "dual"),
        (4.0, 2.0, -2.56, 0.0, "high"),
        (1.5, 0.0, 0.0, 0.0, None),
    ],
)
def test_the_clipped_surrogate_and_its_gradient(ratio: float, advantage: float, loss: float, gradient: float, held) -> None:
    log_ratio = logs(ratio).requires_grad_()
    algo = AlgoConfig(clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    losses, figures = clipped_surrogate(log_ratio.exp(), torch.tensor([advantage], dtype=torch.float64), algo)
    losses.sum().backward()
    assert losses.item() == pytest.approx(loss)
    assert log_ratio.grad.item() == pytest.approx(gradient)
    assert clipped(figures, "low", "high", "dual") == ([held] if held else [])


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight", "held"),
    [(1.0, 2.0, 1.0, None), (6.0, 1.0, 5.0, "high"), (6.0, -1.0, 5.0, "high"), (0.3, 1.0, 0.6, "low"), (0.3, -1.0, 0.6, "low")],
)
def test_cispo_clips_the_weight_and_keeps_the_gradient(ratio: float, advantage: float, weight: float, held) -> None:
    current = torch.tensor([-1.5], dtype=torch.float64, requires_grad=True)
    old = current.detach() - math.log(ratio)
    given = inputs(old, torch.tensor([advantage], dtype=torch.float64), one(1))
    losses, figures = cispo(current, given, AlgoConfig(clip_low=0.4, clip_high=4.0))
    losses.sum().backward()
    assert losses.item() == pytest.approx(-weight * advantage * -1.5)
    assert current.grad.item() == pytest.approx(-weight * advantage)
    assert clipped(figures, "low", "high") == ([held] if held else [])


def test_gspo_shares_the_geometric_mean_of_the_ratios_and_is_clipped_as_one() -> None:
    ratios = [2.0, 0.5, 1.21]  # their geometric mean is 1.21^(1/3) = 1.0656
    current = logs(*ratios, 3.0).requires_grad_()
    sequences = Sequences(index=torch.tensor([0, 0, 0, 1]), count=2)
    given = inputs(torch.zeros(4), torch.tensor([1.0, 1.0, 1.0, 2.0]), sequences)
    losses, figures = gspo(current, given, AlgoConfig(clip_low=0.1, clip_high=0.1))
    shared = 1.21 ** (1 / 3)
    assert losses.tolist() == pytest.approx([-shared] * 3 + [-2.2])
    assert figures["clip/high_fraction"].tolist() == [0, 0, 0, 1]
    (losses / torch.tensor([3, 3, 3, 1])).sum().backward()
    assert current.grad.tolist() == pytest.approx([-shared / 3] * 3 + [0.0])


def corrected(kind: str = "truncate", level: str = "token", cap: float = 2.0, floor: float = 0.0) -> AlgoConfig:
    return AlgoConfig(behaviour_correction=kind, behaviour_level=level, behaviour_cap=cap, behaviour_floor=floor)


@pytest.mark.parametrize(
    ("kind", "level", "expected"),
    [  # old / behaviour of the tokens: 3, 0.5, 1.5 in one sequence (product 2.25, geometric mean 1.3104) and 0.1 in another
        ("none", "token", [1, 1, 1, 1]),
        ("truncate", "token", [2, 0.5, 1.5, 0.1]),
        ("mask", "token", [0, 0.5, 1.5, 0]),
        ("truncate", "sequence", [2, 2, 2, 0.1]),
        ("mask", "sequence", [0, 0, 0, 0]),
        ("truncate", "geometric", [2.25 ** (1 / 3)] * 3 + [0.1]),
        ("mask", "geometric", [2.25 ** (1 / 3)] * 3 + [0]),
    ],
)
def test_behaviour_weights(kind: str, level: str, expected: list[float]) -> None:
    old, behaviour = logs(3.0, 0.5, 1.5, 0.1), torch.zeros(4, dtype=torch.float64)
    sequences = Sequences(index=torch.tensor([0, 0, 0, 1]), count=2)
    weights, raw = behaviour_weights(old, behaviour, sequences, corrected(kind, level, cap=2.0, floor=0.2))
    assert weights.tolist() == pytest.approx(expected)
    assert raw[3].item() == pytest.approx(0.1) and raw[0].item() == pytest.approx(
        {"token": 3.0, "sequence": 2.25, "geometric": 2.25 ** (1 / 3)}[level]
    )


@pytest.mark.parametrize(("estimator", "expected"), [("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) - 1 + 0.5)])
def test_kl_estimators(estimator: str, expected: float) -> None:
    assert kl(torch.tensor([-1.0]), torch.tensor([-1.5]), estimator).item() == pytest.approx(expected)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_estimators_average_to_the_kl_under_the_current_policy(estimator: str) -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.3, 0.5, 0.2], dtype=torch.float64)
    assert (p * kl(p.log(), q.log(), estimator)).sum().item() == pytest.approx((p * (p / q).log()).sum().item())


def test_the_gradient_of_k2_averages_to_that_of_the_kl() -> None:
    """Why k2 is a loss: under the current policy E[grad k2] = grad KL, which neither k1 nor k3 gives."""
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.3, 0.5, 0.2], dtype=torch.float64).log()
    current = logits.log_softmax(-1)
    [expected] = torch.autograd.grad((current.exp() * (current - reference)).sum(), logits, retain_graph=True)
    [got] = torch.autograd.grad((current.exp().detach() * kl(current, reference, "k2")).sum(), logits)
    torch.testing.assert_close(got, expected)


@given(st.floats(-700, 700), st.sampled_from(["k2", "k3"]))
def test_a_kl_never_drives_a_log_prob_away_from_the_reference(difference: float, estimator: str) -> None:
    current = torch.tensor(difference, requires_grad=True)
    [gradient] = torch.autograd.grad(kl(current, torch.tensor(0.0), estimator), current)
    assert gradient.item() * difference >= 0


@given(st.lists(st.floats(-700, 700), min_size=2, max_size=8), st.sampled_from(sorted(LOSSES)), st.sampled_from(["k2", "k3"]))
def test_no_log_prob_is_so_far_off_that_loss_or_gradient_are_not_finite(
    differences: list[float], kind: str, estimator: str
) -> None:
    count = len(differences)
    current = torch.tensor(differences, requires_grad=True)
    advantages = torch.tensor([(-1.0) ** i for i in range(count)])
    for level in ("token", "sequence", "geometric"):
        weights, raw = behaviour_weights(current.detach(), torch.zeros(count), one(count), corrected(level=level))
        assert torch.isfinite(raw).all()
        zeros = torch.zeros(count)
        given_inputs = inputs(zeros, advantages, one(count), behaviour_weights=weights, reference=zeros)
        algo = AlgoConfig(kl_coef=0.1, kl_estimator=estimator)
        losses, _ = token_losses(LOSSES[kind], algo, current=current, entropies=zeros, inputs=given_inputs)
        [gradient] = torch.autograd.grad(losses.sum(), current)
        assert torch.isfinite(losses).all() and torch.isfinite(gradient).all()


tokens = st.integers(1, 24)
algos = st.builds(
    AlgoConfig, policy_loss=st.sampled_from(sorted(LOSSES)), clip_low=st.sampled_from([0.0003, 0.2]), clip_high=st.just(0.28)
)


@given(algos, tokens, st.integers(0, 1000))
def test_on_policy_the_gradient_of_every_objective_is_the_policy_gradient(algo: AlgoConfig, count: int, seed: int) -> None:
    make = torch.Generator().manual_seed(seed)
    current = torch.randn(count, generator=make, dtype=torch.float64).requires_grad_()
    fixed = current.detach().clone()
    index = torch.randint(0, 3, (count,), generator=make).sort().values
    per_sequence = torch.randn(3, generator=make, dtype=torch.float64)
    advantages = per_sequence[index]  # one advantage a sequence, as everywhere here
    sequences = Sequences(index=index, count=3)
    weights, _ = behaviour_weights(fixed, fixed, sequences, corrected())
    on_policy = inputs(fixed, advantages, sequences, behaviour_weights=weights)
    losses, figures = token_losses(
        LOSSES[algo.policy_loss], algo, current=current, entropies=torch.zeros(count), inputs=on_policy
    )
    losses.sum().backward()
    torch.testing.assert_close(current.grad, -advantages)
    assert not figures["clip/fraction"].any()


@settings(deadline=None)
@given(st.sampled_from(sorted(LOSSES)), st.sampled_from(["token", "sequence", "geometric"]), st.integers(0, 10_000))
def test_loss_and_gradient_do_not_depend_on_how_sequences_are_packed(kind: str, level: str, seed: int) -> None:
    """The same sequences in another order, and cut into two microbatches instead of one."""
    make = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (6,), generator=make).tolist()
    columns = torch.randn(4, sum(lengths), generator=make, dtype=torch.float64) * 0.3
    advantages = torch.randn(6, generator=make, dtype=torch.float64)
    rows = torch.arange(sum(lengths)).split(lengths)
    algo = AlgoConfig(kl_coef=0.1, entropy_coef=0.01, behaviour_level=level, behaviour_cap=1.1)

    def run(packing: list[list[int]]) -> tuple[Tensor, Tensor]:
        current = columns[0].clone().requires_grad_()
        total = torch.zeros((), dtype=torch.float64)
        for members in packing:
            chosen = torch.cat([rows[i] for i in members])
            index = torch.cat([torch.full((lengths[i],), n) for n, i in enumerate(members)])
            sequences = Sequences(index=index, count=len(members))
            old, behaviour, reference = columns[1:, chosen]
            weights, _ = behaviour_weights(old, behaviour, sequences, algo)
            packed = inputs(
                old, advantages[torch.tensor(members)][index], sequences, behaviour_weights=weights, reference=reference
            )
            losses, _ = token_losses(LOSSES[kind], algo, current=current[chosen], entropies=-current[chosen], inputs=packed)
            total = total + losses.sum()
        total.backward()
        return total.detach(), current.grad

    loss, gradient = run([[0, 1, 2, 3, 4, 5]])
    for packing in ([[5, 3, 1], [0, 2, 4]], [[2], [4, 0], [5, 1, 3]]):
        other, other_gradient = run(packing)
        torch.testing.assert_close(other, loss)
        torch.testing.assert_close(other_gradient, gradient)


@given(st.lists(st.floats(0.2, 5.0), min_size=1, max_size=12), st.lists(st.floats(0.2, 5.0), min_size=1, max_size=12))
def test_the_ratio_of_gspo_is_the_geometric_mean(first: list[float], second: list[float]) -> None:
    index = torch.tensor([0] * len(first) + [1] * len(second))
    advantages = torch.ones(len(index), dtype=torch.float64)
    given_inputs = inputs(torch.zeros(len(index)), advantages, Sequences(index=index, count=2))
    losses, _ = gspo(logs(*first, *second), given_inputs, AlgoConfig(clip_low=1.0, clip_high=100.0))
    means = [math.prod(first) ** (1 / len(first)), math.prod(second) ** (1 / len(second))]
    assert (-losses).tolist() == pytest.approx([means[i] for i in index])


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=12), st.sampled_from([-1.0, 1.0]))
def test_cispo_leaves_no_token_without_gradient_where_ppo_does(differences: list[float], advantage: float) -> None:
    count = len(differences)
    current = torch.tensor(differences, dtype=torch.float64, requires_grad=True)
    given_inputs = inputs(torch.zeros(count), torch.full((count,), advantage), one(count))
    losses, _ = cispo(current, given_inputs, AlgoConfig(clip_low=0.2, clip_high=0.2))
    [gradient] = torch.autograd.grad(losses.sum(), current)
    torch.testing.assert_close(gradient, -advantage * current.detach().exp().clamp(0.8, 1.2))


def test_entropy_and_kl_join_the_loss_with_their_coefficients() -> None:
    current, entropies = torch.tensor([-1.0, -2.0], requires_grad=True), torch.tensor([0.5, 0.25], requires_grad=True)
    old, reference = current.detach().clone(), torch.tensor([-1.5, -2.0])
    weights = torch.tensor([2.0, 1.0])
    algo = AlgoConfig(kl_coef=0.1, kl_estimator="k2", entropy_coef=0.2)
    weighted = inputs(old, torch.tensor([1.0, -1.0]), one(2), behaviour_weights=weights, reference=reference)
    losses, figures = token_losses(LOSSES["ppo"], algo, current=current, entropies=entropies, inputs=weighted)
    assert losses.tolist() == pytest.approx([-2.0 + 0.1 * 0.125 - 0.2 * 0.5, 1.0 - 0.2 * 0.25])
    losses.sum().backward()
    assert entropies.grad.tolist() == pytest.approx([-0.2, -0.2])
    assert current.grad.tolist() == pytest.approx([-2.0 + 0.1 * 0.5, 1.0])
    assert figures["kl/reference"].tolist() == pytest.approx([0.125, 0.0])


def on_context_ranks(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Every rank holds some tokens of each of two sequences: losses, weights and gradients must be those of the whole."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    columns, index = context_inputs()
    mine = torch.arange(len(index)) % world == rank
    sequences = Sequences(index=index[mine], count=2, group=dist.group.WORLD)
    current = columns[0, mine].clone().requires_grad_()
    weights, _ = behaviour_weights(columns[1, mine], columns[2, mine], sequences, corrected(level="sequence", cap=10.0))
    given_inputs = inputs(columns[1, mine], columns[3, mine], sequences)
    losses = weights * LOSSES[kind](current, given_inputs, AlgoConfig())[0]
    losses.sum().backward()
    dist.destroy_process_group()
    return losses.detach(), weights, current.grad


def context_inputs() -> tuple[Tensor, Tensor]:
    columns = 0.2 * torch.randn(4, 11, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return columns, torch.tensor([0] * 7 + [1] * 4)


@pytest.mark.parametrize("kind", sorted(LOSSES))
def test_sequences_that_are_cut_over_context_parallel_ranks_are_reduced_as_one(kind: str) -> None:
    from tests.trainer import ranks

    columns, index = context_inputs()
    current = columns[0].clone().requires_grad_()
    sequences = Sequences(index=index, count=2)
    weights, _ = behaviour_weights(columns[1], columns[2], sequences, corrected(level="sequence", cap=10.0))
    losses = weights * LOSSES[kind](current, inputs(columns[1], columns[3], sequences), AlgoConfig())[0]
    losses.sum().backward()
    for rank, got in enumerate(ranks.run(on_context_ranks, 2, kind)):
        for ours, whole in zip(got, (losses.detach(), weights, current.grad), strict=True):
            torch.testing.assert_close(ours, whole[torch.arange(len(index)) % 2 == rank])


@settings(max_examples=50)
@given(
    st.lists(st.floats(-8, 0), min_size=1, max_size=6), st.lists(st.floats(-8, 0), min_size=6, max_size=6), st.floats(0.01, 3),
    st.floats(-3, 3),
)  # fmt: skip
def test_teacher_pulls_each_token_by_its_own_log_ratio(
    student: list[float], teacher: list[float], weight: float, baseline: float
) -> None:
    """At the policy that sampled, the gradient of the loss per token is
    weight x (log p_student - log p_teacher - baseline) - advantage."""
    current = torch.tensor(student, dtype=torch.float64, requires_grad=True)
    ours, theirs = current.detach(), torch.tensor(teacher[: len(student)], dtype=torch.float64)
    rewarded = torch.linspace(-1, 1, len(student), dtype=torch.float64)
    for loss in LOSSES.values():
        if loss is gspo:  # one ratio per sequence, so it spreads the sum over the sequence
            continue
        advantages = taught(rewarded, ours, theirs, weight, baseline)
        losses, _ = token_losses(
            loss,
            AlgoConfig(),
            current=current,
            entropies=torch.zeros_like(ours),
            inputs=inputs(ours, advantages, one(len(student))),
        )
        [gradient] = torch.autograd.grad(losses.sum(), current)
        torch.testing.assert_close(gradient, weight * (ours - theirs - baseline) - rewarded)


@pytest.mark.parametrize("baseline", [0.0, 2.5])
def test_mean_pull_of_a_teacher_is_the_gradient_of_the_kl_divergence_whatever_the_baseline(baseline: float) -> None:
    """Over all tokens of a small vocabulary, weighted by their probability: exactly the gradient of KL(policy || teacher)."""
    logits = torch.randn(7, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    teacher = torch.randn(7, generator=torch.Generator().manual_seed(1), dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    [wanted] = torch.autograd.grad((policy.exp() * (policy - teacher)).sum(), logits, retain_graph=True)
    advantages = taught(torch.zeros_like(teacher), policy.detach(), teacher, 1.0, baseline)
    losses, _ = LOSSES["ppo"](policy, inputs(policy.detach(), advantages, one(7)), AlgoConfig())
    [got] = torch.autograd.grad((policy.detach().exp() * losses).sum(), logits)
    torch.testing.assert_close(got, wanted)


def test_mean_log_ratio_as_baseline_takes_most_of_the_variance_of_a_distant_teacher() -> None:
    """The gradient by one sampled token, over all tokens of a vocabulary: its variance falls to a tenth."""
    logits = 0.1 * torch.randn(64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    policy, chances = logits.log_softmax(0), logits.softmax(0)
    teacher = torch.cat([torch.full((60,), -9.0), torch.full((4,), -6.0)]).double()  # it would say something else
    scores = torch.eye(64, dtype=torch.float64) - chances  # the gradient of each token's log-prob by the logits

    def variance(baseline: float) -> float:
        gradients = -taught(torch.zeros_like(policy), policy, teacher, 1.0, baseline)[:, None] * scores
        mean = (chances[:, None] * gradients).sum(0)
        return float((chances[:, None] * (gradients - mean).square()).sum())

    assert variance(float((chances * (policy - teacher)).sum())) < 0.1 * variance(0.0)
