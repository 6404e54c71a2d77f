"""Checks of the nodes: GPUs, limits, memory, clocks, ports, and the shared folder."""

from collections.abc import Callable, Iterator
from pathlib import Path

from launch.doctor.case import Case, NodeReport, inputs
from launch.doctor.finding import Check, Finding, failure, ok, skipped, warning, worst
from launch.doctor.storage import WEIGHT_BYTES
from launch.placement.node_facts import UNLIMITED
from launch.placement.ports import PORT_LIMIT
from launch.plan.reliability import host_bytes

GIB = 1024**3
OPEN_FILES = (1024, 8192)  # below the first number a run fails, below the second it may fail
USER_PROCESSES = (1024, 8192)  # threads count too
SHARED_MEMORY = {"cpu": (32 * 1024**2, 256 * 1024**2), "cuda": (512 * 1024**2, 8 * GIB)}  # for NCCL's buffers and SGLang's ranks
CPU_RANK_BYTES, CPU_ENGINE_BYTES = 0.7e9, 1.5e9  # for the debug model, in addition to the weights
OVERCOMMIT_NEVER = 2
USED_GPU_MB = 1024
SKEW_S = (2.0, 60.0)  # the limits for a warning and a failure
NO_NODE_ASKED = "no node of the run was asked"


def nodes_asked(case: Case) -> Finding:
    placed, answered = {p.node for p in case.processes}, {node.node for node in case.nodes}
    if silent := sorted(placed - answered):
        remedy = (
            "ask within the allocation: salloc …, then python -m launch.doctor …"
            if not placed & answered
            else "look at that node"
        )
        return warning(f"{len(placed & answered)} of {len(placed)} nodes were asked, {silent[0]} was not", remedy)
    return ok(", ".join(sorted(answered)))


def gpus(case: Case) -> Finding:
    """Every node sees the GPUs of its processes, and nothing else uses them."""
    if not case.on_gpus:
        return skipped("cluster.device=cpu")
    if not case.asked_any:
        return skipped(NO_NODE_ASKED)

    def faults() -> Iterator[Finding]:
        for node in case.nodes:
            needed = 1 + max((gpu for p in case.processes if p.node == node.node for gpu in p.gpus), default=-1)
            if len(node.gpus) < needed:
                yield failure(
                    f"{node.node} sees {len(node.gpus)} GPUs, but the run places processes on {needed}",
                    "ask Slurm for them (--gpus-per-node), look at nvidia-smi there, or lower trainer.* and rollout.engines",
                )
            for gpu in (g for g in node.gpus[:needed] if g["used_mb"] > USED_GPU_MB):
                yield warning(
                    f"{gpu['used_mb']} MB of a {gpu['name']} on {node.node} are in use",
                    "end that process (nvidia-smi)",
                )

    names = {gpu["name"] for node in case.nodes for gpu in node.gpus}
    if len(names) > 1:
        return warning(f"different GPUs: {', '.join(sorted(names))}", "the slowest GPU sets the pace: choose nodes of one kind")
    return worst(faults(), ok(f"{max((len(n.gpus) for n in case.nodes), default=0)} x {', '.join(names)} per node"))


def _limit(case: Case, name: str, what: str, bounds: tuple[int, int], remedy: str) -> Finding:
    def faults() -> Iterator[Finding]:
        for node in case.nodes:
            value = node.limits[name]
            if value != UNLIMITED and value < bounds[1]:
                make = failure if value < bounds[0] else warning
                yield make(f"{node.node} allows {value} {what}", remedy)

    values = [node.limits[name] for node in case.nodes]
    return worst(faults(), ok("unlimited" if UNLIMITED in values[:1] else f"{min(values, default=0)}"))


def open_files(case: Case) -> Finding:
    return _limit(case, "nofile", "open files", OPEN_FILES, "ulimit -n 65536 before the launch, or limits.conf on the nodes")


def user_processes(case: Case) -> Finding:
    remedy = "ulimit -u 32768 before the launch, or limits.conf on the nodes"
    return _limit(case, "nproc", "processes and threads", USER_PROCESSES, remedy)


def locked_memory(case: Case) -> Finding:
    """InfiniBand locks the memory from which it sends."""
    if not case.on_gpus or len({node.node for node in case.nodes}) == 1:
        return skipped("no InfiniBand between nodes is used")
    limited = [node for node in case.nodes if node.limits["memlock"] != UNLIMITED]
    if limited:
        said = f"{limited[0].node} allows {limited[0].limits['memlock'] // 1024} KiB of locked memory"
        return warning(said, "ulimit -l unlimited (Slurm: PropagateResourceLimitsExcept=MEMLOCK), or InfiniBand may not start")
    return ok("unlimited")


def shared_memory(case: Case) -> Finding:
    least, wanted = SHARED_MEMORY["cuda" if case.on_gpus else "cpu"]
    remedy = f"make /dev/shm larger than {wanted / GIB:g} GiB (docker: --shm-size, enroot: --mount tmpfs)"
    return _least(case, lambda node: node.shm_bytes, "free in /dev/shm", least, wanted, remedy)


