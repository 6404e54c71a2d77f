"""What our training step costs beside a bare Megatron loop, and what a rank needs: time to the first step, memory, tokens/s.

    .venv/bin/python benchmarks/step.py [--layouts 1 dp2 pp2 tp2] [--rounds 3] [--hidden 256] [--trajectories 16]

A random Qwen2 model is trained on random trajectories by gloo ranks of one thread each. All do the same work: old log-probs of
the step's microbatches (forward), then a forward, backward and optimizer step per minibatch.

ours         trainer/step.py: packing, balance, log-probs, objective, figures
bare         the same microbatches, ready as tensors, through Megatron's schedule with the same output head, and the sum of the
             log-probs as the loss: what is left when all of ours is taken away
Megatron's   as bare, with Megatron's own head: logits of all tokens, and its vocabulary-parallel cross-entropy

CPU seconds of a rank, the best of the rounds, which take turns; the ratios are ours over theirs. First step: from the start of
the process, imports included. Memory: the peak resident memory of a rank.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parents[1]
LAYOUTS = {"1": {}, "dp2": {"dp": 2}, "pp2": {"pp": 2}, "tp2": {"tp": 2}, "cp2": {"cp": 2}}
VOCABULARY, LAYERS = 4096, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", choices=sorted(LAYOUTS), default=["1", "dp2", "pp2", "tp2"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--trajectories", type=int, default=16)
    parser.add_argument("--rank-of", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        return rank(options)
    heads = ("ranks", "tokens", "ours s", "bare", "Megatron's", "tokens/s", "first step s", "memory MB")
    print(("{:>6}" + "{:>13}" * (len(heads) - 1)).format(*heads))
    for layout in options.layouts:
        print(measured(layout, options), flush=True)


def measured(layout: str, options: argparse.Namespace) -> str:
    ranks = int(np.prod(list(LAYOUTS[layout].values()), dtype=int))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), __file__,
        "--rank-of", layout, "--rounds", str(options.rounds), "--hidden", str(options.hidden),
        "--trajectories", str(options.trajectories),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or len(lines) != ranks:
        raise SystemExit(f"{layout}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    cpu = {name: sum(line[name] for line in lines) / ranks for name in ("ours", "bare", "megatron")}
    slowest = max(line["wall_s"] for line in lines)
    cells = (
        f"{lines[0]['tokens']:,}", f"{cpu['ours']:.2f}", f"{cpu['ours'] / cpu['bare']:.3f}x",
        f"{cpu['ours'] / cpu['megatron']:.3f}x", f"{lines[0]['tokens'] / slowest:,.0f}",
        f"{max(line['first_step_s'] for line in lines):.1f}", f"{max(line['memory_mb'] for line in lines):,.0f}",
    )  # fmt: skip
    return f"{layout:>6}" + "".join(f"{cell:>13}" for cell in cells)


def rank(options: argparse.Namespace) -> None:
    """One rank's measurements, as a line of JSON."""
    import torch

    from conf.shapes import layout_of
    from trainer import process_groups
    from trainer.learn.algorithm import load_algorithm
    from trainer.megatron.policy import load_policy
    from trainer.step import Stopwatch, pack, train_step

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        config = settings(Path(folder), options)
        mesh = process_groups.initialize(layout_of(config.trainer), seed=0, timeout_s=600)
        policy = load_policy(config, mesh)
    made = batch(options.trajectories)
    ours = partial(train_step, policy, load_algorithm(config.algo), made, config, Stopwatch())
    ours()
    first_step_s = time.time() - psutil.Process().create_time()
    minibatches = [
        [tensors(m, mesh) for m in minibatch.microbatches(mesh.dp_rank, cp=mesh.layout.cp, cp_rank=mesh.cp_rank)]
        for minibatch in pack(made, config, policy.shape, mesh.layout, mesh.dp)
    ]
    systems: dict[str, Callable[[], Any]] = {
        "ours": ours,
        "bare": partial(bare_step, policy, minibatches, own_head=True),
        "megatron": partial(bare_step, policy, minibatches, own_head=False),
    }
    cpu: dict[str, list[float]] = {name: [] for name in systems}
    walls = []
    for _ in range(options.rounds):
        for name, step in systems.items():
            torch.distributed.barrier()
            begun, wall = time.process_time(), time.perf_counter()
            step()
            cpu[name].append(time.process_time() - begun)
            if name == "ours":
                walls.append(time.perf_counter() - wall)
    line = {name: min(seconds) for name, seconds in cpu.items()} | {
        "wall_s": min(walls),
        "first_step_s": first_step_s,
        "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "tokens": sum(len(t.tokens) for t in made.trajectories),
    }
    process_groups.shutdown()
    print(json.dumps(line), flush=True)


