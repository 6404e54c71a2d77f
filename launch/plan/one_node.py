"""Splits the GPUs of one node between trainer and engines, from the number of GPUs, their memory and the model's size.

All GPUs are used. The trainer takes the share nearest to half on which it fits. A model is cut over the fewest ranks that hold
it, with as many copies as there are GPUs for. Activations are recomputed where nothing else fits.

Trainer and engine cannot share one GPU: both are ranks of one NCCL communicator at each push, and NCCL takes one rank per GPU.
On a node with one GPU a run uses the CPU, which suits the debug model; a larger model needs a second GPU.

    python -m launch.plan.one_node [override …]

prints the overrides for this node's GPUs, one per line; launch/debug.sh adds them to its command. Of a sweep
(`-m trainer.lr=1e-5,1e-4`) it takes the first value of each setting. It prints nothing with fewer than two GPUs, and for a run
that is resumed: then no override is needed.
"""

import sys
from dataclasses import dataclass

from hydra.core.override_parser.overrides_parser import OverridesParser

from conf.compose.load import composed, to_run_config
from conf.compose.sweep import MULTIRUN
from conf.schema import ConfigError
from conf.shapes import Layout, ModelShape, layout_faults, shape_of
from launch.placement import node_facts
from launch.placement.gpus import visible_gpus
from launch.plan.cost_lines import count, gb
from launch.plan.model_costs import weight_bytes
from launch.plan.training import USABLE, TrainerSetup, training_memory
from rollout.servers import frozen_gpus

ENGINE_WEIGHTS = 0.6  # largest fraction of a GPU for weights; the KV cache takes the rest


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeLayout:
    tp: int
    pp: int
    dp: int
    engines: int
    engine_tp: int
    recompute: bool = False  # all of the trainer's activations
    frozen_gpus: int = 0  # GPUs that the servers of a teacher and a judge model take

    @property
    def trainer_gpus(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def gpus(self) -> int:
        return self.trainer_gpus + self.engines * self.engine_tp + self.frozen_gpus

    @property
    def overrides(self) -> list[str]:
        return [
            "cluster=gpu_node", f"cluster.gpus_per_node={self.gpus}", "model.dtype=bfloat16",
            f"trainer.tp={self.tp}", f"trainer.pp={self.pp}", f"trainer.dp={self.dp}",
            f"rollout.engines={self.engines}", f"rollout.engine_tp={self.engine_tp}",
            *(["trainer.recompute=full"] if self.recompute else []),
        ]  # fmt: skip


def fit(gpus: int, gpu_bytes: float, model: ModelShape, tokens_per_microbatch: int, frozen_gpus: int = 0) -> NodeLayout:
    """Raises ConfigError when the model does not fit, or when fewer than two GPUs are left for it."""
    gpus -= frozen_gpus
    if gpus < 2:
        others = f" beside {frozen_gpus} for a teacher or judge model" if frozen_gpus else ""
        raise ConfigError(f"{gpus} GPU{others}: NCCL takes one rank per GPU, so trainer and engines need two, or cluster=cpu")
    shares = sorted(range(1, gpus), key=lambda share: (abs(share - gpus / 2), share))
    for recompute in (False, True):
        for share in shares:
            trainer = _trainer(share, gpu_bytes, model, tokens_per_microbatch, recompute=recompute)
            engine_tp = _engine_tp(gpus - share, gpu_bytes, model)
            if trainer and engine_tp:
                return NodeLayout(
                    tp=trainer.layout.tp, pp=trainer.layout.pp, dp=trainer.dp, recompute=recompute,
                    engines=(gpus - share) // engine_tp, engine_tp=engine_tp, frozen_gpus=frozen_gpus,
                )  # fmt: skip
    raise ConfigError(
        f"{count(model.parameters)} parameters do not fit on {gpus} GPUs of {gb(gpu_bytes)} with "
        f"trainer.tokens_per_microbatch={tokens_per_microbatch}: take more GPUs or nodes, a smaller model, or shorter completions"
    )


def _trainer(gpus: int, gpu_bytes: float, model: ModelShape, tokens: int, *, recompute: bool) -> TrainerSetup | None:
    """The fewest ranks per copy that fit on exactly this number of GPUs; tensor parallelism is tried before pipelines."""
    for ranks, pp, tp in sorted((t * p, p, t) for t in _divisors(gpus) for p in _divisors(gpus // t)):
        layout = Layout(tp=tp, pp=pp)
        setup = TrainerSetup(layout=layout, dp=gpus // ranks, tokens_per_microbatch=tokens, recompute=recompute)
        if not any(layout_faults(model, layout)) and training_memory(model, setup).bytes <= USABLE * gpu_bytes:
            return setup
    return None


def _engine_tp(gpus: int, gpu_bytes: float, model: ModelShape) -> int | None:
    """The fewest GPUs that hold an engine, among the numbers that divide the fleet's GPUs."""
    room = ENGINE_WEIGHTS * gpu_bytes / weight_bytes(model)
    return next((tp for tp in _divisors(gpus) if tp in model.tensor_parallel_sizes and tp * room >= 1), None)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if not number % d]


ASKED_WRONGLY = 2


def main(words: list[str]) -> int:
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return 0
    found = node_facts.gpus()
    if (visible := visible_gpus()) is not None:
        found = found[: len(visible)]
    if len(found) < 2 or any(word.startswith("resume=") for word in words):
        return 0
    try:
        config = to_run_config(composed(["name=one_node", "experiment=debug", *one_job(words)]))
        gpu_bytes = min(gpu["memory_mb"] for gpu in found) * 1024.0**2
        model, tokens = shape_of(config.model), config.trainer.tokens_per_microbatch
        layout = fit(len(found), gpu_bytes, model, tokens, frozen_gpus(config))
    except ConfigError as error:
        print(f"one_node: {error}", file=sys.stderr)
        return ASKED_WRONGLY
    print("\n".join(layout.overrides))
    return 0


def one_job(words: list[str]) -> list[str]:
    """The overrides of a sweep's first job, without values that a sweeper draws and without Hydra's own settings."""
    if not set(words) & set(MULTIRUN):
        return words
    kept = [word for word in words if word not in MULTIRUN and not word.startswith(("hydra.", "hydra/"))]
    job = []
    for word, parsed in zip(kept, OverridesParser.create().parse_overrides(kept), strict=True):
        if not parsed.is_sweep_override():
            job.append(word)
        elif parsed.is_discrete_sweep():
            job.append(f"{parsed.get_key_element()}={next(parsed.sweep_string_iterator())}")
    return job


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
