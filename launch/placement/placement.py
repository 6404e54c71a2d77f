"""Placement: from a configuration and a list of nodes to the processes of a run. A pure function.

    place(config, run_dir, nodes, base_port) -> [queue-0, trainer-0, …, rollout-0, …, judge-0, …]
    place(config, run_dir, nodes, base_port, lost={"n2"}) -> the same run without that node

`local.py` and `slurm.py` start what it says. The queue server takes the first node, the trainer the first nodes, the
engines what follows; nodes beyond these are spare. What a node was to do is its *place*. When a node is lost, its place
goes to a spare; without one, the trainer's places are filled with the fleet's last nodes, and the fleet is smaller.
Whoever keeps their place keep their names, ports and ranks.
"""

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from conf.schema import ConfigError, RunConfig
from launch.placement.ports import ENGINE_PORTS, Ports
from rollout.guard import guarded


class TooFewNodes(ConfigError):
    """The nodes that are left cannot hold the run."""


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
    visible: tuple[str, ...] = ()  # what CUDA_VISIBLE_DEVICES calls them; (): by their numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    role: str  # queue | trainer | rollout | judge
    name: str  # role-n: also the name of its log
    node: str
    address: str = "127.0.0.1"  # of its node
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)  # added to the launcher's own
    ports: Mapping[str, int] = field(default_factory=dict)  # those it listens on, by purpose
    gpus: tuple[int, ...] = ()
    restart: Restart = Restart.NEVER

    @property
    def restartable(self) -> bool:
        return self.restart is not Restart.NEVER


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """What one node is to do."""

    trainer_ranks: int = 0
    first_engine: int = 0
    engines: int = 0
    engine_tp: int = 1

    @property
    def trainer_gpus(self) -> tuple[int, ...]:
        return tuple(range(self.trainer_ranks))

    @property
    def engine_gpus(self) -> tuple[int, ...]:
        return tuple(range(self.trainer_ranks, self.trainer_ranks + self.engines * self.engine_tp))


def place(
    config: RunConfig,
    run_dir: Path,
    nodes: Sequence[Node],
    base_port: int,
    *,
    lost: Collection[str] = (),
    python: str = sys.executable,
) -> list[Process]:
    """The processes of a run on those of its nodes that are not `lost`.

    Raises ConfigError when the nodes cannot hold them, TooFewNodes when those that are left cannot.
    """
    places = _places(config, nodes)
    taken = _take_places(places, nodes, lost)
    head = taken[0]
    if head is None or any(p.trainer_ranks and node is None for p, node in zip(places, taken, strict=True)):
        raise TooFewNodes(f"{', '.join(sorted(lost))} lost of {len(nodes)} nodes: too few are left for the trainer")
    fleet = [n for n, (p, node) in enumerate(zip(places, taken, strict=True)) if p.engines and node is not None]
    if not fleet:
        raise TooFewNodes(f"{', '.join(sorted(lost))} lost of {len(nodes)} nodes: none is left for the engines")
    context = _Context(
        config=config, run_dir=run_dir, ports=Ports.starting_at(base_port, config), head=head, alone=len(nodes) == 1,
        trainer_python=config.cluster.trainer_python or python, rollout_python=config.cluster.rollout_python or python,
    )  # fmt: skip
    trainers = [n for n, p in enumerate(places) if p.trainer_ranks]
    wanted_fleet = [n for n, p in enumerate(places) if p.engines]
    at = {n: node for n, node in enumerate(taken) if node is not None}
    return [
        _queue(context),
        *(_trainer(context, n, at[n], places[n], len(trainers)) for n in trainers),
        *(_rollout(context, number, at[n], places[n]) for number, n in enumerate(wanted_fleet) if n in at),
        *(_judge(context, number, at[_judge_place(number, wanted_fleet, fleet)]) for number in range(config.reward.judges)),
    ]


def _judge_place(number: int, wanted: Sequence[int], living: Sequence[int]) -> int:
    """Judges sit beside the engines, in turn; only those of a place that nobody took move."""
    own = wanted[number % len(wanted)]
    return own if own in living else living[number % len(living)]


