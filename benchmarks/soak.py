"""20,000 mixed jobs in two sandboxes side by side: does anything leak, and does every verdict stay what it is?

    .venv/bin/python benchmarks/soak.py [--jobs 20000] [--slots 2]

Counts processes, open files and mounts of this process and its jails, and their memory, after a tenth of the jobs and at the end.
Ends with 1 where one of them has grown or a verdict was another one.
"""

import argparse
import os
import random
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from reward.jail.limits import SandboxError
from reward.sandbox.sandbox import Sandbox
from reward.task import Task, parse_task
from tests.reward.graded import grade
from tests.reward.programs import CHEATS_CALLS, HONEST_CALLS, HONEST_STDIO, HOSTILE

SUM = parse_task({"kind": "stdio", "tests": [{"input": "3 4\n", "output": "7\n"}], "cpu_limit_s": 4})
SQUARE = parse_task({"kind": "calls", "entry_point": "f", "tests": [{"args": [x], "expected": x * x} for x in (3, 0, -7)]})
CLAIMS = parse_task({"kind": "asserts", "entry_point": "f", "tests": ["assert f(3) == 9\nassert f(-7) == 49"]})
CODE = parse_task({"kind": "asserts", "entry_point": "f", "tests": ["for x in range(5):\n    assert f(x) == x * x"]})
LITTLE = {"cpu_limit_s": 0.05, "memory_limit_mb": 64}
NEVER = parse_task({"kind": "calls", "entry_point": "f", "tests": [{"args": [3], "expected": 16}], **LITTLE})
BREACH = parse_task({"kind": "stdio", "tests": [{"input": "x", "output": "BREACH"}], **LITTLE})
SLOW = ("300 ms of CPU", "signal handler", "asyncio", "big stack in a thread", "lazy imports")
SHARE_HOSTILE = 0.1
LEAK_BYTES = 24 << 20


def mix(rng: random.Random) -> tuple[Task, str, float]:
    """A task, a program, and the reward that it is worth."""
    kind = rng.random()
    if kind < SHARE_HOSTILE / 2:
        return BREACH, rng.choice(list(HOSTILE.values())), 0.0
    if kind < SHARE_HOSTILE:
        return NEVER, rng.choice(list(CHEATS_CALLS.values())), 0.0
    if kind < 0.4:
        return SUM, rng.choice([code for name, code in HONEST_STDIO.items() if name not in SLOW]), 1.0
    if kind < 0.7:
        return SQUARE, rng.choice(list(HONEST_CALLS.values())), 1.0
    return (CLAIMS if kind < 0.85 else CODE), HONEST_CALLS["plain"], 1.0


def held() -> dict[str, int]:
    me = psutil.Process()
    family = [me, *me.children(recursive=True)]
    memory = [process.memory_info().rss for process in family]
    return {
        "processes": len(family),
        "open files": sum(process.num_fds() for process in family),
        "mounts": sum(len(Path(f"/proc/{process.pid}/mountinfo").read_text().splitlines()) for process in family),
        "memory of the judge": memory[0],
        "memory of the jails": sum(memory[1:]),
    }


class Soak:
    def __init__(self, slots: int) -> None:
        self.sandboxes = [Sandbox().__enter__() for _ in range(slots)]
        self.counts: Counter[str] = Counter()
        self.wrong: Counter[str] = Counter()

    def run(self, jobs: int, seed: int) -> None:
        share = jobs // len(self.sandboxes)
        threads = [
            threading.Thread(target=self._grade, args=(sandbox, share, random.Random(seed + slot)))
            for slot, sandbox in enumerate(self.sandboxes)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _grade(self, sandbox: Sandbox, jobs: int, rng: random.Random) -> None:
        for _ in range(jobs):
            task, code, worth = mix(rng)
            try:
                verdict = grade(task, f"```python\n{code}\n```", sandbox=sandbox)
            except SandboxError as error:
                self.counts[f"lost: {error}"] += 1
                continue
            self.counts["verdicts"] += 1
            self.counts["retries"] += int(verdict.parts["retries"])
            if verdict.reward != worth:
                self.wrong[f"{code[:60]!r}: {verdict.reward} ({verdict.reason[:80]})"] += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--slots", type=int, default=2)
    arguments = parser.parse_args()
    began_s = time.monotonic()
    soak = Soak(arguments.slots)
    soak.run(arguments.jobs // 10, seed=0)
    before = held()
    soak.run(arguments.jobs - arguments.jobs // 10, seed=1000)
    after = held()
    started = sum(sandbox.jobs_started for sandbox in soak.sandboxes)
    for sandbox in soak.sandboxes:
        sandbox.close()
    grown = [name for name in before if after[name] > before[name] + (LEAK_BYTES if name.startswith("memory") else 0)]
    wall_s = time.monotonic() - began_s
    print(f"{started} jobs, {dict(soak.counts)}, in {wall_s:.0f} s; load {os.getloadavg()[0]:.1f}")
    for name in before:
        print(f"  {name:22} {before[name]:>12} -> {after[name]:>12}{'   GREW' if name in grown else ''}")
    for text, count in soak.wrong.most_common(10):
        print(f"  wrong {count} x {text}")
    return 1 if grown or soak.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
