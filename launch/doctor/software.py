"""Checks of the Python environments, the versions in them, and the settings that trainer and engines must share."""

from collections.abc import Iterator, Mapping, Sequence

from launch.doctor import pins
from launch.doctor.case import Case, NodeReport
from launch.doctor.finding import Check, Finding, failure, ok, skipped, worst

OLDEST_PYTHON = (3, 11)
SHOWN = ("torch", "megatron-core", "transformer-engine", "sglang", "transformers")
INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def python_environments(case: Case) -> Finding:
    """Every Python of the run is there on every node and knows the packages that its roles import."""

    def faults() -> Iterator[Finding]:
        for node in case.nodes:
            roles = case.roles_of.get(node.python, [])
            if tuple(int(part) for part in node.python_version.split(".")[:2]) < OLDEST_PYTHON:
                yield failure(f"{_place(node)} is Python {node.python_version}", "use Python 3.11 or newer")
            wanted = pins.of_roles(roles, gpus=case.on_gpus)
            if missing := [r.name for r in wanted if r.name not in node.packages]:
                yield failure(
                    f"{_place(node)} ({', '.join(roles)}) lacks {', '.join(missing)}", _install(roles, gpus=case.on_gpus)
                )

    told = "; ".join(f"{python}: {', '.join(roles)}" for python, roles in case.roles_of.items())
    return worst(faults(), ok(told))


def versions(case: Case) -> Finding:
    """What is installed is what the project is pinned to."""

    def faults() -> Iterator[Finding]:
        for node in case.nodes:
            for wanted in pins.of_roles(case.roles_of.get(node.python, []), gpus=case.on_gpus):
                found = node.packages.get(wanted.name)
                if found and not wanted.specifier.contains(found, prereleases=True):
                    yield failure(
                        f"{_place(node)} has {wanted.name} {found}", f"the project needs {wanted.name}{wanted.specifier}"
                    )

    shown = {f"{name} {node.packages[name]}" for node in case.nodes for name in SHOWN if name in node.packages}
    return worst(faults(), ok(", ".join(sorted(shown))))


def same_everywhere(case: Case) -> Finding:
    """An environment that differs from node to node computes differently from node to node."""
    if len({node.node for node in case.nodes}) < 2:
        return skipped("one node")
    for node in case.nodes:
        first = next(other for other in case.nodes if other.python == node.python)
        for name in SHOWN:
            here, there = node.packages.get(name, "nothing"), first.packages.get(name, "nothing")
            if here != there:
                return failure(
                    f"{name} is {here} on {node.node} and {there} on {first.node} ({node.python})",
                    "put the environment on the shared file system, or install the same on every node",
                )
    return ok(f"on {len({n.node for n in case.nodes})} node(s)")


def nccl(case: Case) -> Finding:
    """Trainer and engines are in one communicator at each push: same NCCL, same settings, or it fails or hangs."""
    settings = {
        p.name: _nccl_settings(case, p.node, p.argv[0], p.env) for p in case.processes if p.role in ("trainer", "rollout")
    }
    names = sorted({name for found in settings.values() for name in found})
    for name in names:
        values = {process: found.get(name, "unset") for process, found in settings.items()}
        if len(set(values.values())) > 1:
            (one, a), (other, b) = (
                next(iter(values.items())),
                next(i for i in values.items() if i[1] != next(iter(values.values()))),
            )
            return failure(
                f"{name} is {a} for {one} and {b} for {other}", "set it the same for trainer and engines, on every node"
            )
    if not case.on_gpus:
        return skipped("no GPUs: gloo, not NCCL, carries the weights")
    libraries = {
        f"{name} {node.packages[name]}": node for node in case.nodes for name in pins.NCCL_PACKAGES if name in node.packages
    }
    if len({said.rpartition(" ")[2] for said in libraries}) > 1:
        places = ", ".join(f"{said} in {node.python}" for said, node in libraries.items())
        return failure(
            f"trainer and engines would load different NCCLs: {places}", "install the same NCCL into both environments"
        )
    return ok(", ".join([*libraries, *(f"{n}={next(iter(settings.values())).get(n)}" for n in names)]) or "no settings")


def _nccl_settings(case: Case, node: str, python: str, env: Mapping[str, str]) -> dict[str, str]:
    own = next((n.env for n in case.nodes if n.node == node and n.python == python), {})
    return {name: value for name, value in {**own, **env}.items() if name.startswith("NCCL_")}


def interfaces(case: Case) -> Finding:
    """A collective told to use an interface that a node lacks fails after its time-out."""

    def faults() -> Iterator[Finding]:
        for node in case.nodes:
            given = {**node.env, **{k: v for p in case.processes if p.node == node.node for k, v in p.env.items()}}
            for variable in INTERFACE_VARIABLES:
                wanted = given.get(variable, "")
                exact, prefixes = wanted.startswith("="), wanted.lstrip("=^").split(",")
                if not wanted or wanted.startswith("^"):
                    continue
                if not any(
                    name == prefix if exact else name.startswith(prefix) for name in node.interfaces for prefix in prefixes
                ):
                    has = ", ".join(node.interfaces)
                    yield failure(
                        f"{variable}={wanted}, but {node.node} has {has}", f"unset {variable}, or name one that every node has"
                    )

    return worst(faults(), ok(", ".join(sorted({name for node in case.nodes for name in node.interfaces}))))


def weights_and_biases(case: Case) -> Finding:
    project = case.config.trainer.wandb_project
    if not project:
        return skipped("not asked for")
    trainer = [node for node in case.nodes if "trainer" in case.roles_of.get(node.python, [])]
    if any("wandb" not in node.packages for node in trainer):
        return failure(f"trainer.wandb_project={project}: needs Weights & Biases", "pip install wandb")
    return ok(project)


def _install(roles: Sequence[str], *, gpus: bool) -> str:
    """The pinned environment is one for CPUs; on GPUs packages come built for the driver and CUDA that are there."""
    if not gpus:
        return "make install, or install what requirements/ lists into that environment"
    extras = ",".join(pins.EXTRA_OF_ROLE[role] for role in roles if role in pins.EXTRA_OF_ROLE)
    return f"pip install -e '.{f'[{extras}]' if extras else ''}' into that environment (docs/slurm.md)"


def _place(node: NodeReport) -> str:
    return f"{node.python} on {node.node}"


CHECKS = (
    Check(name="python environments", run=python_environments),
    Check(name="versions", run=versions),
    Check(name="same everywhere", run=same_everywhere),
    Check(name="NCCL", run=nccl),
    Check(name="interfaces", run=interfaces),
    Check(name="Weights & Biases", run=weights_and_biases),
)
