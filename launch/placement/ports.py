"""The ports of a run: fixed numbers, so that every node knows them without being told.

No number is used twice in a run, so that several of its nodes may be one machine. Runs that share a node get separate blocks.
A block consists of whole slots, so that a run can claim it slot by slot (port_claims.py).
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from conf.schema import ConfigError, RunConfig
from rollout.servers import servers

FIRST_PORT, PORT_LIMIT = 10_240, 32_000  # whole slots
"""Linux assigns ports from 32768 on to processes that ask for any port, so a fixed port must be below."""

HIGHEST_PORT = 65_535
FIXED_PORTS = 8  # the queue and the trainer's rendezvous; the others are spare
PUSH_PORTS = 8  # for each pipeline stage, since a weight group that is created again listens on another port
ENGINE_PORTS = 8  # an engine's own port and those that SGLang derives from it
SLOT_PORTS = 64
JOB_PORTS = 8 * SLOT_PORTS
ENGINE_BLOCK = ENGINE_PORTS + 1  # with the rendezvous port of the rollout process whose first engine it is


@dataclass(frozen=True, kw_only=True, slots=True)
class Ports:
    """The ports of a run."""

    queue: int
    trainer: int  # the rendezvous
    push: int  # the first of PUSH_PORTS for each pipeline stage
    engine: int  # the first of ENGINE_PORTS for each server
    rollout: int  # the rendezvous of the rollout process whose first engine is number 0

    @staticmethod
    def count(config: RunConfig) -> int:
        return FIXED_PORTS + PUSH_PORTS * config.trainer.pp + ENGINE_BLOCK * len(servers(config))

    @classmethod
    def starting_at(cls, base: int, config: RunConfig) -> "Ports":
        push = base + FIXED_PORTS
        engine = push + PUSH_PORTS * config.trainer.pp
        rollout = engine + ENGINE_PORTS * len(servers(config))
        return cls(queue=base, trainer=base + 1, push=push, engine=engine, rollout=rollout)


def slots(ports: range) -> range:
    """The numbers of the slots in which these ports lie."""
    return range(ports.start // SLOT_PORTS, (ports.stop - 1) // SLOT_PORTS + 1)


def choose_base_port(
    run_dir: Path,
    config: RunConfig,
    is_free: Callable[[int], bool],
    *,
    take: Callable[[range], bool] = lambda ports: True,
    job: int | None = None,
) -> int:
    """The first port of the run: of the first block that is free and that no other run has claimed. Raises ConfigError.

    The search begins at the hash of the run's folder. In a Slurm job it begins at the job's number, so that two jobs that start
    on a node at the same time do not choose the same block.
    """
    count = Ports.count(config)
    if base := config.cluster.base_port:
        _check_block(range(base, base + count), is_free, take)
        return base
    grain = SLOT_PORTS if job is None else JOB_PORTS  # jobs of any size use the same grid of blocks
    size = ceil(count / grain) * grain
    blocks = (PORT_LIMIT - FIRST_PORT) // size
    hashed = int.from_bytes(hashlib.sha256(str(run_dir.resolve()).encode()).digest()[:8], "big")
    for offset in range(blocks):
        base = FIRST_PORT + ((hashed if job is None else job) + offset) % blocks * size
        block = range(base, base + count)
        if all(map(is_free, block)) and take(block):
            return base
    raise ConfigError(f"no {count} free ports in a row between {FIRST_PORT} and {PORT_LIMIT}")


def _check_block(block: range, is_free: Callable[[int], bool], take: Callable[[range], bool]) -> None:
    """Takes the block that the user chose. Raises ConfigError."""
    if block[-1] > HIGHEST_PORT:
        raise ConfigError(
            f"cluster.base_port={block[0]}: the run needs {len(block)} ports, and {HIGHEST_PORT} is the highest port"
        )
    remedy = (
        f"and the run needs {block[0]} to {block[-1]}: end the process that holds it, choose another cluster.base_port, "
        "or set it to 0, so that free ports are chosen"
    )
    if taken := [port for port in block if not is_free(port)]:
        raise ConfigError(f"port {taken[0]} is in use, {remedy}")
    if not take(block):
        first, last = (number * SLOT_PORTS for number in (slots(block).start, slots(block).stop))
        raise ConfigError(f"another run on this machine has claimed ports between {first} and {last - 1}, {remedy}")
