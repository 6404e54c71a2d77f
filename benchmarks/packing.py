"""How evenly a step's sequences are dealt over data-parallel ranks: ours beside verl's sequence balancing.

    .venv/bin/python benchmarks/packing.py [--seeds 5] [--dp 12 16 17 24] [--tokens 20480]

One run, the same lengths for both: the job's 4,096 sequences (prompts of 1,200 tokens on average, lognormal completions of 2,500
that end at 16,384), four minibatches of 1,024 dealt at random. verl is fetched with pip into a temporary folder; its module
`seqlen_balancing` runs unchanged, with its imports of ray and tensordict stubbed, and is used as its trainer uses it: a
minibatch is partitioned over the ranks by workload with as many sequences on each (where that divides), each rank's part into
microbatches, one more on all ranks until none holds more tokens than allowed.

waste: padding in what goes through the model. imbalance: how much longer the busiest rank of a minibatch computes than the mean
rank, by the cost model of `trainer/learn/balance.py` for Qwen2.5-32B; the mean and the worst of all minibatches. fixed: what ours
would waste if every microbatch were padded to the allowed tokens. CPU: of one step, the best of the seeds.
"""

import argparse
import importlib.util
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from launch.plan.inputs import Lengths
from trainer.learn.balance import Capacity, CostModel, balance
from trainer.learn.packing import deal

VERL = "verl==0.9.1"
SEQUENCES, MINIBATCHES = 4096, 4
COST = CostModel(pair_cost=64 * 5120 / 31_984_189_440)  # Qwen2.5-32B: layers x q_width / weights of the matrix products

Dealt = list[list[list[int]]]  # [dp][microbatch] numbers of sequences


@dataclass
class Measured:
    """Of all minibatches of all seeds."""

    microbatches: list[int]
    waste: list[float]
    fixed: list[float]
    imbalance: list[float]
    fullest: int
    cpu_s: list[float]


def lengths_of(seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    completions = Lengths(mean_tokens=2500, cap_tokens=16384, sigma=1.0)
    sampled = np.minimum(np.exp(random.normal(completions.mu, completions.sigma, SEQUENCES)), completions.cap_tokens)
    prompts = np.clip(random.gamma(8, 150, SEQUENCES), 20, 4096)
    return np.ceil(sampled).astype(np.int64) + prompts.astype(np.int64)


def ours(lengths: np.ndarray, dp: int, tokens: int) -> Dealt:
    dealt = balance(lengths, capacity=Capacity(tokens=tokens), dp=dp, cost=COST)
    return [[list(members) for members in rank] for rank in dealt.members]


def verls() -> Callable[[np.ndarray, int, int], Dealt]:
    import torch

    module = fetched()

    def partition(lengths: np.ndarray, dp: int, tokens: int) -> Dealt:
        workloads = module.calculate_workload(torch.from_numpy(lengths)).tolist()
        equal = len(lengths) % dp == 0
        parts = module.get_seqlen_balanced_partitions(workloads, k_partitions=dp, equal_size=equal)
        count = max(-(-int(lengths[part].sum()) // tokens) for part in parts)
        while True:
            made = [
                module.get_seqlen_balanced_partitions([workloads[i] for i in part], k_partitions=count, equal_size=False)
                for part in parts
            ]
            dealt = [[[part[i] for i in members] for members in bins] for part, bins in zip(parts, made, strict=True)]
            if all(lengths[members].sum() <= tokens for rank in dealt for members in rank):
                return dealt
            count += 1

    return partition


def fetched() -> types.ModuleType:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile", "--target", folder, VERL]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        for name, attributes in (
            ("verl", {}),
            ("verl.protocol", {"DataProto": object}),
            ("verl.utils", {"tensordict_utils": None}),
            ("verl.utils.device", {"get_device_name": lambda: "cpu"}),
        ):
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__dict__.update(attributes)
        path = Path(folder) / "verl" / "utils" / "seqlen_balancing.py"
        spec = importlib.util.spec_from_file_location("seqlen_balancing", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


def measure(partition: Callable[[np.ndarray, int, int], Dealt], seeds: int, dp: int, tokens: int) -> Measured:
    measured = Measured(microbatches=[], waste=[], fixed=[], imbalance=[], fullest=0, cpu_s=[])
    for seed in range(seeds):
        lengths = lengths_of(seed)
        parts = [lengths[part] for part in deal(SEQUENCES, MINIBATCHES, seed)]
        start = time.process_time()
        dealt = [partition(part, dp, tokens) for part in parts]
        measured.cpu_s.append(time.process_time() - start)
        for part, ranks in zip(parts, dealt, strict=True):
            assert sorted(i for rank in ranks for members in rank for i in members) == list(range(len(part)))
            held = np.array([[part[members].sum() for members in rank] for rank in ranks])
            costs = np.array([sum(COST(part[members]).sum() for members in rank) for rank in ranks])
            measured.microbatches.append(held.shape[1])
            measured.waste.append(float((held == 0).sum() / held.sum()))  # an empty microbatch is a token of padding
            measured.fixed.append(1 - held.sum() / (held.size * tokens))
            measured.imbalance.append(costs.max() / costs.mean() - 1)
            measured.fullest = max(measured.fullest, int(held.max()))
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--dp", type=int, nargs="+", default=[12, 16, 17, 24])
    parser.add_argument("--tokens", type=int, default=20480)
    options = parser.parse_args()
    systems = {"ours": ours, "verl": verls()}
    print(f"{'DP':>4} {'':6} {'waste':>7} {'imbalance':>20} {'microbatches':>13} {'fullest':>8} {'fixed':>7} {'CPU ms':>8}")
    for dp in options.dp:
        for name, partition in systems.items():
            m = measure(partition, options.seeds, dp, options.tokens)
            imbalance = f"{np.mean(m.imbalance):.3%}, {max(m.imbalance):.3%}"
            count = f"{np.mean(m.microbatches):.2f}"
            fixed = f"{np.mean(m.fixed):.1%}" if name == "ours" else ""
            print(
                f"{dp:>4} {name:6} {np.mean(m.waste):>7.3%} {imbalance:>20} {count:>13} {m.fullest:>8,} {fixed:>7} "
                f"{min(m.cpu_s) * 1e3:>8.0f}"
            )


if __name__ == "__main__":
    main()
