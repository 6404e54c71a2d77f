"""Placement: which process of a run goes to which node, with which GPUs and ports. A pure function.

    place(config, run_dir, nodes, base_port) -> [queue-0, trainer-0, …, rollout-0, …, judge-0, …]
    place(config, run_dir, nodes, base_port, lost={"n2"}) -> the same run without that node

The backends (processes/local.py, slurm/backend.py) start these processes. The queue server runs on the first node, the trainer on
the first nodes, and the engines on the nodes after them; further nodes are spare. What a node has to run is its *share*. When a
node is lost, a spare node takes its share. Without a spare, the last nodes of the fleet take the trainer's shares, and the fleet
becomes smaller. A process whose share keeps its node keeps its name, ports and ranks.
"""

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from conf.schema import ConfigError, RunConfig
from conf.shapes import layout_of
from launch.placement.ports import ENGINE_PORTS, Ports
from rollout.guard import guarded
from rollout.servers import Server, servers


class TooFewNodes(ConfigError):
    """The nodes that are left are too few for the run."""


class Restart(StrEnum):
    """When a process that exits before the end of the run starts again."""

    NEVER = "never"  # the lifecycle decides: the trainer starts again as a whole
    ON_FAILURE = "on_failure"  # not after exit code 0, which means that it was told to leave
    ALWAYS = "always"


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    name: str
    address: str  # at which the other nodes reach it
    gpus: int = 0
    visible: tuple[str, ...] = ()  # the names of the GPUs in CUDA_VISIBLE_DEVICES; (): their numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessSpec:
    role: str  # queue | trainer | rollout | judge
    name: str  # role-number; its log has the same name
    node: str
    address: str = "127.0.0.1"  # the address of its node
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)  # added to the launcher's environment
    ports: Mapping[str, int] = field(default_factory=dict)  # the ports on which it listens, by purpose
    gpus: tuple[int, ...] = ()
    restart: Restart = Restart.NEVER

    @property
    def restartable(self) -> bool:
        return self.restart is not Restart.NEVER


@dataclass(frozen=True, kw_only=True, slots=True)
class _Share:
    """What one node has to run."""

    trainer_ranks: int = 0
    first_engine: int = 0
    servers: Sequence[Server] = ()  # what a rollout process serves: engines, a teacher, a judge model

    @property
    def trainer_gpus(self) -> tuple[int, ...]:
        return tuple(range(self.trainer_ranks))

    @property
    def engine_gpus(self) -> tuple[int, ...]:
        return tuple(range(self.trainer_ranks, self.trainer_ranks + _gpus(self.servers)))


def place(
    config: RunConfig,
    run_dir: Path,
    nodes: Sequence[Node],
    base_port: int,
    *,
    lost: Collection[str] = (),
    python: str = sys.executable,
) -> list[ProcessSpec]:
    """The processes of a run, on the nodes that are not `lost`.

    Raises ConfigError when the run does not fit on its nodes, TooFewNodes when it does not fit on the nodes that are left.
    """
    shares = _shares(config, nodes)
    assigned = {n: node for n, node in enumerate(_assign(shares, nodes, lost)) if node is not None}
    trainers = [n for n, share in enumerate(shares) if share.trainer_ranks]
    fleet = [n for n, share in enumerate(shares) if share.servers]
    if any(n not in assigned for n in (0, *trainers)):
        raise TooFewNodes(f"of {len(nodes)} nodes {', '.join(sorted(lost))} are lost: too few are left for the trainer")
    if not (living := [n for n in fleet if n in assigned]):
        raise TooFewNodes(f"of {len(nodes)} nodes {', '.join(sorted(lost))} are lost: none is left for the engines")
    context = _Context(
        config=config, run_dir=run_dir, ports=Ports.starting_at(base_port, config), head=assigned[0], single_node=len(nodes) == 1,
        trainer_python=config.cluster.trainer_python or python, rollout_python=config.cluster.rollout_python or python,
    )  # fmt: skip
    return [
        _queue(context),
        *(_trainer(context, n, assigned[n], shares[n], len(trainers)) for n in trainers),
        *(_rollout(context, number, assigned[n], shares[n]) for number, n in enumerate(fleet) if n in assigned),
        *(_judge(context, number, assigned[_beside(number, fleet, living)]) for number in range(config.reward.judges)),
    ]


