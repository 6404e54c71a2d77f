"""Log-probs and entropies of chosen tokens, from the last hidden states: output layer and softmax in one.

The logits of all tokens are never stored. Rows are processed in chunks of at most `CHUNK_BYTES` of float32 logits, forward and
backward, and the backward pass computes each chunk's logits again. The vocabulary may be sharded over the tensor-parallel ranks.
With z the logits and T the temperature that sampled:

    log p(y) = z_y / T - logsumexp(z / T)          H = logsumexp(z / T) - sum_j p_j z_j / T

The matrix product gives logits in the model's dtype, as in the engines; everything after it is float32.
"""

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_BYTES = 64 * 1024 * 1024


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[Tensor, Tensor]:
    """hidden [m, h], weight [V/tp, h], targets i64 [m] -> log-probs and entropies f32 [m], both with gradient.

    vocab_start: the first vocabulary entry of this rank's shard. Entries from `vocab_size` on are padding and are left out.
    group: the ranks that hold the other shards. The gradient of `hidden` is this rank's part; `chosen_rows`
    (trainer/megatron/model.py), which gives `hidden` to all ranks, sums the parts. Float64 inputs are computed in float64.
    """
    return _TokenLogprobs.apply(hidden, weight, targets, temperature, vocab_size, vocab_start, group, chunk_bytes)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, vocab_size, vocab_start, group, chunk_bytes):
        shard = weight[: max(0, min(len(weight), vocab_size - vocab_start))]
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = torch.empty(len(targets), dtype=dtype, device=hidden.device)
        entropies, logsumexps = torch.empty_like(logprobs), torch.empty_like(logprobs)
        chunks = _chunks(len(targets), len(weight), dtype.itemsize, chunk_bytes)
        for rows in chunks:
            logits = hidden[rows] @ shard.t()
            maximum = logits.amax(-1).to(dtype) if len(shard) else torch.full_like(logprobs[rows], -torch.inf)
            _all_reduce(maximum, dist.ReduceOp.MAX, group)
            shifted = (logits - maximum[:, None]).div_(temperature)  # one float32 copy of the chunk, and `exponentials` another
            del logits
            exponentials = shifted.exp()
            local, mine = _local_targets(targets[rows], vocab_start, len(shard))
            chosen = torch.where(mine, _gather(shifted, local), 0.0)
            sums = torch.stack([exponentials.sum(-1), shifted.mul_(exponentials).sum(-1), chosen])
            _all_reduce(sums, dist.ReduceOp.SUM, group)
            logs = sums[0].log()
            logprobs[rows] = sums[2] - logs
            entropies[rows] = logs - sums[1] / sums[0]
            logsumexps[rows] = maximum / temperature + logs
        ctx.save_for_backward(hidden, weight, targets, logsumexps, entropies)
        ctx.temperature, ctx.vocab_start, ctx.real, ctx.chunks = temperature, vocab_start, len(shard), chunks
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropies):
        hidden, weight, targets, logsumexps, entropies = ctx.saved_tensors
        shard = weight[: ctx.real]
        grad_hidden = torch.zeros_like(hidden)
        # Chunks are summed in float32: in bf16 each chunk would add a rounding error.
        grad_weight = torch.zeros_like(weight, dtype=logsumexps.dtype)
        for rows in ctx.chunks:
            logprobs = (hidden[rows] @ shard.t()).to(logsumexps.dtype).div_(ctx.temperature).sub_(logsumexps[rows, None])
            grad = _grad_of_scaled_logits(
                logprobs,
                _local_targets(targets[rows], ctx.vocab_start, ctx.real),
                None if grad_logprobs is None else grad_logprobs[rows],
                None if grad_entropies is None else grad_entropies[rows],
                entropies[rows],
            )
            grad = grad.div_(ctx.temperature).to(weight.dtype)
            grad_hidden[rows] = grad @ shard
            if grad.dtype is grad_weight.dtype:
                grad_weight[: ctx.real].addmm_(grad.t(), hidden[rows])
            else:
                grad_weight[: ctx.real] += grad.t() @ hidden[rows]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None, None


def _grad_of_scaled_logits(
    logprobs: Tensor,
    local_targets: tuple[Tensor, Tensor],
    grad_logprobs: Tensor | None,
    grad_entropies: Tensor | None,
    entropies: Tensor,
) -> Tensor:
    """logprobs [r, V/tp] of all entries, overwritten -> gradient by z / T: g (1[j = y] - p_j) - g_H p_j (log p_j + H)."""
    by_entropy = None
    if grad_entropies is not None:
        by_entropy = (logprobs + entropies[:, None]).mul_(grad_entropies[:, None])
    grad = logprobs.exp_().neg_()
    if by_entropy is None:
        grad = grad.mul_(0.0 if grad_logprobs is None else grad_logprobs[:, None])
    else:
        grad = grad.mul_(by_entropy if grad_logprobs is None else by_entropy.add_(grad_logprobs[:, None]))
    if grad_logprobs is not None and grad.shape[-1]:
        local, mine = local_targets
        grad.scatter_add_(-1, local[:, None], torch.where(mine, grad_logprobs, 0.0)[:, None])
    return grad


def _local_targets(targets: Tensor, vocab_start: int, size: int) -> tuple[Tensor, Tensor]:
    """Each target's column in this rank's shard, and whether it is in this shard (if not, the column is 0)."""
    local = targets - vocab_start
    mine = (local >= 0) & (local < size)
    return torch.where(mine, local, 0), mine


def _gather(values: Tensor, columns: Tensor) -> Tensor:
    """values [r, v], columns [r] -> [r]; zeros if v is 0."""
    return values.gather(-1, columns[:, None])[:, 0] if values.shape[-1] else values.new_zeros(len(values))


def _chunks(rows: int, columns: int, item_bytes: int, chunk_bytes: int) -> list[slice]:
    """Equal on all tensor-parallel ranks, because their shards have equally many columns."""
    size = max(1, chunk_bytes // (item_bytes * columns))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> None:
    if group is not None and group.size() > 1:
        dist.all_reduce(tensor, op=op, group=group)
