"""How much load the queue server takes: the job's messages through the real server, and the same load through Redis and Ray.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/ledger.py [flow] [latency] [memory] [journal] [replay] [peers]

flow      one server process with 64 engines, 1,024 judge slots and a trainer as clients, and real messages: how many times the
          job's rate (4,096 trajectories of 1,200 + 2,500 tokens per step of 60 s) one core sustains
latency   how long a lease takes at multiples of the job's rate
memory    memory of the server, by `max_staleness`
journal   what a commit costs, by `synchronous`
replay    how long a start takes after 600 steps of the job (needs 3 GB of disk and some minutes; `--groups 512`)
peers     the reports and leases of that flow, as bytes, through a Redis stream (append-only file, synchronised at every write,
          and every second) and through a Ray queue actor; they decide and check nothing. To have them here:

              apt-get install redis-server
              python3.11 -m venv /tmp/peers && /tmp/peers/bin/pip install ray redis numpy psutil
              .venv/bin/python benchmarks/ledger.py flow peers --peers-python /tmp/peers/bin/python

CPU seconds are those of the server's process, all its threads; wall-clock figures depend on what else the machine does. So a
reference loop is timed too: what a core of this machine was worth in this run.
"""

import argparse
import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.ledger_load import MEAN_TOKENS, Generator, Load
from conf.compose.load import write_run
from conf.schema import AlgoConfig, DataConfig, ModelConfig, RolloutConfig, RunConfig, TrainerConfig
from rollout.ledger.changes import Admitted, Change, Extended, Graded
from rollout.ledger.journal import Journal
from rollout.ledger.ledger import Ledger
from rollout.ledger.records import Finish, Prompt, Segment, Verdict
from rollout.ledger.rules import Rules
from rollout.queue.client import QueueClient, QueueTimeout
from rollout.queue.keys import RunKeys

ROOT = Path(__file__).resolve().parents[1]
GROUPS, COMPLETIONS, STEP_S = 512, 8, 60.0
PROMPT_TOKENS = 1200
VOCABULARY = 512
STALENESS = 2
JOB_STALENESS, JOB_CHECKPOINT_EVERY = 4, 12  # of conf/experiment/kestrel_256.yaml
SHORT_TOKENS = 8


def run_folder(folder: Path, *, groups: int, staleness: int) -> RunConfig:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0").save_pretrained(folder / "model")
    task = {"kind": "stdio", "tests": [{"input": f"{i}\n" * 20, "output": "x\n" * 20} for i in range(20)]}
    rng = np.random.default_rng(0)
    with open(folder / "problems.jsonl", "w") as file:
        for i in range(256):
            text = " ".join(f"t{n}" for n in rng.integers(1, VOCABULARY, PROMPT_TOKENS))
            file.write(json.dumps({"id": f"p{i}", "prompt": text, "raw": True, "task": task}) + "\n")
    config = RunConfig(
        model=ModelConfig(path=str(folder / "model"), dtype="float32"),
        data=DataConfig(train=[str(folder / "problems.jsonl")], max_prompt_tokens=2048),
        algo=AlgoConfig(groups_per_step=groups, completions_per_group=COMPLETIONS, minibatches=1),
        rollout=RolloutConfig(max_staleness=staleness),
        trainer=TrainerConfig(steps=600, tokens_per_microbatch=32768),
    )
    write_run(config, folder / "run")
    RunKeys.create(folder / "run")
    return config


@contextlib.contextmanager
def server(run: Path) -> Iterator[tuple[str, psutil.Process]]:
    """A queue server of this run that answers; its endpoint and its process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, "-m", "rollout.queue", "--run", str(run), "--bind", endpoint]
    with open(run / "queue.out", "ab") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    try:
        with QueueClient(endpoint, RunKeys.load(run), "first", timeout_s=1.0) as client:
            while True:
                with contextlib.suppress(QueueTimeout):
                    client.status()
                    break
                if process.poll() is not None:
                    raise RuntimeError(f"the queue server ended:\n{(run / 'queue.out').read_text()}")
        yield endpoint, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60.0)


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def peak_mb(process: psutil.Process) -> float:
    status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return 1024 * int(next(line for line in status if "VmHWM" in line).split()[1]) / 1e6


def drive(folder: Path, *, groups: int, staleness: int, warm_steps: int, **load: Any) -> tuple[Load, float, float]:
    """A load on a new run; CPU seconds of the server after the warm-up, and its largest memory beyond its start's, in MB."""
    folder.mkdir()
    rules = Rules.of(run_folder(folder, groups=groups, staleness=staleness))
    with server(folder / "run") as (endpoint, process):
        before_mb = process.memory_info().rss / 1e6
        generator = Generator(endpoint, RunKeys.load(folder / "run"), rules)
        warm_s: list[float] = []
        try:
            seen = generator.run(warm_steps=warm_steps, on_warm=lambda: warm_s.append(cpu_s(process)), **load)
            used_s = cpu_s(process) - warm_s[0]
        finally:
            generator.close()
        return seen, used_s, peak_mb(process) - before_mb


