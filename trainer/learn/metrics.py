"""What a step's tokens come to, over all ranks, and the files that the figures of a run go to: `metrics.jsonl`, TensorBoard, and
W&B when asked.
"""

import json
import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from conf.schema import RunConfig
from trainer.process_groups import Mesh

log = logging.getLogger("trainer")
TOKEN_FIGURES = (
    "behaviour/weight_mean",
    "clip/dual_fraction",
    "clip/fraction",
    "clip/high_fraction",
    "clip/low_fraction",
    "entropy/mean",
    "kl/reference",
    "loss/policy",
    "loss/total",
    "mismatch/abs_logprob",
    "mismatch/same_version_abs_logprob",
)
"""Every figure that is a mean over sampled tokens, beside the mismatch of each lag: fixed, since all ranks must reduce the same
vector."""


class TokenFigures:
    """What a step's tokens come to: summed on the ranks that see log-probs, `reduce` gives the same on every rank.

    The raw behaviour weights also tell how many tokens they leave (effective sample size) and how large they get.
    """

    BINS, WIDEST_LOG = 4000, 20.0  # of the weights' histogram: from e^-20 to e^20, a bin 1% wide

    def __init__(self, mesh: Mesh, *, max_lag: int) -> None:
        """max_lag: the largest that is told apart, in versions."""
        self._is_counted = mesh.tp_rank == 0  # the tensor-parallel ranks see the same tokens
        self._names = TOKEN_FIGURES + tuple(mismatch_figure(lag) for lag in range(1, max_lag + 1))
        self._sums = torch.zeros(len(self._names), 2, dtype=torch.float64, device=mesh.device)
        self._weights = torch.zeros(3, dtype=torch.float64, device=mesh.device)  # count, sum, sum of squares
        self._histogram = torch.zeros(self.BINS, dtype=torch.float64, device=mesh.device)
        self._largest = torch.zeros((), dtype=torch.float64, device=mesh.device)

    def add(self, name: str, values: Tensor) -> None:
        """values [m]: one a token. The device is not waited for."""
        if self._is_counted:
            row = self._sums[self._names.index(name)]
            row[0] += values.sum(dtype=torch.float64)
            row[1] += values.numel()

    def add_weights(self, weights: Tensor) -> None:
        """weights [m]: the raw behaviour weight of each token, between e^-20 and e^20."""
        if self._is_counted and len(weights):
            exact = weights.double()
            self._weights += torch.stack([torch.ones_like(exact).sum(), exact.sum(), exact.square().sum()])
            places = ((exact.log() / self.WIDEST_LOG + 1) / 2 * self.BINS).long().clamp(0, self.BINS - 1)
            self._histogram.index_add_(0, places, torch.ones_like(exact))
            self._largest = torch.maximum(self._largest, exact.max())

    def reduce(self) -> dict[str, float]:
        """Figures that had no token are left out. Collective over all ranks."""
        for tensor in (self._sums, self._weights, self._histogram):
            dist.all_reduce(tensor)
        dist.all_reduce(self._largest, op=dist.ReduceOp.MAX)
        means = {name: total / count for name, (total, count) in zip(self._names, self._sums.tolist(), strict=True) if count}
        return means | self._weight_figures()

    def _weight_figures(self) -> dict[str, float]:
        """behaviour/ess_fraction = (sum w)^2 / (n sum w^2); behaviour/weight_p99, to 1%; behaviour/weight_max."""
        count, total, squares = self._weights.tolist()
        if not count:
            return {}
        place = int((self._histogram.cumsum(0) < 0.99 * count).sum())
        upper_edge = math.exp(((place + 1) / self.BINS * 2 - 1) * self.WIDEST_LOG)
        largest = self._largest.item()
        return {
            "behaviour/ess_fraction": total**2 / (count * squares),
            "behaviour/weight_p99": min(largest, upper_edge),
            "behaviour/weight_max": largest,
        }


def mismatch_figure(lag: int) -> str:
    """The name of the mean |old - behaviour| of tokens that were sampled `lag` versions ago."""
    return "mismatch/same_version_abs_logprob" if lag == 0 else f"mismatch/lag_{lag}_abs_logprob"


class MetricsWriter:
    """One JSON object a step in `metrics.jsonl`; the same numbers in TensorBoard and, with a project's name, in W&B."""

    def __init__(self, run_dir: Path, config: RunConfig, *, version: int) -> None:
        """version: where the run goes on; what an interrupted run wrote beyond it will be written again, so it goes."""
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and only rank 0 writes

        path = run_dir / "metrics.jsonl"
        kept = [line for line in _lines(path) if _step(line) <= version] if version else []
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
        """Where there is no room for it, it is left out: no figure is worth the training."""
        line = {"step": step, "time": round(time.time(), 3)} | {k: round(float(v), 8) for k, v in sorted(figures.items())}
        with _or_left_out("metrics.jsonl", step):
            self._file.write(json.dumps(line) + "\n")
        with _or_left_out("TensorBoard", step):
            for name, value in figures.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(dict(figures), step=step)

    def close(self) -> None:
        with _or_left_out("metrics.jsonl"):
            self._file.close()
        with _or_left_out("TensorBoard"):
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


@contextmanager
def _or_left_out(what: str, step: int | None = None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        log.warning("%s lacks %s: %s", what, "its end" if step is None else f"step {step}", error)


def _lines(path: Path) -> list[str]:
    """Whole lines: a killed run may have left half of one at the end."""
    if not path.exists():
        return []
    return [line for line in path.read_text(errors="replace").splitlines(keepends=True) if line.endswith("\n")]


def _step(line: str) -> float:
    """The step that a line is of; that of a damaged one (a full disk, a lost block) never comes, so that it is left out."""
    try:
        found = json.loads(line)
    except json.JSONDecodeError:
        return math.inf
    step = found.get("step") if isinstance(found, dict) else None
    return step if isinstance(step, int) else math.inf
