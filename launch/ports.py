"""The ports of a run: fixed numbers, so that every node knows them without being told.

No number is used twice in a run, so that several of its nodes may be one machine; and runs that share a node get blocks
of their own.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from conf.schema import ConfigError, RunConfig

FIRST_PORT, PORT_LIMIT = 10_000, 32_000
"""Linux hands out ports from 32768 on to whoever asks for any port: a fixed port must lie below."""

FIXED_PORTS = 8  # queue, the trainer's rendezvous; the others are spare
PUSH_PORTS = 8  # for each pipeline stage: a weight group that is made again listens on another
ENGINE_PORTS = 8  # an engine's own and those that SGLang derives from it
JOB_PORTS = 512
ENGINE_BLOCK = ENGINE_PORTS + 1  # with the rendezvous of the rollout process whose first engine it is


@dataclass(frozen=True, kw_only=True, slots=True)
class Ports:
    """The ports of a run."""

    queue: int
    trainer: int  # rendezvous
    push: int  # first of PUSH_PORTS for each pipeline stage
    engine: int  # first of ENGINE_PORTS for each engine
    rollout: int  # rendezvous of the rollout process whose first engine is number 0

    @staticmethod
    def count(config: RunConfig) -> int:
        return FIXED_PORTS + PUSH_PORTS * config.trainer.pp + ENGINE_BLOCK * config.rollout.engines

    @classmethod
    def starting_at(cls, base: int, config: RunConfig) -> "Ports":
        push = base + FIXED_PORTS
        engine = push + PUSH_PORTS * config.trainer.pp
        rollout = engine + ENGINE_PORTS * config.rollout.engines
        return cls(queue=base, trainer=base + 1, push=push, engine=engine, rollout=rollout)


def choose_base_port(run_dir: Path, config: RunConfig, is_free: Callable[[int], bool], *, job: int | None = None) -> int:
    """The first port of the run, the next block if that is not free. Raises ConfigError.

    By the hash of the run's folder; in a Slurm job by its number, so that jobs that start on a node at the same time, none
    of them listening yet, do not choose the same.
    """
    count = Ports.count(config)
    if base := config.cluster.base_port:
        if taken := [port for port in range(base, base + count) if not is_free(port)]:
            raise ConfigError(
                f"port {taken[0]} is in use, and the run needs {base} to {base + count - 1}: end what holds it, choose "
                "another cluster.base_port, or leave that at 0 to have free ports chosen"
            )
        return base
    size = count if job is None else ceil(count / JOB_PORTS) * JOB_PORTS  # blocks of jobs of any size lie on one grid
    blocks = (PORT_LIMIT - FIRST_PORT) // size
    hashed = int.from_bytes(hashlib.sha256(str(run_dir.resolve()).encode()).digest()[:8], "big")
    for offset in range(blocks):
        base = FIRST_PORT + ((hashed if job is None else job) + offset) % blocks * size
        if all(is_free(port) for port in range(base, base + count)):
            return base
    raise ConfigError(f"no {count} free ports in a row between {FIRST_PORT} and {PORT_LIMIT}")
