"""Checks of the Python environments, of the package versions, and of the settings that trainer and engines share."""

from collections.abc import Iterator, Mapping

from launch.doctor import pins
from launch.doctor.case import Case, NodeReport
from launch.doctor.finding import Check, Finding, failure, ok, skipped, worst

OLDEST_PYTHON = (3, 11)
REPORTED_PACKAGES = ("torch", "megatron-core", "transformer-engine", "sglang", "transformers")
INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def python_environments(case: Case) -> Finding:
    """Every Python of the run exists on every node and has the packages that its roles import."""

    def faults() -> Iterator[Finding]:
        for node in case.nodes:
            roles = case.roles_of.get(node.python, [])
            if tuple(int(part) for part in node.python_version.split(".")[:2]) < OLDEST_PYTHON:
                yield failure(f"{_place(node)} is Python {node.python_version}", "use Python 3.11 or newer")
            wanted = pins.of_roles(roles, gpus=case.on_gpus)
            if missing := [r.name for r in wanted if r.name not in node.packages]:
                yield failure(f"{_place(node)} ({', '.join(roles)}) lacks {', '.join(missing)}", _install(gpus=case.on_gpus))

    pythons = "; ".join(f"{python}: {', '.join(roles)}" for python, roles in case.roles_of.items())
    return worst(faults(), ok(pythons))


def versions(case: Case) -> Finding:
    """The installed versions are those that the project requires."""

    def faults() -> Iterator[Finding]:
        for node in case.nodes:
            for wanted in pins.of_roles(case.roles_of.get(node.python, []), gpus=case.on_gpus):
                found = node.packages.get(wanted.name)
                if found and not wanted.specifier.contains(found, prereleases=True):
                    yield failure(
                        f"{_place(node)} has {wanted.name} {found}", f"the project needs {wanted.name}{wanted.specifier}"
                    )

    reported = {f"{name} {node.packages[name]}" for node in case.nodes for name in REPORTED_PACKAGES if name in node.packages}
    return worst(faults(), ok(", ".join(sorted(reported))))


def same_everywhere(case: Case) -> Finding:
    """The environment is the same on every node. Different versions may compute different results."""
    if len({node.node for node in case.nodes}) < 2:
        return skipped("one node")
    for node in case.nodes:
        first = next(other for other in case.nodes if other.python == node.python)
        for name in REPORTED_PACKAGES:
            here, there = node.packages.get(name, "nothing"), first.packages.get(name, "nothing")
            if here != there:
                return failure(
                    f"{name} is {here} on {node.node} and {there} on {first.node} ({node.python})",
                    "put the environment on the shared file system, or install the same on every node",
                )
    return ok(f"on {len({n.node for n in case.nodes})} node(s)")


def nccl(case: Case) -> Finding:
    """Trainer and engines share a communicator at each push. With different NCCL versions or settings it fails or hangs."""
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
    if len({library.rpartition(" ")[2] for library in libraries}) > 1:
        places = ", ".join(f"{library} in {node.python}" for library, node in libraries.items())
        return failure(
            f"trainer and engines would load different NCCLs: {places}", "install the same NCCL into both environments"
        )
    return ok(", ".join([*libraries, *(f"{n}={next(iter(settings.values())).get(n)}" for n in names)]) or "no settings")


def _nccl_settings(case: Case, node: str, python: str, env: Mapping[str, str]) -> dict[str, str]:
    own = next((n.env for n in case.nodes if n.node == node and n.python == python), {})
    return {name: value for name, value in {**own, **env}.items() if name.startswith("NCCL_")}


def interfaces(case: Case) -> Finding:
    """Every node has the interface that the environment names. Without it a collective fails after its timeout."""

    def faults() -> Iterator[Finding]:
        for node in case.nodes:
            env = {**node.env, **{k: v for p in case.processes if p.node == node.node for k, v in p.env.items()}}
            for variable in INTERFACE_VARIABLES:
                wanted = env.get(variable, "")
                exact, prefixes = wanted.startswith("="), wanted.lstrip("=^").split(",")
                if not wanted or wanted.startswith("^"):
                    continue
                if not any(
                    name == prefix if exact else name.startswith(prefix) for name in node.interfaces for prefix in prefixes
                ):
                    yield failure(
                        f"{variable}={wanted}, but {node.node} has {', '.join(node.interfaces)}",
                        f"unset {variable}, or name an interface that every node has",
                    )

    return worst(faults(), ok(", ".join(sorted({name for node in case.nodes for name in node.interfaces}))))


def weights_and_biases(case: Case) -> Finding:
    project = case.config.trainer.wandb_project
    if not project:
        return skipped("trainer.wandb_project is not set")
    trainer = [node for node in case.nodes if "trainer" in case.roles_of.get(node.python, [])]
    if any("wandb" not in node.packages for node in trainer):
        return failure(f"trainer.wandb_project={project} needs the package of Weights & Biases", "pip install wandb")
    return ok(project)


def _install(*, gpus: bool) -> str:
    if gpus:
        return "make install-gpu, or requirements/install_cuda.sh with that Python (docs/slurm.md)"
    return "make install, or install the packages of requirements/ into that environment"


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