def memory(case: Case) -> Finding:
    """A rough estimate of host memory. On GPUs a save gathers the optimizer state there, and the reference weights stay there."""
    needed = {node: _needed_bytes(case, node) for node in dict.fromkeys(p.node for p in case.processes)}
    asked = [node for node in case.nodes if node.node in needed]
    if not asked:
        return skipped(f"{NO_NODE_ASKED}; a node needs about {max(needed.values(), default=0) / 1e9:.0f} GB")
    node = min(asked, key=lambda node: node.memory_bytes - needed[node.node])
    said = f"{node.node}: {node.memory_bytes / 1e9:.1f} GB of memory available, about {needed[node.node] / 1e9:.0f} GB are needed"
    if node.memory_bytes >= needed[node.node]:
        return ok(said)
    return warning(
        said,
        "use fewer ranks per node, a larger node, or, on GPUs, a larger trainer.tp x pp, so that a save gathers less per rank",
    )


def _needed_bytes(case: Case, node: str) -> int:
    ranks = {p.role: _ranks(p.argv) for p in case.processes if p.node == node}
    if case.on_gpus:
        trainer = case.config.trainer
        has_reference = case.config.algo.kl_coef > 0 or case.config.algo.teacher_is_reference
        reference = WEIGHT_BYTES[case.config.model.dtype] if has_reference else 0
        share = case.parameters / (trainer.tp * trainer.pp)
        of_a_rank = host_bytes(share, one_bucket=not trainer.overlap_grad_reduce, reference_bytes=reference)
        return int(of_a_rank * ranks.get("trainer", 0))
    return int(CPU_RANK_BYTES * ranks.get("trainer", 0) + CPU_ENGINE_BYTES * ranks.get("rollout", 0))


def _ranks(argv: tuple[str, ...]) -> int:
    return int(argv[argv.index("--nproc-per-node") + 1]) if "--nproc-per-node" in argv else 1


def _least(case: Case, of: Callable[[NodeReport], int], what: str, least: int, wanted: int, remedy: str) -> Finding:
    if not case.nodes:
        return skipped("no node answered")
    node = min(case.nodes, key=of)
    said = f"{node.node}: {of(node) / GIB:.1f} GiB {what}"
    if of(node) < least:
        return failure(said, remedy)
    return warning(said, remedy) if of(node) < wanted else ok(said)


def overcommit(case: Case) -> Finding:
    strict = [node.node for node in case.nodes if node.overcommit == OVERCOMMIT_NEVER]
    if strict:
        return warning(
            f"vm.overcommit_memory=2 on {strict[0]}: CUDA and torch reserve far more than they use",
            "sysctl vm.overcommit_memory=0",
        )
    return ok("allowed")


def clocks(case: Case) -> Finding:
    """How far a node's clock is off at least, since each clock was read while this machine waited for the answers."""
    before_s, after_s = case.asked_s
    off = {node.node: max(before_s - node.time_s, node.time_s - after_s, 0.0) for node in case.nodes}
    node, skew_s = max(off.items(), key=lambda item: item[1], default=("", 0.0))
    remedy = f"set the clock of {node} (chronyd): otherwise logs and step times cannot be compared, and munge refuses the node"
    if skew_s > SKEW_S[0]:
        return (failure if skew_s > SKEW_S[1] else warning)(f"the clock of {node} is off by {skew_s:.1f} s", remedy)
    return ok(f"within {skew_s + after_s - before_s:.1f} s")


def ports(case: Case) -> Finding:
    for node in case.nodes:
        if node.busy_ports:
            listed = ", ".join(map(str, node.busy_ports[:4]))
            return failure(f"port {listed} is in use on {node.node}", "end that process, or choose another cluster.base_port")
    for node in case.nodes:
        if node.ephemeral_from < PORT_LIMIT:
            said = f"{node.node} assigns ports from {node.ephemeral_from} on to any process, and ports of the run are among them"
            remedy = f"sysctl net.ipv4.ip_local_port_range='32768 60999', or cluster.base_port below {node.ephemeral_from}"
            if any(port >= node.ephemeral_from for p in case.processes for port in p.ports.values()):
                return warning(said, remedy)
    used = sorted({port for process in case.processes for port in process.ports.values()})
    return ok(f"{used[0]} to {used[-1]} are free" if used else "none are used")


def shared_folder(case: Case) -> Finding:
    """Each node wrote a file beside the run's folder, and this machine can read it."""
    for node in case.nodes:
        if error := node.canary.get("error"):
            return failure(
                f"{node.node} cannot write {case.config.output}: {error}", "choose a shared folder that you own: output=…"
            )
    if case.lost_canaries:
        return failure(
            f"the file that {', '.join(case.lost_canaries)} wrote to {case.config.output} is not visible here",
            "choose a folder on the shared file system: output=…",
        )
    return ok(f"written by {len({node.node for node in case.nodes})} node(s)") if case.asked_any else skipped(NO_NODE_ASKED)


def inputs_seen(case: Case) -> Finding:
    """Every node sees model and problems under the same path."""
    for node in case.nodes:
        if node.unseen:
            return failure(f"{node.node} does not see {node.unseen[0]}", "put it on the shared file system, or correct the path")
    if absent := [path for path in inputs(case.config) if not Path(path).exists()]:
        return skipped(f"{absent[0]} is not there yet")
    return ok("every node sees model and problems") if case.asked_any else skipped(NO_NODE_ASKED)


CHECKS = (
    Check(name="nodes", run=nodes_asked),
    Check(name="GPUs", run=gpus),
    Check(name="shared folder", run=shared_folder),
    Check(name="inputs", run=inputs_seen),
    Check(name="ports", run=ports),
    Check(name="open files", run=open_files),
    Check(name="user processes", run=user_processes),
    Check(name="locked memory", run=locked_memory),
    Check(name="shared memory", run=shared_memory),
    Check(name="memory", run=memory),
    Check(name="overcommit", run=overcommit),
    Check(name="clocks", run=clocks),
)
