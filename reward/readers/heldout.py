"""Which problems of the training sources are held out: a fixed share, told by the prompt alone.

A problem therefore stays on its side when others are added or removed, and equal prompts are always on the same side.
"""

import hashlib
import json

from rollout.prompts.problems import Problem

BITS = 64


def question(problem: Problem) -> bytes:
    """What is the same for two problems that ask the same, whatever the blanks between the words."""
    asked = [[message["role"], *message["content"].split()] for message in problem.messages]
    return hashlib.sha256(json.dumps([asked, problem.prefill.split()]).encode()).digest()


def is_held_out(problem: Problem, fraction: float) -> bool:
    return int.from_bytes(question(problem)[: BITS // 8]) < fraction * 2**BITS
