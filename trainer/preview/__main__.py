"""Prints what each rank of a job would hold, without starting the job.

    python -m trainer.preview experiment=kestrel_256 [overrides]     one line per pipeline stage
    python -m trainer.preview experiment=kestrel_256 rank=135        only this rank

The model's shape comes from `model.path` if the folder exists, otherwise from `model.shape`. Exit codes: 0 for success, 2 for a
wrong request.
"""

import sys
from collections.abc import Sequence

import torch

from conf.compose.load import composed, to_run_config
from conf.schema import ConfigError, RunConfig
from conf.shapes import Layout, ModelShape, layout_of, shape_of
from trainer.megatron.families import parameter_count
from trainer.preview.share import Share, first_ranks, pushed, share_of

WRONG_REQUEST = 2
RANK = "rank="


def run(arguments: Sequence[str]) -> str:
    """The text to print. Raises ConfigError and Hydra's errors."""
    chosen = [argument.removeprefix(RANK) for argument in arguments if argument.startswith(RANK)]
    config = _configuration([argument for argument in arguments if not argument.startswith(RANK)])
    shape, layout, dp = shape_of(config.model), layout_of(config.trainer), config.trainer.dp
    ranks = [_rank(text, layout.ranks_per_replica * dp) for text in chosen] or first_ranks(layout, dp)
    shares = [share_of(shape, layout, rank=rank, dp=dp, dtype=getattr(torch, config.model.dtype)) for rank in ranks]
    return "\n".join(_lines(config, shape, layout, shares))


def _configuration(overrides: Sequence[str]) -> RunConfig:
    return to_run_config(composed(["name=shape", *overrides]))


def _rank(text: str, world: int) -> int:
    if not text.isdecimal() or int(text) >= world:
        raise ConfigError(f"{RANK}{text}: the trainer has ranks 0 to {world - 1}")
    return int(text)


def _lines(config: RunConfig, shape: ModelShape, layout: Layout, shares: Sequence[Share]) -> list[str]:
    trainer = config.trainer
    pushes = pushed(shape, layout, getattr(torch, config.model.dtype), trainer.push_bucket_bytes)
    sizes = f"TP{layout.tp} PP{layout.pp} CP{layout.cp} VPP{layout.vpp} DP{trainer.dp}"
    rows: list[tuple[str, ...]] = [
        ("rank", "stage", "parameters", "weights GB", "gradients GB", "optimizer GB", "total GB", "pushed GB", "tensors")
    ]
    for share in shares:
        tensors, _, pushed_bytes = pushes[share.stage]
        held = (share.parameter_bytes, share.gradient_bytes, share.optimizer_bytes)
        gigabytes = [f"{size / 1e9:.2f}" for size in (*held, sum(held), pushed_bytes)]
        rows.append((str(share.rank), str(share.stage), f"{share.parameters:,}", *gigabytes, str(tensors)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        f"{shape.architecture}, {parameter_count(shape):,} parameters, {config.model.dtype}, split by {sizes} over "
        f"{layout.ranks_per_replica * trainer.dp} ranks",
        "",
        *("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows),
        "",
        f"Activations are not counted. A push sends each of {sum(n for n, _, _ in pushes)} tensors once, "
        f"in {sum(n for _, n, _ in pushes)} buckets: {sum(size for *_, size in pushes) / 1e9:.2f} GB to each engine.",
    ]


def main() -> int:
    if not sys.argv[1:] or set(sys.argv[1:]) & {"-h", "--help"}:
        print(__doc__)
        return 0 if sys.argv[1:] else WRONG_REQUEST
    try:
        print(run(sys.argv[1:]))
    except ConfigError as error:
        print(f"preview: {error}", file=sys.stderr)
        return WRONG_REQUEST
    return 0


if __name__ == "__main__":
    sys.exit(main())
