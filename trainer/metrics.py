"""Means over a step's tokens, and the files that the figures of a run go to: `metrics.jsonl`, TensorBoard, W&B when asked."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.parallel import Mesh

TOKEN_FIGURES = (
    "behaviour/weight_mean",
    "clip/fraction",
    "entropy/mean",
    "kl/reference",
    "loss/policy",
    "loss/total",
    "mismatch/abs_logprob",
    "mismatch/same_version_abs_logprob",
)
"""Every figure that is a mean over sampled tokens: fixed, since all ranks must reduce the same vector."""


class TokenMeans:
    """Sums and counts on the ranks that see log-probs; `reduce` makes them means, the same on every rank."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._sums = torch.zeros(len(TOKEN_FIGURES), 2, dtype=torch.float64)

    def add(self, name: str, values: Tensor) -> None:
        """values [m]: one a token."""
        if self._mesh.tp_rank == 0:  # the tensor-parallel ranks see the same tokens
            row = TOKEN_FIGURES.index(name)
            self._sums[row, 0] += values.double().sum().item()
            self._sums[row, 1] += values.numel()

    def reduce(self) -> dict[str, float]:
        """Figures that had no token are left out. Collective over all ranks."""
        sums = self._sums.to(self._mesh.device)
        dist.all_reduce(sums)
        return {name: total / count for name, (total, count) in zip(TOKEN_FIGURES, sums.tolist(), strict=True) if count}


class MetricsWriter:
    """One JSON object a step in `metrics.jsonl`; the same numbers in TensorBoard and, with a project's name, in W&B."""

    def __init__(self, run_dir: Path, *, wandb_project: str, run_name: str, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._file = (run_dir / "metrics.jsonl").open("a", buffering=1)
        self._tensorboard = SummaryWriter(str(run_dir / "tensorboard"))
        self._wandb = None
        if wandb_project:
            import wandb  # optional: only who names a project needs it

            self._wandb = wandb.init(project=wandb_project, name=run_name, config=dict(config), dir=str(run_dir))

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        line = {"step": step, "time": round(time.time(), 3)} | {k: round(float(v), 8) for k, v in sorted(figures.items())}
        self._file.write(json.dumps(line) + "\n")
        for name, value in figures.items():
            self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(dict(figures), step=step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()
        self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=0 if error is None else 1)
