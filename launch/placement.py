"""Placement: from a configuration and a list of nodes to the processes of a run. A pure function.

    place(config, run_dir, nodes, base_port) -> [queue-0, trainer-0, …, rollout-0, …, judge-0, …]

`local.py` starts what it says on one machine; another renderer starts the same records elsewhere. The trainer takes
the first nodes, the engines what follows, and the queue server sits beside the trainer's first rank. On a CPU one node
takes everything.
"""

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from conf.schema import ConfigError, RunConfig

GUARD = Path(__file__).with_name("guard.py")

FIRST_PORT, PORT_LIMIT = 10_000, 32_000
"""Linux hands out ports from 32768 on to whoever asks for any port: a fixed port must lie below."""

FIXED_PORTS = 8  # queue, two rendezvous; the others are spare
PUSH_PORTS = 8  # for each pipeline stage: a weight group that is made again listens on another
ENGINE_PORTS = 8  # an engine's own and those that SGLang derives from it


class Restart(StrEnum):
    """When a process that ended before the run did is started again."""

    NEVER = "never"  # its end is the run's end
    ON_FAILURE = "on_failure"  # exit code 0 means that it was told to leave
    ALWAYS = "always"


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    name: str
    address: str  # where the other nodes reach it
    gpus: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    role: str  # queue | trainer | rollout | judge
    name: str  # role-n: also the name of its log
    node: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)  # added to the launcher's own
    ports: Mapping[str, int] = field(default_factory=dict)  # those it listens on, by purpose
    gpus: tuple[int, ...] = ()
    restart: Restart = Restart.NEVER

    @property
    def restartable(self) -> bool:
        return self.restart is not Restart.NEVER


@dataclass(frozen=True, kw_only=True, slots=True)
class Ports:
    """The ports of a run: the same numbers on each of its nodes."""

    queue: int
    trainer: int  # rendezvous
    rollout: int  # rendezvous
    push: int  # first of `push_count`
    push_count: int
    engine: int  # first of `engine_count`
    engine_count: int

    @staticmethod
    def count(config: RunConfig) -> int:
        return FIXED_PORTS + PUSH_PORTS * config.trainer.pp + ENGINE_PORTS * config.rollout.engines

    @classmethod
    def starting_at(cls, base: int, config: RunConfig) -> "Ports":
        push_count = PUSH_PORTS * config.trainer.pp
        return cls(
            queue=base, trainer=base + 1, rollout=base + 2, push=base + FIXED_PORTS, push_count=push_count,
            engine=base + FIXED_PORTS + push_count, engine_count=ENGINE_PORTS * config.rollout.engines,
        )  # fmt: skip


def choose_base_port(run_dir: Path, config: RunConfig, is_free: Callable[[int], bool]) -> int:
    """The first port of the run: by the hash of its folder, or the next block that is free. Raises ConfigError."""
    count = Ports.count(config)
    if base := config.cluster.base_port:
        if taken := [port for port in range(base, base + count) if not is_free(port)]:
            raise ConfigError(
                f"port {taken[0]} is in use, and the run needs {base} to {base + count - 1}: end what holds it, choose "
                "another cluster.base_port, or leave that at 0 to have free ports chosen"
            )
        return base
    blocks = (PORT_LIMIT - FIRST_PORT) // count
    start = int.from_bytes(hashlib.sha256(str(run_dir.resolve()).encode()).digest()[:8], "big")
    for offset in range(blocks):
        base = FIRST_PORT + (start + offset) % blocks * count
        if all(is_free(port) for port in range(base, base + count)):
            return base
    raise ConfigError(f"no {count} free ports in a row between {FIRST_PORT} and {PORT_LIMIT}")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Share:
    """What one node gives to one role."""

    node: Node
    ranks: int
    gpus: tuple[int, ...] = ()


def place(config: RunConfig, run_dir: Path, nodes: Sequence[Node], base_port: int, python: str = sys.executable) -> list[Process]:
    """The processes of a run. Raises ConfigError when the nodes cannot hold them."""
    trainers, fleet = _shares(config, nodes)
    ports = Ports.starting_at(base_port, config)
    head = trainers[0].node
    context = _Context(
        config=config, run_dir=run_dir, ports=ports, head=head, python=python, queue=f"tcp://{head.address}:{ports.queue}",
        alone=len(nodes) == 1,
    )  # fmt: skip
    judge_nodes = [share.node for share in fleet]
    return [
        _queue(context),
        *(_trainer(context, n, share, len(trainers)) for n, share in enumerate(trainers)),
        *(_rollout(context, n, share, sum(s.ranks for s in fleet[:n])) for n, share in enumerate(fleet)),
        *(_judge(context, n, judge_nodes[n % len(judge_nodes)]) for n in range(config.reward.judges)),
    ]