def _take_places(places: Sequence[_Place], nodes: Sequence[Node], lost: Collection[str]) -> list[Node | None]:
    """The node at each place; None at those that nobody takes."""
    taken: list[Node | None] = [None if node.name in lost else node for node in nodes]
    is_trainers = [bool(p.trainer_ranks) for p in places]
    spare = [n for n, p in enumerate(places) if not p.trainer_ranks and not p.engines]
    fleet = [n for n, p in enumerate(places) if p.engines and not p.trainer_ranks]
    for for_trainer in (True, False):
        for n, p in enumerate(places):
            if taken[n] is not None or is_trainers[n] is not for_trainer or not (p.trainer_ranks or p.engines):
                continue
            givers = [*(fleet if for_trainer else ()), *spare]  # the last one gives
            giver = next((g for g in reversed(givers) if taken[g] is not None), None)
            if giver is not None:
                taken[n], taken[giver] = taken[giver], None
    return taken


def _places(config: RunConfig, nodes: Sequence[Node]) -> list[_Place]:
    """What each node is to do when all are there. Raises ConfigError when they cannot hold the run."""
    world = trainer_ranks(config)
    engines, engine_tp = config.rollout.engines, config.rollout.engine_tp
    if config.cluster.device == "cpu":
        # As many ranks on a node as are needed, and no more: what is left over is spare.
        every = (_divide(config, len(nodes), per_node) for per_node in range(1, world + engines * engine_tp + 1))
        return next(found for found in every if found is not None)
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
    if (places := _divide(config, len(nodes), per_node)) is None:
        raise ConfigError(
            f"{needs}, more than {len(nodes)} node(s) of {per_node} GPUs hold: lower them, add nodes, or set cluster.device=cpu"
        )
    return places


def trainer_ranks(config: RunConfig) -> int:
    trainer = config.trainer
    return trainer.tp * trainer.pp * trainer.cp * trainer.dp


