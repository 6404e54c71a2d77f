"""The Megatron model computes what transformers computes, and trains alike, in every layout."""

from functools import partial

import pytest
import torch

from conf.shapes import Layout
from tests.trainer import jobs, ranks

FAST_FAMILIES = [("qwen2", Layout()), ("qwen2", Layout(tp=2)), ("qwen2", Layout(pp=2))] + [
    (family, Layout(tp=2, pp=2)) for family in ("qwen2", "qwen2-tied", "qwen3", "llama", "mistral")
]
SLOW_FAMILIES = [
    (family, layout)
    for family in jobs.FAMILIES
    for layout in (Layout(), Layout(tp=2), Layout(pp=2), Layout(tp=2, pp=2), Layout(tp=4),
                   Layout(tp=2, pp=2, sequence_parallel=True), Layout(pp=2, vpp=2),
                   Layout(cp=2), Layout(tp=2, cp=2, sequence_parallel=True))
    if (family, layout) not in FAST_FAMILIES and (family, layout.cp) != ("mistral", 2)  # its window refuses cp
]  # fmt: skip
TRAINING = [Layout(tp=2, sequence_parallel=True), Layout(pp=2, vpp=2)]
SLOW_TRAINING = [Layout(tp=2), Layout(pp=2), Layout(tp=2, pp=2, sequence_parallel=True), Layout(tp=4), Layout(pp=4)]


def name(value) -> str | None:
    if isinstance(value, Layout):
        return (
            f"tp{value.tp}pp{value.pp}"
            + f"cp{value.cp}" * (value.cp > 1)
            + f"vpp{value.vpp}" * (value.vpp > 1)
            + "sp" * value.sequence_parallel
        )
    return None


def slow(cases):
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


@pytest.mark.parametrize(("family", "layout"), FAST_FAMILIES + slow(SLOW_FAMILIES), ids=name)
def test_logits_equal_transformers_and_weights_come_back_unchanged(tmp_path, family, layout):
    made = jobs.make_model(tmp_path, family)
    results = ranks.run(jobs.forward_and_export, layout.ranks_per_replica, str(tmp_path), layout)
    found = [result.logits for result in results if result.logits is not None]
    for number in range(0, len(found), layout.cp * layout.tp):  # each tensor-parallel rank of the last stage has all columns
        parts = found[number : number + layout.cp * layout.tp : layout.tp]
        torch.testing.assert_close(sum(parts), jobs.expected_logits(made), atol=1e-5, rtol=0)
    expected = made.state_dict()
    if made.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    weights = jobs.merged(results)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[key], values) for key, values in expected.items())


@pytest.mark.slow
def test_fewer_key_value_heads_than_tensor_parallel_ranks(tmp_path):
    made = jobs.make_model(tmp_path, "qwen2", num_key_value_heads=2)
    results = ranks.run(jobs.forward_and_export, 4, str(tmp_path), Layout(tp=4))
    torch.testing.assert_close(results[0].logits, jobs.expected_logits(made), atol=1e-5, rtol=0)


def assert_trains_alike(one, other):
    """Loss and gradient norm see the gradients themselves; AdamW's first steps would hide their scale."""
    torch.testing.assert_close(other.losses, one.losses, rtol=1e-6, atol=0)
    torch.testing.assert_close(other.norms, one.norms, rtol=2e-5, atol=0)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One process, two steps, for each family: the folder and the outcome."""
    made = {}

    def of(family):
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            jobs.make_model(folder, family)
            made[family] = (str(folder), ranks.run(partial(jobs.train, steps=range(2)), 1, str(folder), Layout())[0])
        return made[family]

    return of


@pytest.mark.parametrize(
    ("family", "layout"),
    [("qwen3", layout) for layout in TRAINING]
    + slow([(family, layout) for family in ("qwen2-tied", "qwen3") for layout in SLOW_TRAINING]),
    ids=name,
)
def test_training_does_not_depend_on_the_layout(alone, family, layout):
    folder, expected = alone(family)
    results = ranks.run(partial(jobs.train, steps=range(2)), layout.ranks_per_replica, folder, layout)
    assert_trains_alike(expected, results[0])


def test_overlapped_data_parallel_training_exports_the_new_weights(alone):
    folder, expected = alone("qwen3")
    results = ranks.run(partial(jobs.train, steps=range(2), overlap=True), 2, folder, Layout())
    assert_trains_alike(expected, results[0])
    for key, values in jobs.merged(results).items():
        torch.testing.assert_close(values, expected.weights[key], atol=1e-5, rtol=0)


def test_transformers_gives_the_gradient_norm(alone, tmp_path):
    """Ties the gradients to a computation without Megatron."""
    made = jobs.make_model(tmp_path, "qwen3")
    total = torch.zeros(())
    for number, lengths in enumerate(jobs.PACKINGS):
        tokens = jobs.tokens_of(number)
        inputs, targets = tokens[:, :-1].split(lengths, dim=1), tokens[:, 1:].split(lengths, dim=1)
        for given, wanted in zip(inputs, targets, strict=True):
            total = total + torch.nn.functional.cross_entropy(made(given).logits[0], wanted[0], reduction="sum")
    mean = total / (jobs.TOKENS * len(jobs.PACKINGS))
    mean.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in made.parameters()]).norm()
    _, trained = alone("qwen3")
    assert trained.losses[0] == pytest.approx(total.item(), rel=1e-6)
    assert trained.norms[0] == pytest.approx(norm.item(), rel=1e-5)


def test_the_first_step_of_a_warm_up_already_learns(alone):
    _, trained = alone("qwen3")
    assert trained.rates == [pytest.approx(0.005), pytest.approx(0.01)]


@pytest.mark.slow
def test_bf16_stays_near_fp32(alone):
    folder, expected = alone("qwen3")
    results = ranks.run(partial(jobs.train, steps=range(2), dtype="bfloat16"), 1, folder, Layout())
    torch.testing.assert_close(results[0].losses, expected.losses, rtol=1e-3, atol=0)
    torch.testing.assert_close(results[0].norms, expected.norms, rtol=1e-2, atol=0)


@pytest.mark.parametrize("layout", [Layout(), pytest.param(Layout(tp=2, pp=2), marks=pytest.mark.slow)], ids=name)
def test_bf16_moves_logprobs_no_more_than_it_does_in_transformers(tmp_path, layout):
    made = jobs.make_model(tmp_path, "qwen3")
    targets = jobs.tokens_of(0)[0, 1:, None]

    def logprobs(logits):
        return torch.log_softmax(logits.float(), -1).gather(1, targets)[:, 0]

    def ours(dtype):
        results = ranks.run(partial(jobs.forward_and_export, dtype=dtype), layout.ranks_per_replica, str(tmp_path), layout)
        return logprobs(next(result.logits for result in reversed(results) if result.logits is not None))

    exact = logprobs(jobs.expected_logits(made))
    theirs = (logprobs(jobs.expected_logits(made.to(torch.bfloat16))) - exact).abs()
    difference = (ours("bfloat16") - ours("float32")).abs()
    print(f"mean {difference.mean():.2e} largest {difference.max():.2e}; transformers {theirs.mean():.2e} {theirs.max():.2e}")
    assert theirs.mean() > 1e-4
    assert difference.mean() < 1.25 * theirs.mean()
    assert difference.max() < 1.5 * theirs.max()