def settings(folder: Path, options: argparse.Namespace) -> Any:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from conf.schema import RunConfig

    torch.manual_seed(0)
    model = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=options.hidden, intermediate_size=3 * options.hidden, num_hidden_layers=LAYERS,
        num_attention_heads=options.hidden // 32, num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen2ForCausalLM(model).save_pretrained(folder)
    config = RunConfig()
    config.model.path, config.model.dtype = str(folder), "float32"
    config.algo.minibatches = 2
    config.trainer.tokens_per_microbatch = 2048
    for name, size in LAYOUTS[options.rank_of].items():
        setattr(config.trainer, name, size)
    return config


def batch(trajectories: int) -> Any:
    from rollout.ledger.records import Batch, Finish, Group, Trajectory

    random = np.random.default_rng(0)

    def trajectory() -> Trajectory:
        prompt, completion = int(random.integers(40, 160)), int(random.integers(100, 700))
        sampled = np.arange(prompt + completion) >= prompt
        return Trajectory(
            tokens=random.integers(0, VOCABULARY, prompt + completion).astype(np.int32),
            sampled=sampled,
            logprobs=np.where(sampled, -8.0, 0).astype(np.float32),
            versions=np.where(sampled, 0, -1).astype(np.int32),
            reward=float(random.integers(0, 2)),
            finish=Finish.STOP,
            segments=1,
        )

    groups = [Group(prompt_id=str(g), index=g, trajectories=[trajectory() for _ in range(8)]) for g in range(trajectories // 8)]
    return Batch(step=0, groups=groups)


def tensors(microbatch: Any, mesh: Any) -> tuple[Any, ...]:
    """What the bare loop is given: tokens, positions, sequences, rows, targets."""
    import torch

    from trainer.megatron import attention

    lengths = np.diff(microbatch.boundaries).tolist()
    packed = attention.pack(lengths, mesh.device, cp=mesh.layout.cp, cp_rank=mesh.cp_rank)
    arrays = (microbatch.tokens[None], microbatch.positions[None], microbatch.rows, microbatch.targets)
    tokens, positions, rows, targets = (torch.from_numpy(array).to(mesh.device) for array in arrays)
    return tokens, positions, packed, rows, targets


def bare_step(policy: Any, minibatches: list[list[tuple[Any, ...]]], *, own_head: bool) -> None:
    """Old log-probs and one update per minibatch, without any other work."""
    import torch

    with torch.no_grad():
        run(policy, [microbatch for minibatch in minibatches for microbatch in minibatch], own_head, forward_only=True)
    for minibatch in minibatches:
        for chunk in policy.chunks:
            chunk.zero_grad_buffer()
        policy.optimizer.zero_grad()
        run(policy, minibatch, own_head, forward_only=False)
        policy.optimizer.step()


def run(policy: Any, microbatches: list[tuple[Any, ...]], own_head: bool, *, forward_only: bool) -> None:
    import torch
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    from trainer.learn.logprobs import token_logprobs
    from trainer.megatron import model

    mesh = policy.mesh

    def forward_step(left: Iterator[tuple[Any, ...]], chunk: torch.nn.Module) -> tuple[Any, Any]:
        tokens, positions, packed, rows, targets = next(left)
        hidden = model.forward(chunk, tokens, positions, packed)

        def loss(hidden: Any, non_loss_data: bool = False) -> Any:
            weight = model.output_weight(chunk)
            if own_head:
                logprobs, _ = token_logprobs(
                    model.chosen_rows(chunk, hidden, rows), weight, targets, temperature=1.0, vocab_size=policy.shape.vocabulary,
                    vocab_start=mesh.tp_rank * len(weight), group=mesh.tp_group,
                )  # fmt: skip
                summed = -logprobs.sum()
            else:
                logits = model.chosen_rows(chunk, hidden, torch.arange(tokens.size(1))) @ weight.t()
                labels = torch.zeros_like(tokens[0]).index_copy(0, rows, targets)
                summed = vocab_parallel_cross_entropy(logits.float(), labels).index_select(0, rows).sum()
            return summed if non_loss_data else (summed, torch.tensor(len(rows), dtype=torch.int), {})

        return hidden, loss

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(microbatches) for _ in policy.chunks],
        model=policy.chunks,
        num_microbatches=len(microbatches),
        seq_length=microbatches[0][0].size(1),
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


if __name__ == "__main__":
    main()
