"""Small records for tests."""

from typing import Any

import numpy as np

from rollout.ledger.ledger import Ledger
from rollout.ledger.records import Finish, Observation, Position, Prompt, Segment, Verdict
from rollout.ledger.rules import Rules


def rules(**changed: Any) -> Rules:
    numbers = {
        "groups_per_step": 2,
        "completions_per_group": 2,
        "max_staleness": 1,
        "segment_tokens": 4,
        "max_drops_per_step": 4096,
    }
    return Rules(**{**numbers, "max_completion_tokens": 8, **changed})


def prompt(number: int = 0) -> Prompt:
    task = {"kind": "calls", "tests": [{"input": number, "output": number}]}
    return Prompt(id=f"p{number}", tokens=np.array([7, 8, number], np.int32), task=task)


def segment(versions: list[int], finish: str = "stop", engine: str = "e0@1", first_token: int = 0) -> Segment:
    n = len(versions)
    return Segment(
        tokens=np.arange(first_token, first_token + n, dtype=np.int32),
        logprobs=np.linspace(-1, -0.5, n, dtype=np.float32),
        versions=np.array(versions, np.int32),
        finish=Finish(finish),
        engine=engine,
    )


def observation(tokens: int, first_token: int = 0) -> Observation:
    return Observation(tokens=np.arange(first_token, first_token + tokens, dtype=np.int32), parts={"tool_calls": 1.0}, wall_s=0.5)


def at_end(ledger: Ledger, position: Position) -> Position:
    """The position where the trajectory ends now; unchanged if there is no such trajectory any more."""
    group = ledger.state.groups.get(position.group)
    return position if group is None else position._replace(offset=group.trajectories[position.trajectory].length)


def verdict(reward: float = 1.0) -> Verdict:
    return Verdict(reward=reward, parts={"tests": reward})