def reference_s() -> float:
    """CPU seconds of a plain loop: 0.3 to 0.5 on a free core of a present server."""
    began_s = time.process_time()
    total = 0
    for i in range(10_000_000):
        total += i
    return time.process_time() - began_s


def percentiles(values: Sequence[float]) -> str:
    p50, p99 = np.percentile(values, [50, 99]) * 1000
    return f"p50 {p50:.2f} ms, p99 {p99:.2f} ms, longest {1000 * max(values):.0f} ms"


def flow(folder: Path, *, groups: int, steps: int) -> None:
    seen, used_s, memory_mb = drive(folder / "flow", groups=groups, staleness=STALENESS, warm_steps=STALENESS + 1, steps=steps)
    worth = seen.tokens / (GROUPS * COMPLETIONS * MEAN_TOKENS)  # in steps of the job
    messages = sum(seen.messages.values())
    print(f"flow: {seen.steps} steps of {groups} x {COMPLETIONS}, {seen.tokens / 1e6:.1f} M tokens, {messages} messages")
    print("      " + ", ".join(f"{n} {name}" for name, n in seen.messages.most_common()))
    print(f"      {used_s / worth:.2f} s of CPU for a step of the job: {STEP_S * worth / used_s:.1f} times its rate on one core,")
    print(f"      {1e6 * used_s / messages:.0f} us per message; the reference loop took {reference_s():.2f} s")
    print(f"      driven at {STEP_S * worth / seen.wall_s:.1f} times the job's rate; {memory_mb:.0f} MB")


def latency(folder: Path, *, seconds: float) -> None:
    for times in (1, 10):
        rate = times * GROUPS * COMPLETIONS / STEP_S
        seen, used_s, _ = drive(
            folder / f"latency-{times}",
            groups=GROUPS,
            staleness=JOB_STALENESS,
            warm_steps=0,
            warm_s=15.0,
            steps=10**6,
            seconds=seconds,
            trajectories_s=rate,
        )
        reached = seen.graded / seen.wall_s / (GROUPS * COMPLETIONS / STEP_S)
        print(f"latency at {reached:.1f} times the job's rate ({100 * used_s / seen.wall_s:.0f}% of a core):")
        for name in ("lease", "report"):
            print(f"      {name}: {percentiles(seen.latencies_s[name])}")


def memory(folder: Path) -> None:
    groups = 64
    batch_mb = groups * COMPLETIONS * MEAN_TOKENS * 8 / 1e6  # a token and its log-prob; versions are runs
    for staleness in (0, 1, 4, 8):
        _, _, used_mb = drive(
            folder / f"memory-{staleness}",
            groups=groups,
            staleness=staleness,
            warm_steps=staleness + 1,
            steps=3,
            checkpoint_every=1,
        )
        bound_mb = (staleness + 1) * batch_mb
        print(
            f"memory, max_staleness={staleness}: the most is {used_mb:.0f} MB beyond an idle server's; the tokens of "
            f"{staleness + 1} batches are {bound_mb:.0f} MB ({used_mb / bound_mb:.2f} times)"
        )


def journal(folder: Path, *, groups: int) -> None:
    """Commits of one turn's segments."""
    segment = _segment(int(MEAN_TOKENS))
    rules = Rules(
        groups_per_step=groups, completions_per_group=COMPLETIONS, max_staleness=STALENESS, segment_tokens=4096,
        max_completion_tokens=16384, max_drops_per_step=0,
    )  # fmt: skip
    for mode in ("OFF", "NORMAL", "FULL"):
        with Journal(folder / f"{mode}.db", rules) as made:
            made._db.execute(f"PRAGMA synchronous={mode}")
            for count in (1, 16, 64):
                times = []
                for _ in range(20):
                    made.append([Extended(group=0, trajectory=0, segment=segment)] * count)
                    began_s = time.monotonic()
                    made.commit()
                    times.append(1000 * (time.monotonic() - began_s))
                print(f"journal: a commit of {count:2d} segments, synchronous={mode}: {np.median(times):.1f} ms (median of 20)")


