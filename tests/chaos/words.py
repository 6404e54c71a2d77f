"""A vocabulary whose completions are Python that a real sandbox can grade: the parity of their tokens.

Decoded, the tokens 12, 45 and 7 (which ends) are `12&1^ 45&1^ 7&1`; after the prefill `f = lambda: ` that is a function, and
the task asks for f() == 1.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from tests.rollout.fake_engine import VOCABULARY

STOPS = (7, 77, 177, 277)
PREFILL = "f = lambda: "
TASK = {"kind": "calls", "entry_point": "f", "tests": [{"args": [], "expected": 1}]}


def worth(completion: Sequence[int]) -> float:
    """The reward of a completion that ended by itself. Token 0 stands for unknown words and is not decoded."""
    return float(sum(token & 1 for token in completion) % 2)


HANGS = 29
DEADLINE_S = 12.0  # longer than any process is frozen
NONSENSE = "nonsense"


def bonus(tokens: int) -> tuple[float, str]:
    """What the user's function adds to the reward of a completion, and of what its failure tells: it raises, ends its process, or
    hangs."""
    if tokens == HANGS:
        return 0.0, f"{DEADLINE_S:g} s"
    return {1: (0.0, "ValueError: at times"), 2: (0.0, "ended")}.get(tokens % 5, (0.25, ""))


USER_CODE = f"""
import os, time

def bonus(tokens):
    if tokens == {HANGS}:
        time.sleep(1000)
    if tokens % 5 == 1:
        raise ValueError("at times")
    if tokens % 5 == 2:
        os._exit(1)
    if tokens % 5 == 4 and os.fork() == 0:
        time.sleep(1000)
    return 0.25
"""


def score(tokens: int) -> float:
    """What the user's service gives."""
    return tokens % 5 / 4


def word(token: int) -> str:
    return f"{token}&1" if token in STOPS else f"{token}&1^"


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word(i): i for i in range(VOCABULARY)}, unk_token=word(0)))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=word(0)).save_pretrained(folder)


def write_problems(path: Path, count: int) -> None:
    lines = [
        {"id": f"p{i}", "prompt": f"{word(i)} {word(i + 1)} ", "raw": True, "prefill": PREFILL, "task": TASK}
        for i in range(8, 8 + count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
