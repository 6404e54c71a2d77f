"""Reward functions of a user: honest ones, and others that do each thing that goes wrong."""

import asyncio
import os
import subprocess
import sys
import time

import numpy as np

LEAKED = []


def brevity(completion):
    return -len(completion.split()) / 100


async def slowly(prompt, completion):
    await asyncio.sleep(0.01)
    return float(prompt in completion)


def with_parts(completion, **given):
    return len(completion), {"given": len(given), "metadata": given["metadata"]["level"]}


def as_numpy(tokens):
    return np.float32(tokens)


def hangs(completion):
    while True:
        time.sleep(1)


def spins(completion):
    while True:
        pass


def raises(completion):
    return 1 / (completion == "")


def forks(completion):
    if os.fork() == 0:
        time.sleep(600)
    return 1.0


def forks_and_both_return(completion):
    os.fork()
    return 1.0


def runs_a_program(completion):
    return float(subprocess.run(["echo", "1"], capture_output=True, text=True).stdout)


def prints_megabytes(completion):
    print("x" * (32 << 20), flush=True)
    os.write(2, b"x" * (1 << 20))
    return 1.0


def exits(completion):
    sys.exit(3)


def ends_its_process(completion):
    os._exit(3)


def uses_memory(completion):
    LEAKED.append(b"x" * (400 << 20))
    time.sleep(600)


def leaks(completion):
    LEAKED.append(b"x" * (40 << 20))
    return 1.0


def recurses(completion):
    return recurses(completion)


def returns_text(completion):
    return "0.5"


def returns_a_huge_integer(completion):
    return 10**400


def returns_nan(completion):
    return float("nan")


def returns_a_bool(completion):
    return True


def returns_nothing(completion):
    return None


def returns_bad_parts(completion):
    return 1.0, {"style": "good"}


def returns_three(completion):
    return 1.0, {}, {}


def wants_more(completion, solution):
    return 1.0


def fails_at_times(completion):
    if "raise" in completion:
        raise ValueError("at times")
    if "exit" in completion:
        os._exit(1)
    return 1.0
