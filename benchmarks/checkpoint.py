"""What checkpoints and the reference cost the training loop.

    .venv/bin/python benchmarks/checkpoint.py [--hidden 128 384] [--ranks 2] [--folder FOLDER]

The models are random Qwen2 models of eight layers in fp32, on data-parallel gloo ranks. Seconds are CPU seconds of rank 0, which
hardly depend on the load of the machine. They are given for four things: the time that `begin_save` blocks the training loop (the
first save also checks the plan), the writing in the background, one exchange of reference and policy weights, and the fingerprint
that is taken at the start.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch.distributed as dist

from conf.schema import RunConfig
from conf.shapes import Layout
from trainer import process_groups
from trainer.megatron import checkpoint
from trainer.megatron.policy import Policy, load_policy
from trainer.megatron.reference import Reference, fingerprint

COLUMNS = ("parameters", "checkpoint", "first stall", "stall", "behind", "reference", "swap", "fingerprint")
SAVES = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[128, 384])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    options = parser.parse_args()
    if "RANK" in os.environ:
        measure(options.hidden, options.folder)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)]
        arguments = ["--folder", folder, "--hidden", *map(str, options.hidden)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        subprocess.run([sys.executable, *torchrun, __file__, *arguments], check=True, env=environment)


def measure(sizes: list[int], folder: Path) -> None:
    mesh = process_groups.initialize(Layout(), seed=0, timeout_s=300)
    if mesh.rank == 0:
        print(" ".join(f"{name:>12}" for name in COLUMNS))
    for hidden in sizes:
        target = folder / str(hidden)
        if mesh.rank == 0:
            write_model(target / "model", hidden)
        dist.barrier()
        config = RunConfig()
        config.model.path, config.model.dtype = str(target / "model"), "float32"
        policy = load_policy(config, mesh)
        row = checkpoints(policy, target / "checkpoints") | reference(policy)
        if mesh.rank == 0:
            print(" ".join(f"{row[name]:>12}" for name in COLUMNS), flush=True)
    process_groups.shutdown()


def write_model(folder: Path, hidden: int) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=8192, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)


def checkpoints(policy: Policy, folder: Path) -> dict[str, str]:
    store = checkpoint.Checkpoints(folder, policy.training_state, keep=1)
    stalls, behind = [], []
    for version in range(SAVES):
        start_s = time.process_time()
        store.begin_save(version, {})
        stalls.append(time.process_time() - start_s)
        store.wait(timeout_s=300)
        behind.append(time.process_time() - start_s - stalls[-1])
    size = sum(file.stat().st_size for file in (folder / f"version-{SAVES - 1}").iterdir())
    return {
        "parameters": f"{sum(p.numel() for p in policy.parameters()) / 1e6:.1f} M",
        "checkpoint": f"{size / 1e6:.0f} MB",
        "first stall": f"{stalls[0]:.2f} s",
        "stall": f"{min(stalls[1:]):.2f} s",
        "behind": f"{min(behind[1:]):.2f} s",
    }


def reference(policy: Policy) -> dict[str, str]:
    kept = Reference(policy.chunks, policy.shape, policy.mesh)
    start_s = time.process_time()
    for _ in range(SAVES):
        with kept.in_place():
            pass
    swap_s = (time.process_time() - start_s) / (2 * SAVES)
    start_s = time.process_time()
    fingerprint(policy.chunks, policy.shape, policy.mesh)
    return {
        "reference": f"{kept.figures()['reference/host_bytes'] / 1e6:.0f} MB",
        "swap": f"{swap_s:.3f} s",
        "fingerprint": f"{time.process_time() - start_s:.3f} s",
    }


if __name__ == "__main__":
    main()
