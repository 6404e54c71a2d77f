"""Log-probs and entropies equal those of the full logits, in value and gradient, however the rows and the vocabulary are cut."""

import pytest
import torch
from torch import Tensor

from tests.trainer import ranks

ROWS, HIDDEN, VOCAB, PADDED = 23, 16, 37, 40
WHOLE = 1 << 20  # bytes that hold all rows


def inputs(dtype: torch.dtype = torch.float64, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight (its padding not zero, which must not matter), targets, and the gradients that come from above."""
    make = torch.Generator().manual_seed(0)
    hidden = scale * torch.randn(ROWS, HIDDEN, generator=make, dtype=torch.float64)
    weight = torch.randn(PADDED, HIDDEN, generator=make, dtype=torch.float64)
    targets = torch.randint(0, VOCAB, (ROWS,), generator=make)
    above = torch.randn(2, ROWS, generator=make, dtype=torch.float64)
    return hidden.to(dtype), weight.to(dtype), targets, above[0], above[1]


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Full logits, in float64."""
    log_softmax = (hidden.double() @ weight.double()[:VOCAB].t() / temperature).log_softmax(-1)
    return log_softmax.gather(-1, targets[:, None])[:, 0], -(log_softmax.exp() * log_softmax).sum(-1)


def with_gradients(function, hidden: Tensor, weight: Tensor, above: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logprobs, entropies = function(hidden, weight)
    torch.autograd.backward([logprobs, entropies], [a.to(logprobs.dtype) for a in above])
    return logprobs.detach(), entropies.detach(), hidden.grad, weight.grad


def on_ranks(dtype: torch.dtype, temperature: float, chunk_bytes: int, scale: float = 1.0) -> tuple[Tensor, ...]:
    """What this rank finds with its shard of the vocabulary; the parts of hidden's gradient are summed."""
    import torch.distributed as dist

    from trainer.learn.logprobs import token_logprobs

    dist.init_process_group("gloo")
    hidden, weight, targets, *above = inputs(dtype, scale)
    size = PADDED // dist.get_world_size()
    start = dist.get_rank() * size

    def ours(hidden: Tensor, shard: Tensor) -> tuple[Tensor, Tensor]:
        return token_logprobs(
            hidden, shard, targets, temperature=temperature, vocab_size=VOCAB, vocab_start=start, group=dist.group.WORLD,
            chunk_bytes=chunk_bytes,
        )  # fmt: skip

    logprobs, entropies, grad_hidden, grad_shard = with_gradients(ours, hidden, weight[start : start + size], tuple(above))
    grad_hidden = grad_hidden.float() if dtype is torch.bfloat16 else grad_hidden
    dist.all_reduce(grad_hidden)
    dist.destroy_process_group()
    return logprobs, entropies, grad_hidden, grad_shard


def compare(world: int, dtype: torch.dtype, temperature: float, chunk_bytes: int, tolerance: float, scale: float = 1.0) -> None:
    hidden, weight, targets, *above = inputs(dtype, scale)
    results = ranks.run(on_ranks, world, dtype, temperature, chunk_bytes, scale)
    expected = with_gradients(
        lambda h, w: plain(h, w, targets, temperature), hidden.double(), weight.double(), (above[0], above[1])
    )
    gathered = torch.cat([result[3] for result in results])
    assert not gathered[VOCAB:].any(), "the padding of the vocabulary learns"
    for got in results:
        for name, ours, reference in zip(("log-probs", "entropies", "hidden"), got, expected, strict=False):
            error = (ours.double() - reference).abs().max() / reference.abs().max()
            assert error < tolerance, f"{name}: {error:.2e}"
        assert all(torch.equal(a, b) for a, b in zip(got[:2], results[0][:2], strict=True))
    error = (gathered.double() - expected[3]).abs().max() / expected[3].abs().max()
    assert error < tolerance, f"weight: {error:.2e}"


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_equal_the_full_logits_to_float64_rounding(world: int, temperature: float) -> None:
    compare(world, torch.float64, temperature, chunk_bytes=5 * 8 * PADDED // world, tolerance=1e-12)


@pytest.mark.parametrize("chunk_bytes", [1, 7 * 4 * PADDED, WHOLE])
def test_float32_is_right_to_its_rounding_whatever_the_chunks(chunk_bytes: int) -> None:
    compare(2, torch.float32, 1.3, chunk_bytes, tolerance=2e-6)


def test_logits_of_hundreds_neither_overflow_nor_lose_the_gradient() -> None:
    compare(2, torch.float32, 0.5, WHOLE, tolerance=1e-4, scale=60.0)


def test_bfloat16_differs_by_the_rounding_of_its_logits_alone() -> None:
    compare(2, torch.bfloat16, 1.0, 5 * 4 * PADDED, tolerance=1e-2)


def test_gradcheck() -> None:
    from trainer.learn.logprobs import token_logprobs

    hidden, weight, targets, *_ = inputs()
    assert torch.autograd.gradcheck(
        lambda h, w: token_logprobs(h, w, targets[:5], temperature=0.7, vocab_size=VOCAB, chunk_bytes=2 * 8 * PADDED),
        (hidden[:5].requires_grad_(), weight.requires_grad_()),
    )


@pytest.mark.parametrize("kept", [0, 1])
def test_either_output_may_go_without_gradient(kept: int) -> None:
    from trainer.learn.logprobs import token_logprobs

    hidden, weight, targets, *_ = inputs()
    hidden, other = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    token_logprobs(hidden, weight, targets, temperature=1.0, vocab_size=VOCAB)[kept].sum().backward()
    plain(other, weight, targets, 1.0)[kept].sum().backward()
    torch.testing.assert_close(hidden.grad, other.grad)


def test_a_microbatch_of_padding_alone_has_a_gradient_of_zero() -> None:
    from trainer.learn.logprobs import token_logprobs

    _, weight, _, *_ = inputs()
    hidden, weight = torch.zeros(0, HIDDEN, dtype=torch.float64, requires_grad=True), weight.requires_grad_()
    token_logprobs(hidden, weight, torch.zeros(0, dtype=torch.int64), temperature=1.0, vocab_size=VOCAB)[0].sum().backward()
    assert hidden.grad.shape == (0, HIDDEN) and weight.grad.shape == weight.shape and not weight.grad.any()
