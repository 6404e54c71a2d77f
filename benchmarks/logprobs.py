"""Memory and time of log-probs, forward and backward: ours against the plain way, in one run.

    python -m benchmarks.logprobs [--tokens 2048] [--sampled 0.7] [--hidden 512] [--vocab 32768] [--dtype float32] [--rounds 3]

plain: the output layer over all tokens, float32 `log_softmax` and entropy over the sampled rows, autograd. ours: `token_logprobs`
over the sampled rows. Each runs in a process of its own; memory is the rise of its peak resident size above inputs and weights,
time is CPU seconds. Both are also checked against each other.
"""

import argparse
import multiprocessing
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from trainer.learn.logprobs import token_logprobs

MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    tokens: int
    sampled: float  # share of the tokens whose successor was sampled
    hidden: int
    vocab: int
    dtype: str
    rounds: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    peak_mib: float
    cpu_s: float
    logprobs: list[float]
    grad_norm: float


def plain(hidden: Tensor, weight: Tensor, rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    log_softmax = (hidden @ weight.t())[rows].float().log_softmax(-1)
    return log_softmax.gather(-1, targets[:, None])[:, 0], -(log_softmax.exp() * log_softmax).sum(-1)


def ours(hidden: Tensor, weight: Tensor, rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return token_logprobs(hidden[rows], weight, targets, temperature=1.0, vocab_size=len(weight))


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] = {"plain": plain, "ours": ours}


def measure(case: Case, way: str, answer: Connection) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dtype = getattr(torch, case.dtype)
    hidden = torch.randn(case.tokens, case.hidden).to(dtype).requires_grad_()
    weight = (torch.randn(case.vocab, case.hidden) / case.hidden**0.5).to(dtype).requires_grad_()
    rows = torch.randperm(case.tokens)[: int(case.tokens * case.sampled)].sort().values
    targets = torch.randint(0, case.vocab, (len(rows),))
    # Gradients stay in memory either way, and the allocator is warm.
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)
    before, start = _peak_mib(), time.process_time()
    for _ in range(case.rounds):
        hidden.grad.zero_()
        weight.grad.zero_()
        logprobs, entropies = WAYS[way](hidden, weight, rows, targets)
        (logprobs.mean() - 0.01 * entropies.mean()).backward()
    answer.send(
        Outcome(
            peak_mib=_peak_mib() - before,
            cpu_s=(time.process_time() - start) / case.rounds,
            logprobs=logprobs[:64].tolist(),
            grad_norm=float(weight.grad.float().norm()),
        )
    )


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run(case: Case, way: str) -> Outcome:
    """In a fresh process, whose peak memory is its own."""
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=measure, args=(case, way, send))
    process.start()
    send.close()
    try:
        outcome: Outcome = receive.recv()
    finally:
        process.join()
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.logprobs", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--sampled", type=float, default=0.7)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    case = Case(**vars(parser.parse_args()))
    found = {way: run(case, way) for way in WAYS}
    full_mib = case.tokens * case.vocab * 4 / MIB
    print(f"{case.tokens} tokens, {case.sampled:.0%} sampled, hidden {case.hidden}, vocabulary {case.vocab}, {case.dtype}; "
          f"float32 logits of all tokens would be {full_mib:,.0f} MiB")  # fmt: skip
    print(f"{'':8}{'peak MiB':>10}{'CPU s':>8}")
    for way, outcome in found.items():
        print(f"{way:8}{outcome.peak_mib:10,.0f}{outcome.cpu_s:8.2f}")
    first, second = found["plain"], found["ours"]
    print(f"{'ratio':8}{second.peak_mib / first.peak_mib:10.2f}{second.cpu_s / first.cpu_s:8.2f}")
    apart = max(abs(a - b) for a, b in zip(first.logprobs, second.logprobs, strict=True))
    print(f"largest difference: log-prob {apart:.1e}, gradient norm {abs(first.grad_norm / second.grad_norm - 1):.1e} (relative)")


if __name__ == "__main__":
    main()