def _shares(config: RunConfig, nodes: Sequence[Node]) -> tuple[list[_Share], list[_Share]]:
    trainer = config.trainer
    world = trainer.tp * trainer.pp * trainer.cp * trainer.dp
    engines, engine_tp = config.rollout.engines, config.rollout.engine_tp
    if len(nodes) == 1 and config.cluster.device == "cpu":
        return [_Share(node=nodes[0], ranks=world)], [_Share(node=nodes[0], ranks=engines)]
    needs = (
        f"the trainer needs {world} GPUs (trainer.tp x pp x cp x dp) and the engines {engines * engine_tp} "
        f"(rollout.engines x engine_tp)"
    )
    per_node = nodes[0].gpus
    if per_node == 0 or any(node.gpus != per_node for node in nodes):
        raise ConfigError(
            f"{needs}, but the nodes have {[n.gpus for n in nodes]}: set cluster.gpus_per_node or cluster.device=cpu"
        )
    if world > per_node and world % per_node:
        raise ConfigError(f"{needs}: a trainer larger than a node must fill its nodes of {per_node} GPUs")
    trainers = []
    fleet = []
    trainer_left, engines_left = world, engines
    for node in nodes:
        ranks = min(trainer_left, per_node)
        if ranks:
            trainers.append(_Share(node=node, ranks=ranks, gpus=tuple(range(ranks))))
        here = min(engines_left, (per_node - ranks) // engine_tp)
        if here:
            fleet.append(_Share(node=node, ranks=here, gpus=tuple(range(ranks, ranks + here * engine_tp))))
        trainer_left, engines_left = trainer_left - ranks, engines_left - here
    if trainer_left or engines_left:
        raise ConfigError(
            f"{needs}, more than {len(nodes)} node(s) of {per_node} GPUs hold: lower them, add nodes, or set cluster.device=cpu"
        )
    return trainers, fleet


@dataclass(frozen=True, kw_only=True, slots=True)
class _Context:
    config: RunConfig
    run_dir: Path
    ports: Ports
    head: Node
    python: str
    queue: str  # endpoint
    alone: bool  # one node holds the whole run

    def env(self, share_gpus: tuple[int, ...] = ()) -> dict[str, str]:
        env = {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
        # Megatron and torch warn on every rank, at import already, about what only they can change.
        env["PYTHONWARNINGS"] = "ignore::UserWarning,ignore::FutureWarning,ignore::DeprecationWarning"
        if self.config.cluster.device == "cpu":
            env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
            if self.alone:
                env["GLOO_SOCKET_IFNAME"] = "lo"
        else:
            # NCCL in the trainer and in the engines must agree on this, and the engine's default is 0.
            env |= {"CUDA_VISIBLE_DEVICES": ",".join(map(str, share_gpus)), "NCCL_CUMEM_ENABLE": "0"}
        return env

    def torchrun(self, module: str, ranks: int, rendezvous: Sequence[str]) -> list[str]:
        """torchrun gives each worker a session of its own, so each goes through the guard, to die with torchrun.

        It restarts nothing: it would do so at once and for ever, while the launcher can tell a crash from a bad start.
        Without the `--` it would take the worker's `--run` for one of its own options.
        """
        return [
            self.python, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *rendezvous,
            "--max-restarts", "0", "--no-python", "--", self.python, str(GUARD), self.python, "-m", module,
        ]  # fmt: skip


def _queue(context: _Context) -> Process:
    return Process(
        role="queue", name="queue-0", node=context.head.name, env=context.env(), restart=Restart.ALWAYS,
        argv=(context.python, "-m", "rollout.queue", "--run", str(context.run_dir), "--bind", context.queue),
        ports={"queue": context.ports.queue},
    )  # fmt: skip


def _trainer(context: _Context, n: int, share: _Share, nodes: int) -> Process:
    ports = context.ports
    rendezvous = [
        "--nnodes", str(nodes), "--node-rank", str(n),
        "--master-addr", context.head.address, "--master-port", str(ports.trainer),
    ]  # fmt: skip
    argv = context.torchrun("trainer", share.ranks, rendezvous)
    argv += ["--run", str(context.run_dir), "--queue", context.queue, "--push-port", str(ports.push)]
    listens = {"rendezvous": ports.trainer, "push": ports.push} if n == 0 else {}
    return Process(
        role="trainer", name=f"trainer-{n}", node=share.node.name, argv=tuple(argv), env=context.env(share.gpus),
        ports=listens, gpus=share.gpus, restart=Restart.NEVER,
    )  # fmt: skip


def _rollout(context: _Context, n: int, share: _Share, first_engine: int) -> Process:
    ports = context.ports
    rendezvous = [
        "--nnodes", "1", "--node-rank", "0",
        "--master-addr", share.node.address, "--master-port", str(ports.rollout),
    ]  # fmt: skip
    argv = context.torchrun("rollout", share.ranks, rendezvous)
    argv += ["--run", str(context.run_dir), "--queue", context.queue]
    argv += ["--engine-port", str(ports.engine), "--first-engine", str(first_engine)]
    engines = {f"engine-{first_engine + k}": ports.engine + k * ENGINE_PORTS for k in range(share.ranks)}
    return Process(
        role="rollout", name=f"rollout-{n}", node=share.node.name, argv=tuple(argv), env=context.env(share.gpus),
        ports={"rendezvous": ports.rollout, **engines}, gpus=share.gpus, restart=Restart.ON_FAILURE,
    )  # fmt: skip


def _judge(context: _Context, n: int, node: Node) -> Process:
    name = f"judge-{n}"
    argv = (context.python, "-m", "reward", "--run", str(context.run_dir), "--queue", context.queue, "--name", name)
    return Process(role="judge", name=name, node=node.name, argv=argv, env=context.env(), restart=Restart.ON_FAILURE)


def describe(processes: Sequence[Process]) -> str:
    """The placement, readable: a line a process, then its command."""
    lines = []
    for process in processes:
        gpus = f"  GPUs {process.gpus[0]}-{process.gpus[-1]}" if process.gpus else ""
        ports = "  ports " + " ".join(f"{k}={v}" for k, v in process.ports.items()) if process.ports else ""
        lines.append(f"{process.name:<12} on {process.node}  restart={process.restart}{gpus}{ports}")
        lines.append(f"    {' '.join(process.argv)}")
    return "\n".join(lines)