def _beside(number: int, fleet: Sequence[int], living: Sequence[int]) -> int:
    """Judges run beside the engines, in turn. Only a judge whose node is lost moves."""
    own = fleet[number % len(fleet)]
    return own if own in living else living[number % len(living)]


def _assign(shares: Sequence[_Share], nodes: Sequence[Node], lost: Collection[str]) -> list[Node | None]:
    """The node that runs each share; None for a share that no node runs."""
    assigned: list[Node | None] = [None if node.name in lost else node for node in nodes]
    trainer = [n for n, share in enumerate(shares) if share.trainer_ranks]
    fleet = [n for n, share in enumerate(shares) if share.servers and not share.trainer_ranks]
    spare = [n for n, share in enumerate(shares) if not share.trainer_ranks and not share.servers]
    for wanting, givers in ((trainer, [*fleet, *spare]), (fleet, spare)):
        for n in wanting:
            giver = next((g for g in reversed(givers) if assigned[g] is not None), None)
            if assigned[n] is None and giver is not None:
                assigned[n], assigned[giver] = assigned[giver], None
    return assigned


def _shares(config: RunConfig, nodes: Sequence[Node]) -> list[_Share]:
    """What each node has to run when all nodes are there. Raises ConfigError when the run does not fit."""
    world, engines = trainer_ranks(config), config.rollout.engines * config.rollout.engine_tp
    if config.cluster.device == "cpu":
        # The smallest number of ranks per node with which the run fits.
        every = (_divide(config, len(nodes), per_node) for per_node in range(1, world + _gpus(servers(config)) + 1))
        return next(found for found in every if found is not None)
    needs = f"the trainer needs {world} GPUs (trainer.tp x pp x cp x dp) and the engines {engines} (rollout.engines x engine_tp)"
    if others := [f"the {server.name} {server.tp}" for server in servers(config) if server.frozen]:
        needs += f" and {' and '.join(others)}"
    per_node = nodes[0].gpus
    if per_node == 0 or any(node.gpus != per_node for node in nodes):
        raise ConfigError(
            f"{needs}, but the nodes have {[n.gpus for n in nodes]} GPUs: set cluster.gpus_per_node or cluster.device=cpu"
        )
    if world > per_node and world % per_node:
        raise ConfigError(f"{needs}: a trainer larger than a node must fill its nodes of {per_node} GPUs")
    if (shares := _divide(config, len(nodes), per_node)) is None:
        raise ConfigError(
            f"{needs}, which do not fit on {len(nodes)} node(s) of {per_node} GPUs: lower them, add nodes, "
            "or set cluster.device=cpu"
        )
    return shares


def trainer_ranks(config: RunConfig) -> int:
    return layout_of(config.trainer).ranks_per_replica * config.trainer.dp


def _divide(config: RunConfig, nodes: int, per_node: int) -> list[_Share] | None:
    """Trainer ranks first, then engines, `per_node` ranks on each node; None if the run does not fit."""
    trainer_left = trainer_ranks(config)
    to_place = list(servers(config))
    if trainer_left > per_node and trainer_left % per_node:
        return None
    shares, placed = [], 0
    for _ in range(nodes):
        ranks = min(trainer_left, per_node)
        ends = [n for n in range(placed, len(to_place) + 1) if _gpus(to_place[placed:n]) <= per_node - ranks]
        shares.append(_Share(trainer_ranks=ranks, first_engine=placed, servers=to_place[placed : ends[-1]]))
        trainer_left, placed = trainer_left - ranks, ends[-1]
    return None if trainer_left or placed < len(to_place) else shares


