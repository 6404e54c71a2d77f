"""One process of a run as a Slurm step: the `srun` command that starts it, and the lines it leaves in the log. Pure.

A step writes two lines of its own, `--- step 12.3 on n2` and, last, `--- ended <token> <exit code>`: srun's exit code is 0
for a step whose node died, so the code is taken from there, and a step without that line was lost.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from conf.schema import ClusterConfig, ConfigError
from launch.placement.placement import Process
from launch.processes.logs import END_MARK
from rollout.exit_codes import CANNOT_START
from rollout.guard import PARENT_VARIABLE, guarded

STEP_MARK = "--- step "
STEP = re.compile(re.escape(STEP_MARK) + r"(\d+\.\d+) on ")
BEAT_S = 2.0
DEPUTIES = 3
DEPUTY = Path(__file__).with_name("deputy.sh")

SURVIVING = ("--no-kill", "--kill-on-bad-exit=0", "--wait=0")
"""Without all three a step, or its neighbour, ends with the first node that dies."""

SHARING = ("--overlap", "--cpu-bind=none", "--input=none")
"""Every step sees all of its node, as a process does that is started by hand; the placement shares out the GPUs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Where:
    """What all steps of a run have in common."""

    cluster: ClusterConfig
    folders: Sequence[Path]  # that a container must see: the working directory first


def step_command(process: Process, where: Where, token: str) -> list[str]:
    """The srun command of a process. `token` marks its end in the log, and is new at each start."""
    return [
        "srun", *SURVIVING, *SHARING, "--nodes=1", "--ntasks=1", f"--nodelist={process.node}", f"--job-name={process.name}",
        "--unbuffered", f"--chdir={where.folders[0]}", *_pyxis(where), *where.cluster.srun_args,
        "bash", "-c", _script(process, where, token),
    ]  # fmt: skip


def _script(process: Process, where: Where, token: str) -> str:
    """Set-up lines, the command, and how it ended. The shell itself lives through SIGTERM, to tell that."""
    ended = f'echo "{END_MARK}{token} $code"; exit $code'
    apptainer = _apptainer(where)
    parent = "" if apptainer else "$$"  # it puts a process of its own between
    step = f'echo "{STEP_MARK}$SLURM_JOB_ID.$SLURM_STEP_ID on $SLURMD_NODENAME"'
    lines = ["trap '' USR1", "trap : TERM INT", step, f"export {PARENT_VARIABLE}={parent}"]
    for line in where.cluster.setup:
        failed = shlex.quote(f"cluster.setup: this line failed: {line}")
        lines.append(f"{_whole(line)} || {{ echo {failed}; code={CANNOT_START}; {ended}; }}")
    # Set here, not by srun: Slurm sets CUDA_VISIBLE_DEVICES itself.
    env = ["env", *(f"{name}={value}" for name, value in process.env.items())]
    command = [*apptainer, *env, *guarded(process.argv, python=process.argv[0])]
    return "\n".join([*lines, shlex.join(command), "code=$?", ended])


def _whole(line: str) -> str:
    """A set-up line that ends where it ends: a comment in it hides nothing of what follows, and its last command decides."""
    return f"{{ {line}\n}}"


def _pyxis(where: Where) -> list[str]:
    if not where.cluster.container or where.cluster.container_runtime != "pyxis":
        return []
    return [
        f"--container-image={where.cluster.container}", f"--container-mounts={','.join(_mounts(where))}",
        f"--container-workdir={where.folders[0]}",
    ]  # fmt: skip


def _apptainer(where: Where) -> list[str]:
    if not where.cluster.container or where.cluster.container_runtime != "apptainer":
        return []
    gpus = ["--nv"] if where.cluster.device == "cuda" else []
    binds = [word for mount in _mounts(where) for word in ("--bind", mount)]
    return ["apptainer", "exec", *gpus, *binds, "--pwd", str(where.folders[0]), where.cluster.container]


def _mounts(where: Where) -> list[str]:
    """FROM:TO, which both runtimes take as lists with commas, without a way to quote one. Raises ConfigError."""
    for folder in where.folders:
        if set(str(folder)) & set(",:"):
            raise ConfigError(f"{folder} cannot be mounted into a container, which reads a comma or colon as its own: rename it")
    own = [f"{folder}:{folder}" for folder in dict.fromkeys(where.folders)]
    return [*own, *where.cluster.container_mounts]


def _on_each(nodes: Sequence[str]) -> list[str]:
    """One task on each node. Unlike a process's own step these are buffered by lines, or those of two nodes would mix."""
    count = len(nodes)
    return [*SHARING, f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", f"--nodelist={','.join(nodes)}"]


def beat_command(nodes: Sequence[str], srun_args: Sequence[str] = ()) -> list[str]:
    """A step over all nodes that says each one's name, again and again."""
    loop = f'while echo "$SLURMD_NODENAME"; do sleep {BEAT_S:g}; done'
    return ["srun", *SURVIVING, *_on_each(nodes), "--job-name=heartbeat", *srun_args, "bash", "-c", loop]


def nodes_command(job: int) -> list[str]:
    """Says the nodes that a running job has, one a line; fails while the job does not run.

    A job with --no-kill lives on without a node that went down, and never gets it back. What Slurm says of the node itself
    is less sure: `sinfo` may still call it `mixed` (seen with 22.05), and one that comes back soon is well again.
    """
    asked = 'nodes=$(squeue --noheader --states=running --jobs="$0" --format=%N)'
    return ["bash", "-c", f'{asked} && [[ $nodes ]] && scontrol show hostnames "$nodes"', str(job)]


def deputy_command(job: int, nodes: Sequence[str], *, restarts: int, requeues: int, srun_args: Sequence[str] = ()) -> list[str]:
    """A step on a few nodes that looks after the first one, where the batch script runs (deputy.sh).

    restarts: of the job, which tell its lives apart; it has `requeues` in all.
    """
    deputies = [*_on_each(nodes[1 : 1 + DEPUTIES]), "--job-name=deputy", *srun_args]
    return ["srun", *SURVIVING, *deputies, str(DEPUTY), str(job), nodes[0], str(restarts), str(requeues - restarts)]


def probe_command(nodes: Sequence[str], script: Sequence[str], srun_args: Sequence[str] = ()) -> list[str]:
    """A step that runs a command once on every node."""
    return ["srun", "--kill-on-bad-exit=1", *_on_each(nodes), "--job-name=probe", *srun_args, *script]


def everywhere_command(nodes: Sequence[str], where: Where, argv: Sequence[str]) -> list[str]:
    """A step that runs a command once on every node, as the run's own processes would: set-up lines, container and all."""
    script = " && ".join([*map(_whole, where.cluster.setup), shlex.join([*_apptainer(where), *argv])])
    srun, *options = probe_command(nodes, ["bash", "-c", script])
    return [srun, f"--chdir={where.folders[0]}", *_pyxis(where), *where.cluster.srun_args, *options]


def step_id(lines: Sequence[str]) -> str | None:
    """12.3, from the lines of a log since the process was started."""
    return next((found[1] for line in lines if (found := STEP.match(line))), None)


def exit_code(lines: Sequence[str], token: str) -> int | None:
    """As of subprocess, -9 for SIGKILL; None if the step was lost before it could tell."""
    mark = f"{END_MARK}{token} "
    # The process may have left a line unfinished before it.
    code = next((int(line.rpartition(mark)[2]) for line in reversed(lines) if mark in line), None)
    return code if code is None or code <= 128 else 128 - code
