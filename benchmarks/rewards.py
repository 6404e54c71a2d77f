"""What a verdict on a mathematical answer costs, and whether it is right: ours beside verl's and TRL's functions.

    make peers && .venv-peers/bin/python benchmarks/rewards.py [--rounds 3]

One run, the same completions for all: some sentences of reasoning, then a boxed answer. `numbers` are 200 integers of which half
are right, as in GSM8K. `symbols` are the pairs of tests/reward/kinds/test_math.py that need more than numbers, as in MATH. Every
grader runs in a process of its own, the rounds take turns, and the best one counts: the one with the fewest wrong verdicts, and
of these the one with the least CPU time of all processes that the grader starts, without their start. The peers' functions run
unchanged. TRL compares in its own process, and stops a comparison by a signal; verl compares in a pool of four processes. `wrong`
are verdicts that differ from what the pair says.

The last two rows are a function of the user (benchmarks/user_code/boxed.py) that compares text, so it is wrong about symbols: as
the kind `python`, and called in the grader's own process, as both peers do it.
"""

import argparse
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(HERE / "user_code")]

PLAIN = "the same, called in the process"
Pair = tuple[str, str, bool]  # ground truth, completion, whether it is right
Grader = Callable[[str, str], bool]
REASONING = "First we look at what is given. There are 12 of them, and 3 + 4 = 7, so $x^2 = 49$ holds and we go on. " * 6


def numbers() -> list[Pair]:
    return [(str(n), completion(f"{n + n % 2:,}"), not n % 2) for n in range(900, 1100)]


def symbols() -> list[Pair]:
    pairs = [json.loads(line) for line in (ROOT / "tests/reward/kinds/math_pairs.jsonl").open()]
    return [(pair["truth"], completion(pair["answer"]), pair["equal"]) for pair in pairs]


def completion(answer: str) -> str:
    return f"{REASONING}\nTherefore the answer is $\\boxed{{{answer}}}$."


@contextmanager
def ours(task: Callable[[str], dict[str, Any]]) -> Iterator[Grader]:
    from reward.grade import grade
    from reward.grading.resources import Lent, Sandboxes, Slots
    from reward.grading.services import Services
    from reward.kinds.functions.pool import FunctionPool
    from reward.kinds.kind import Answer
    from reward.task import read_reward

    sandboxes, functions, services = Sandboxes(1), FunctionPool(HERE, 1, 1024), Services()
    lent = Lent(
        sandboxes=sandboxes, functions=functions, services=services, slots=Slots(1, most_waiting=0), cancelled=lambda: False
    )

    def is_right(truth: str, text: str) -> bool:
        verdict = grade(read_reward(task(truth)), Answer(completion=text, metadata={"truth": truth}), lent)
        if verdict.parts.get("function_failed"):
            raise SystemExit(verdict.reason)
        return verdict.reward == 1

    yield is_right
    sandboxes.close()
    functions.close()


@contextmanager
def trl() -> Iterator[Grader]:
    from trl.rewards import accuracy_reward

    yield (
        lambda truth, text: (
            accuracy_reward(completions=[[{"role": "assistant", "content": text}]], solution=[f"$\\boxed{{{truth}}}$"])[0] == 1
        )
    )


@contextmanager
def verl() -> Iterator[Grader]:
    from verl.utils.reward_score import math_verify

    yield lambda truth, text: math_verify.compute_score(text, truth) == 1
    math_verify._get_pool().shutdown()


@contextmanager
def plain() -> Iterator[Grader]:
    from boxed import ends_in_box

    yield lambda truth, text: ends_in_box(text, {"truth": truth}) == 1


GRADERS = {
    "ours, math": lambda: ours(lambda truth: {"kind": "math", "answer": truth}),
    "TRL accuracy_reward": trl,
    "verl math_verify": verl,
    "ours, python": lambda: ours(lambda truth: {"kind": "python", "function": "boxed:ends_in_box"}),
    PLAIN: plain,
}


def serve(name: str, connection: Connection) -> None:
    """A grader in its own process: grades each list of pairs that it is sent, and answers with CPU seconds and wrong verdicts."""
    import logging

    logging.disable()
    with GRADERS[name]() as grader:
        for truth, text, _ in symbols()[:4]:  # what starts with the first verdict does not count
            grader(truth, text)
        while pairs := connection.recv():
            began_s = cpu_s()
            wrong = sum(grader(truth, text) != right for truth, text, right in pairs)
            connection.send((cpu_s() - began_s, wrong))


def cpu_s() -> float:
    """Of this process and all that it started; a zygote's jobs count as its children."""
    import psutil

    me = psutil.Process()
    times = [process.cpu_times() for process in (me, *me.children(recursive=True))]
    return sum(t.user + t.system + t.children_user + t.children_system for t in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    sets = {"numbers": numbers(), "symbols": symbols()}
    spawn, found = multiprocessing.get_context("spawn"), {}
    graders = {}
    for name in GRADERS:
        here, there = spawn.Pipe()
        process = spawn.Process(target=serve, args=(name, there))
        process.start()
        graders[name] = (process, here)
    for _ in range(rounds):
        for kind, pairs in sets.items():
            for name, (_process, connection) in graders.items():
                connection.send(pairs)
                spent_s, wrong = connection.recv()
                found[name, kind] = min(found.get((name, kind), (len(pairs), 0.0)), (wrong, spent_s / len(pairs)))
    for process, connection in graders.values():
        connection.send([])
        process.join()
    print("| grader | answers | CPU ms per verdict | verdicts/s per core | its cost / ours | wrong |\n|---|---|---|---|---|---|")
    for (name, kind), (wrong, spent_s) in found.items():
        rival = "ours, python" if name == PLAIN else "ours, math"
        ratio, rate = spent_s / found[rival, kind][1], 1 / max(spent_s, 1e-9)
        print(f"| {name} | {kind} | {spent_s * 1e3:.3f} | {rate:,.0f} | {ratio:.2f} | {wrong} of {len(sets[kind])} |")


if __name__ == "__main__":
    main()
