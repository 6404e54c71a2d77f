"""A run's folder with a small ledger, written by the real journal."""

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from rollout.ledger.changes import Admitted, Change, Extended, Graded, Observed, Taken, TakenGroup
from rollout.ledger.journal import Journal
from rollout.ledger.records import Finish, Observation, Prompt, Segment, Verdict
from tests.rollout.builders import rules

ALPHABET = sorted(ByteLevel.alphabet())  # each byte is one token, so a character may be several
TOKENIZER = Tokenizer(BPE({character: number for number, character in enumerate(ALPHABET)}, []))
TOKENIZER.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
TOKENIZER.decoder = ByteLevelDecoder()


def tokens(text: str) -> np.ndarray:
    return np.array(TOKENIZER.encode(text).ids, np.int32)


def piece(text: str, version: int, finish: Finish = Finish.STOP, engine: str = "engine-0") -> Segment:
    found = tokens(text)
    return Segment(
        tokens=found,
        logprobs=np.full(len(found), -0.5, np.float32),
        versions=np.full(len(found), version, np.int32),
        finish=finish,
        engine=engine,
    )


def admitted(group: int, problem: str, version: int = 0, completions: int = 2) -> Admitted:
    prompt = Prompt(id=problem, tokens=tokens(f"Solve {problem}:"), task={"kind": "none"}, text=f"Solve {problem}")
    return Admitted(group=group, version=version, prompt=prompt, completions=completions)


def group_of(index: int, problem: str, texts: Sequence[str], rewards: Sequence[float], version: int = 0) -> list[Change]:
    """A group whose completions have one segment each."""
    changes: list[Change] = [admitted(index, problem, version, len(texts))]
    for number, (text, reward) in enumerate(zip(texts, rewards, strict=True)):
        reason = "" if reward >= 1 else "wrong answer"
        changes.append(Extended(index, number, piece(text, version)))
        changes.append(Graded(index, number, Verdict(reward=reward, parts={"tests": reward}, reason=reason)))
    return changes


def taken(step: int, groups: Sequence[int]) -> Taken:
    return Taken(
        step=step, groups=[TakenGroup(group=group, tokens=[1, 1], observed=[0, 0], digests=[[], []]) for group in groups]
    )


EPISODE: list[Change] = [
    admitted(2, "p2", 1),
    Extended(2, 0, piece("fir", 1, Finish.CUT)),
    Extended(2, 0, piece("st", 2, engine="engine-1")),
    Observed(2, 0, Observation(tokens=tokens(" said ü"))),
    Extended(2, 0, piece("last", 2)),
    Graded(2, 0, Verdict(reward=0.5, parts={"tests": 0.5}, reason="half")),
]
HISTORY = [
    *group_of(0, "p0", ["right", "wrong answer"], [1.0, 0.0]),
    *group_of(1, "p1", ["bad", "worse"], [0.0, 0.0]),
    taken(0, [0, 1]),
    *EPISODE,
    *group_of(3, "p0", ["right", "right too"], [1.0, 1.0], version=2),
    taken(3, [2, 3]),
]


def write_changes(run_dir: Path, changes: Sequence[Change]) -> None:
    with closing(Journal(run_dir / "ledger.db", rules())) as journal:
        journal.append(changes)
        journal.commit()


def make_run(run_dir: Path, changes: Sequence[Change] = HISTORY) -> Path:
    (run_dir / "model_description").mkdir(parents=True)
    TOKENIZER.save(str(run_dir / "model_description" / "tokenizer.json"))
    (run_dir / "config.yaml").write_text("name: small\n")
    lines = [{"step": step, "time": float(step), "reward/mean": 0.1 * step, "grad_norm": float("nan")} for step in (1, 2)]
    (run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    write_changes(run_dir, changes)
    return run_dir