def replay(folder: Path, *, groups: int, steps: int) -> None:
    """A start of the server at the worst moment of the job: after `steps` steps, with all that no checkpoint covers yet.

    The history is written, and forgotten at every checkpoint, by the real ledger and journal; what will be forgotten has short
    completions. Two checkpoints are kept and one is being written, and every group that may be admitted is there and graded.
    """
    folder = folder / "replay"
    folder.mkdir()
    rules = Rules.of(run_folder(folder, groups=groups, staleness=JOB_STALENESS))
    path, began_s = folder / "run" / "ledger.db", time.monotonic()
    trajectories = _write_history(path, rules, steps)
    written_s, size_mb = time.monotonic() - began_s, path.stat().st_size / 1e6
    began_s = time.monotonic()
    with server(folder / "run") as (_, process):
        wall_s, used_s, memory_mb = time.monotonic() - began_s, cpu_s(process), peak_mb(process)
        lines = (folder / "run" / "queue.out").read_text().splitlines()
    print(f"replay: {steps} steps of {groups} x {COMPLETIONS} trajectories, written in {written_s:.0f} s;")
    print(f"      {trajectories} trajectories stand in the file, {size_mb:.0f} MB; from the server's start to its first answer")
    print(
        f"      {wall_s:.1f} s, {used_s:.1f} s of CPU, at most {memory_mb:.0f} MB; the reference loop took {reference_s():.2f} s"
    )
    print("      " + next(line for line in lines if "replayed in" in line))


def _write_history(path: Path, rules: Rules, steps: int) -> int:
    """How many trajectories stand in the file."""
    ledger, groups = Ledger(rules), rules.groups_per_step
    covered = steps - 3 * JOB_CHECKPOINT_EVERY
    short, long = _segment(SHORT_TOKENS), _segment(int(MEAN_TOKENS))
    with Journal(path, rules) as made:

        def do(changes: Iterable[Change]) -> None:
            for change in changes:
                ledger.apply(change)
                made.append((change,))
            made.commit()

        for step in range(steps + JOB_STALENESS + 1):
            do(_groups(step, groups, long if step >= covered else short, version=min(step, steps)))
            if step >= steps:
                continue
            do(ledger.take(step) or ())
            do(ledger.advance(step + 1, ["engine-0@1"]))
            ledger.unload_trained()
            if step + 1 <= covered and (step + 1) % JOB_CHECKPOINT_EVERY == 0:
                do(ledger.durable(step + 1))
    state = ledger.state
    return sum(len(g.trajectories) for g in state.groups.values()) + sum(len(g.tokens) for g in state.taken.values())


def _segment(tokens: int) -> Segment:
    return Segment(
        tokens=np.arange(tokens, dtype=np.int32),
        logprobs=np.linspace(-2, -0.1, tokens, dtype=np.float32),
        versions=np.zeros(tokens, np.int32),
        finish=Finish.STOP,
        engine="engine-0",
    )


def _groups(step: int, groups: int, segment: Segment, version: int) -> Iterator[Change]:
    """A step's groups, generated and graded."""
    segment = replace(segment, versions=np.full(len(segment.tokens), version, np.int32))
    prompt = Prompt(
        id="p", tokens=np.ones(PROMPT_TOKENS, np.int32), task={"kind": "stdio", "tests": [{"input": "1", "output": "1"}]}
    )
    for group in range(step * groups, (step + 1) * groups):
        yield Admitted(group=group, version=version, prompt=prompt, completions=COMPLETIONS)
        for trajectory in range(COMPLETIONS):
            yield Extended(group=group, trajectory=trajectory, segment=segment)
            yield Graded(group=group, trajectory=trajectory, verdict=Verdict(reward=float(trajectory % 2)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["flow"], help="flow latency memory journal replay peers")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--history", type=int, default=600, help="steps before the start in `replay`")
    parser.add_argument("--groups", type=int, default=128, help="of a step in all but `latency` and `memory`; the job has 512")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each rate in `latency`")
    parser.add_argument("--peers-python", default=sys.executable, help="of an environment with redis and ray")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "flow" in arguments.parts:
            flow(folder, groups=arguments.groups, steps=arguments.steps)
        if "latency" in arguments.parts:
            latency(folder, seconds=arguments.seconds)
        if "memory" in arguments.parts:
            memory(folder)
        if "journal" in arguments.parts:
            journal(folder, groups=arguments.groups)
        if "replay" in arguments.parts:
            replay(folder, groups=arguments.groups, steps=arguments.history)
        if "peers" in arguments.parts:
            subprocess.run([arguments.peers_python, str(ROOT / "benchmarks" / "ledger_peers.py")], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
