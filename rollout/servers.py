"""The SGLang servers that a run starts: the engines of the policy, and after them those of models that no push changes.

Both the launcher, which places them, and the ranks of the fleet, which run them, read this list.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from conf.schema import RunConfig

TEACHER, JUDGE_MODEL = "teacher", "judge-model"


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    name: str
    tp: int  # GPUs, or CPU processes
    frozen: str = ""  # the folder of weights that no push changes; "": it serves the policy
    speaks_text: bool = False  # it is asked in text, so it needs its tokenizer


def servers(config: RunConfig) -> Sequence[Server]:
    algo, reward, rollout = config.algo, config.reward, config.rollout
    found = [Server(name=f"engine-{number}", tp=rollout.engine_tp) for number in range(rollout.engines)]
    if algo.teacher_has_engine:
        found.append(Server(name=TEACHER, tp=algo.teacher_tp, frozen=algo.teacher))
    if reward.judge_model:
        found.append(Server(name=JUDGE_MODEL, tp=reward.judge_model_tp, frozen=reward.judge_model, speaks_text=True))
    return found


def frozen_gpus(config: RunConfig) -> int:
    """The GPUs that neither the trainer nor the engines of the policy can have."""
    return sum(server.tp for server in servers(config) if server.frozen)


def address_file(run_dir: Path, name: str) -> Path:
    """Holds the address of a server with frozen weights while it serves."""
    return run_dir / f"{name}_address"
