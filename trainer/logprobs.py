"""Log-probs of chosen tokens from logits that lie split over the tensor-parallel ranks.

Works through the rows in chunks, in float32, and keeps no float32 copy of the logits: the backward pass makes each chunk's
softmax again. The formula: log p(y) = z_y / T - logsumexp(z / T), at the temperature T that sampled.
"""

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_ROWS = 1024


def token_logprobs(
    logits: Tensor, targets: Tensor, *, temperature: float, vocab_start: int, group: dist.ProcessGroup | None, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """logits [m, V/tp], targets i64 [m] -> log-probs f32 [m] (with gradient) and entropies f32 [m] (without).

    vocab_start: the first vocabulary entry of this rank's shard. Entries from `vocab_size` on are padding and take no part.
    """
    return _TokenLogprobs.apply(logits, targets, temperature, vocab_start, group, vocab_size)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, temperature, vocab_start, group, vocab_size):
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=logits.device)
        entropies = torch.empty_like(logprobs)
        logsumexps = torch.empty_like(logprobs)
        real = max(0, min(logits.shape[-1], vocab_size - vocab_start))
        for rows in _chunks(len(targets)):
            z = logits[rows, :real].float() / temperature
            maximum = z.amax(-1) if real else torch.full_like(logprobs[rows], -torch.inf)
            _all_reduce(maximum, dist.ReduceOp.MAX, group)
            shifted = z - maximum[:, None]
            exponentials = shifted.exp()
            local, mine = _local_targets(targets[rows], vocab_start, real)
            chosen = torch.where(mine, shifted.gather(-1, local[:, None])[:, 0], 0.0) if real else torch.zeros_like(maximum)
            sums = torch.stack([exponentials.sum(-1), (exponentials * shifted).sum(-1), chosen])
            _all_reduce(sums, dist.ReduceOp.SUM, group)
            logs = sums[0].log()
            logprobs[rows] = sums[2] - logs
            entropies[rows] = logs - sums[1] / sums[0]
            logsumexps[rows] = maximum + logs
        ctx.save_for_backward(logits, targets, logsumexps)
        ctx.temperature, ctx.vocab_start, ctx.real = temperature, vocab_start, real
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx, grad_logprobs, _grad_entropies):
        logits, targets, logsumexps = ctx.saved_tensors
        grad = torch.zeros_like(logits)
        for rows in _chunks(len(targets)):
            local, mine = _local_targets(targets[rows], ctx.vocab_start, ctx.real)
            softmax = (logits[rows, : ctx.real].float() / ctx.temperature - logsumexps[rows, None]).exp_()
            softmax.neg_()
            if ctx.real:
                softmax.scatter_add_(-1, local[:, None], mine.float()[:, None])
            grad[rows, : ctx.real] = (softmax * (grad_logprobs[rows, None] / ctx.temperature)).to(grad.dtype)
        return grad, None, None, None, None, None


def _local_targets(targets: Tensor, vocab_start: int, size: int) -> tuple[Tensor, Tensor]:
    local = targets - vocab_start
    mine = (local >= 0) & (local < size)
    return torch.where(mine, local, 0), mine


def _chunks(rows: int) -> list[slice]:
    return [slice(start, min(start + CHUNK_ROWS, rows)) for start in range(0, rows, CHUNK_ROWS)]


def _all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> None:
    if group is not None and group.size() > 1:
        dist.all_reduce(tensor, op=op, group=group)
