"""Means over a step's tokens, and the files that the figures of a run go to: `metrics.jsonl`, TensorBoard, W&B when asked."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from conf.schema import RunConfig
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

    def __init__(self, run_dir: Path, config: RunConfig, *, version: int) -> None:
        """version: where the run goes on; what an interrupted run wrote beyond it will be written again, so it goes."""
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and only rank 0 writes

        path = run_dir / "metrics.jsonl"
        kept = [line for line in _lines(path) if json.loads(line)["step"] <= version] if version else []
        # Replaced, not rewritten: whoever follows the file sees the old one whole or the new one.
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text("".join(kept))
        unfinished.replace(path)
        self._file = path.open("a", buffering=1)
        self._tensorboard = SummaryWriter(str(run_dir / "tensorboard"), purge_step=version + 1 if version else None)
        self._wandb = None
        if config.trainer.wandb_project:
            import wandb  # optional: only who names a project needs it

            self._wandb = wandb.init(
                project=config.trainer.wandb_project, name=config.name, config=asdict(config), dir=str(run_dir)
            )

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        line = {"step": step, "time": round(time.time(), 3)} | {k: round(float(v), 8) for k, v in sorted(figures.items())}
        self._file.write(json.dumps(line) + "\n")
        for name, value in figures.items():
            self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(dict(figures), step=step)

    def close(self) -> None:
        self._file.close()
        self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


def _lines(path: Path) -> list[str]:
    """Whole lines: a killed run may have left half of one at the end."""
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")] if path.exists() else []