def _gpus(some: Sequence[Server]) -> int:
    return sum(server.tp for server in some)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Context:
    config: RunConfig
    run_dir: Path
    ports: Ports
    head: Node
    trainer_python: str
    rollout_python: str  # also for the queue server and the judges
    single_node: bool

    @property
    def queue(self) -> str:
        """The endpoint of the queue server."""
        return f"tcp://{self.head.address}:{self.ports.queue}"

    @property
    def has_gpus(self) -> bool:
        return self.config.cluster.device != "cpu"

    def env(self, node: Node, share_gpus: tuple[int, ...] = ()) -> dict[str, str]:
        env = {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
        # Megatron and torch print warnings on every rank at import, which the user cannot act on.
        env["PYTHONWARNINGS"] = "ignore::UserWarning,ignore::FutureWarning,ignore::DeprecationWarning"
        if not self.has_gpus:
            env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        else:
            # These NCCL settings must be the same in trainer and engines, and 0 is SGLang's default.
            share = [node.visible[gpu] if node.visible else str(gpu) for gpu in share_gpus]
            env |= {"CUDA_VISIBLE_DEVICES": ",".join(share), "NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
        if self.single_node:  # no other machine uses these ports
            env |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        return env

    def torchrun(self, python: str, module: str, ranks: int, rendezvous: Sequence[str]) -> list[str]:
        """The torchrun command. Each worker has a session of its own, so the guard makes it end together with torchrun.

        torchrun must not restart workers: it would do so without a limit, and the launcher knows which failures are final.
        Without the `--` torchrun would read the worker's `--run` as its own option.
        """
        return [
            python, "-m", "rollout.patched.torchrun", "--nproc-per-node", str(ranks), *rendezvous,
            "--max-restarts", "0", "--no-python", "--", *guarded([python, "-m", module], python=python),
        ]  # fmt: skip


def _queue(context: _Context) -> ProcessSpec:
    argv = (context.rollout_python, "-m", "rollout.queue", "--run", str(context.run_dir), "--bind", context.queue)
    return ProcessSpec(
        role="queue", name="queue-0", node=context.head.name, address=context.head.address, argv=argv,
        env=context.env(context.head), ports={"queue": context.ports.queue}, restart=Restart.ALWAYS,
    )  # fmt: skip


def _trainer(context: _Context, number: int, node: Node, share: _Share, nodes: int) -> ProcessSpec:
    ports = context.ports
    # Rank 0 is on the first node, which is never replaced, since the queue server and the launcher run there too.
    rendezvous = [
        "--nnodes", str(nodes), "--node-rank", str(number),
        "--master-addr", context.head.address, "--master-port", str(ports.trainer),
    ]  # fmt: skip
    argv = context.torchrun(context.trainer_python, "trainer", share.trainer_ranks, rendezvous)
    argv += ["--run", str(context.run_dir), "--queue", context.queue, "--push-port", str(ports.push)]
    gpus = share.trainer_gpus if context.has_gpus else ()
    return ProcessSpec(
        role="trainer", name=f"trainer-{number}", node=node.name, address=node.address, argv=tuple(argv),
        env=context.env(node, gpus), gpus=gpus, restart=Restart.NEVER,
        ports={"rendezvous": ports.trainer, "push": ports.push} if number == 0 else {},
    )  # fmt: skip


def _rollout(context: _Context, number: int, node: Node, share: _Share) -> ProcessSpec:
    ports, first = context.ports, share.first_engine
    rendezvous = [
        "--nnodes", "1", "--node-rank", "0", "--master-addr", node.address, "--master-port", str(ports.rollout + first),
    ]  # fmt: skip
    argv = context.torchrun(context.rollout_python, "rollout", len(share.servers), rendezvous)
    argv += ["--run", str(context.run_dir), "--queue", context.queue]
    argv += ["--engine-port", str(ports.engine + first * ENGINE_PORTS), "--first-engine", str(first)]
    engines = {server.name: ports.engine + n * ENGINE_PORTS for n, server in enumerate(share.servers, first)}
    gpus = share.engine_gpus if context.has_gpus else ()
    return ProcessSpec(
        role="rollout", name=f"rollout-{number}", node=node.name, address=node.address, argv=tuple(argv),
        env=context.env(node, gpus), gpus=gpus, restart=Restart.ON_FAILURE,
        ports={"rendezvous": ports.rollout + first, **engines},
    )  # fmt: skip


def _judge(context: _Context, number: int, node: Node) -> ProcessSpec:
    name = f"judge-{number}"
    argv = (context.rollout_python, "-m", "reward", "--run", str(context.run_dir), "--queue", context.queue, "--name", name)
    return ProcessSpec(
        role="judge",
        name=name,
        node=node.name,
        address=node.address,
        argv=argv,
        env=context.env(node),
        restart=Restart.ON_FAILURE,
    )


def describe(processes: Sequence[ProcessSpec]) -> str:
    """The placement for people to read: two lines per process, the second one its command."""
    lines = []
    for process in processes:
        gpus = f"  GPUs {process.gpus[0]}-{process.gpus[-1]}" if process.gpus else ""
        ports = "  ports " + " ".join(f"{k}={v}" for k, v in process.ports.items()) if process.ports else ""
        lines.append(f"{process.name:<12} on {process.node}  restart={process.restart}{gpus}{ports}")
        lines.append(f"    {' '.join(process.argv)}")
    return "\n".join(lines)