def _divide(config: RunConfig, nodes: int, per_node: int) -> list[_Place] | None:
    """Trainer first, then engines, `per_node` ranks to a node; None if it does not fit."""
    trainer_left = trainer_ranks(config)
    engines, engine_tp = config.rollout.engines, config.rollout.engine_tp
    if trainer_left > per_node and trainer_left % per_node:
        return None
    places, placed = [], 0
    for _ in range(nodes):
        ranks = min(trainer_left, per_node)
        here = min(engines - placed, (per_node - ranks) // engine_tp)
        places.append(_Place(trainer_ranks=ranks, first_engine=placed, engines=here, engine_tp=engine_tp))
        trainer_left, placed = trainer_left - ranks, placed + here
    return None if trainer_left or placed < engines else places


@dataclass(frozen=True, kw_only=True, slots=True)
class _Context:
    config: RunConfig
    run_dir: Path
    ports: Ports
    head: Node
    trainer_python: str
    rollout_python: str  # of the queue server and the judges too
    alone: bool  # one node holds the whole run

    @property
    def queue(self) -> str:
        """Endpoint of the queue server."""
        return f"tcp://{self.head.address}:{self.ports.queue}"

    @property
    def has_gpus(self) -> bool:
        return self.config.cluster.device != "cpu"

    def env(self, node: Node, share_gpus: tuple[int, ...] = ()) -> dict[str, str]:
        env = {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
        # Megatron and torch warn on every rank, at import already, about what only they can change.
        env["PYTHONWARNINGS"] = "ignore::UserWarning,ignore::FutureWarning,ignore::DeprecationWarning"
        if not self.has_gpus:
            env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
            if self.alone:
                env["GLOO_SOCKET_IFNAME"] = "lo"
        else:
            # NCCL in the trainer and in the engines must agree on this, and the engine's default is 0.
            share = [node.visible[gpu] if node.visible else str(gpu) for gpu in share_gpus]
            env |= {"CUDA_VISIBLE_DEVICES": ",".join(share), "NCCL_CUMEM_ENABLE": "0"}
        return env

    def torchrun(self, python: str, module: str, ranks: int, rendezvous: Sequence[str]) -> list[str]:
        """torchrun gives each worker a session of its own, so each goes through the guard, to die with torchrun.

        It restarts nothing: it would do so at once and for ever, while the launcher can tell a crash from a bad start.
        Without the `--` it would take the worker's `--run` for one of its own options.
        """
        return [
            python, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *rendezvous,
            "--max-restarts", "0", "--no-python", "--", *guarded([python, "-m", module], python=python),
        ]  # fmt: skip


def _queue(context: _Context) -> Process:
    argv = (context.rollout_python, "-m", "rollout.queue", "--run", str(context.run_dir), "--bind", context.queue)
    return Process(
        role="queue", name="queue-0", node=context.head.name, address=context.head.address, argv=argv,
        env=context.env(context.head), ports={"queue": context.ports.queue}, restart=Restart.ALWAYS,
    )  # fmt: skip


def _trainer(context: _Context, number: int, node: Node, its: _Place, nodes: int) -> Process:
    ports = context.ports
    # The first rank is on the first node, which is never replaced: the queue server and the launcher are there too.
    rendezvous = [
        "--nnodes", str(nodes), "--node-rank", str(number),
        "--master-addr", context.head.address, "--master-port", str(ports.trainer),
    ]  # fmt: skip
    argv = context.torchrun(context.trainer_python, "trainer", its.trainer_ranks, rendezvous)
    argv += ["--run", str(context.run_dir), "--queue", context.queue, "--push-port", str(ports.push)]
    gpus = its.trainer_gpus if context.has_gpus else ()
    return Process(
        role="trainer", name=f"trainer-{number}", node=node.name, address=node.address, argv=tuple(argv),
        env=context.env(node, gpus), gpus=gpus, restart=Restart.NEVER,
        ports={"rendezvous": ports.trainer, "push": ports.push} if number == 0 else {},
    )  # fmt: skip


def _rollout(context: _Context, number: int, node: Node, its: _Place) -> Process:
    ports, first = context.ports, its.first_engine
    rendezvous = [
        "--nnodes", "1", "--node-rank", "0", "--master-addr", node.address, "--master-port", str(ports.rollout + first),
    ]  # fmt: skip
    argv = context.torchrun(context.rollout_python, "rollout", its.engines, rendezvous)
    argv += ["--run", str(context.run_dir), "--queue", context.queue]
    argv += ["--engine-port", str(ports.engine + first * ENGINE_PORTS), "--first-engine", str(first)]
    engines = {f"engine-{n}": ports.engine + n * ENGINE_PORTS for n in range(first, first + its.engines)}
    gpus = its.engine_gpus if context.has_gpus else ()
    return Process(
        role="rollout", name=f"rollout-{number}", node=node.name, address=node.address, argv=tuple(argv),
        env=context.env(node, gpus), gpus=gpus, restart=Restart.ON_FAILURE,
        ports={"rendezvous": ports.rollout + first, **engines},
    )  # fmt: skip


def _judge(context: _Context, number: int, node: Node) -> Process:
    name = f"judge-{number}"
    argv = (context.rollout_python, "-m", "reward", "--run", str(context.run_dir), "--queue", context.queue, "--name", name)
    return Process(
        role="judge",
        name=name,
        node=node.name,
        address=node.address,
        argv=argv,
        env=context.env(node),
        restart=Restart.ON_FAILURE,
    )


def describe(processes: Sequence[Process]) -> str:
    """The placement, readable: a line a process, then its command."""
    lines = []
    for process in processes:
        gpus = f"  GPUs {process.gpus[0]}-{process.gpus[-1]}" if process.gpus else ""
        ports = "  ports " + " ".join(f"{k}={v}" for k, v in process.ports.items()) if process.ports else ""
        lines.append(f"{process.name:<12} on {process.node}  restart={process.restart}{gpus}{ports}")
        lines.append(f"    {' '.join(process.argv)}")
    return "\n".join(lines)
