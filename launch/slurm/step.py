"""One process of a run as a Slurm step: the `srun` command that starts it, and the lines that it writes to the log. Pure.

A step writes two lines of its own: first `--- step 12.3 on n2`, and last `--- ended <token> <exit code>`. The exit code is read
from the last line, because srun exits with 0 for a step whose node died. A step without a last line was lost.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from conf.schema import ClusterConfig, ConfigError
from launch.placement.placement import ProcessSpec
from launch.processes.logs import END_MARK
from rollout.exit_codes import CANNOT_START
from rollout.guard import PARENT_VARIABLE, guarded

STEP_MARK = "--- step "
STEP = re.compile(re.escape(STEP_MARK) + r"(\d+\.\d+) on ")
HEARTBEAT_S = 2.0
WATCHDOG_NODES = 3
WATCHDOG = Path(__file__).with_name("watchdog.sh")

SURVIVING = ("--no-kill", "--kill-on-bad-exit=0", "--wait=0")
"""Without all three options a step ends when any node of the job dies."""

SHARING = ("--overlap", "--cpu-bind=none", "--input=none")
"""Every step sees its whole node, like a process that is started by hand. The placement assigns the GPUs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepContext:
    """What all steps of a run share."""

    cluster: ClusterConfig
    folders: Sequence[Path]  # mounted into a container; the first one is the working directory


def step_command(process: ProcessSpec, context: StepContext, token: str) -> list[str]:
    """The srun command of a process. `token` marks its end in the log, and is different at each start."""
    return [
        "srun", *SURVIVING, *SHARING, "--nodes=1", "--ntasks=1", f"--nodelist={process.node}", f"--job-name={process.name}",
        "--unbuffered", f"--chdir={context.folders[0]}", *_pyxis(context), *context.cluster.srun_args,
        "bash", "-c", _script(process, context, token),
    ]  # fmt: skip


def _script(process: ProcessSpec, context: StepContext, token: str) -> str:
    """The set-up lines, the command, and its exit code. The shell ignores SIGTERM, so that it can write the exit code."""
    ended = f'echo "{END_MARK}{token} $code"; exit $code'
    apptainer = _apptainer(context)
    parent = "" if apptainer else "$$"  # Apptainer starts the command from a process of its own
    step = f'echo "{STEP_MARK}$SLURM_JOB_ID.$SLURM_STEP_ID on $SLURMD_NODENAME"'
    lines = ["trap '' USR1", "trap : TERM INT", step, f"export {PARENT_VARIABLE}={parent}"]
    for line in context.cluster.setup:
        failed = shlex.quote(f"cluster.setup: this line failed: {line}")
        lines.append(f"{_braced(line)} || {{ echo {failed}; code={CANNOT_START}; {ended}; }}")
    # Set here and not by srun, since Slurm sets CUDA_VISIBLE_DEVICES itself.
    env = ["env", *(f"{name}={value}" for name, value in process.env.items())]
    command = [*apptainer, *env, *guarded(process.argv, python=process.argv[0])]
    return "\n".join([*lines, shlex.join(command), "code=$?", ended])


def _braced(line: str) -> str:
    """A set-up line in braces: a comment in it does not hide the next line, and its last command decides whether it failed."""
    return f"{{ {line}\n}}"


def _pyxis(context: StepContext) -> list[str]:
    if not context.cluster.container or context.cluster.container_runtime != "pyxis":
        return []
    return [
        f"--container-image={context.cluster.container}", f"--container-mounts={','.join(_mounts(context))}",
        f"--container-workdir={context.folders[0]}",
    ]  # fmt: skip


def _apptainer(context: StepContext) -> list[str]:
    if not context.cluster.container or context.cluster.container_runtime != "apptainer":
        return []
    gpus = ["--nv"] if context.cluster.device == "cuda" else []
    binds = [word for mount in _mounts(context) for word in ("--bind", mount)]
    return ["apptainer", "exec", *gpus, *binds, "--pwd", str(context.folders[0]), context.cluster.container]


def _mounts(context: StepContext) -> list[str]:
    """Mounts as FROM:TO. Both runtimes read a list with commas and cannot quote one. Raises ConfigError."""
    for folder in context.folders:
        if set(str(folder)) & set(",:"):
            raise ConfigError(f"{folder} cannot be mounted into a container, since its name holds a comma or a colon: rename it")
    own = [f"{folder}:{folder}" for folder in dict.fromkeys(context.folders)]
    return [*own, *context.cluster.container_mounts]


def _on_each(nodes: Sequence[str]) -> list[str]:
    """Options for one task on each node. Such a step is line-buffered, so that the lines of two nodes do not mix."""
    count = len(nodes)
    return [*SHARING, f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", f"--nodelist={','.join(nodes)}"]


def heartbeat_command(nodes: Sequence[str], srun_args: Sequence[str] = ()) -> list[str]:
    """A step over all nodes that prints each node's name every HEARTBEAT_S."""
    loop = f'while echo "$SLURMD_NODENAME"; do sleep {HEARTBEAT_S:g}; done'
    return ["srun", *SURVIVING, *_on_each(nodes), "--job-name=heartbeat", *srun_args, "bash", "-c", loop]


def nodes_command(job: int) -> list[str]:
    """Prints the nodes that a running job has, one per line; fails while the job does not run.

    A job with --no-kill goes on without a node that went down, and never gets it back. The state of the node itself says less:
    `sinfo` may still call it `mixed` (seen with Slurm 22.05), and a node that comes back soon is reported as healthy.
    """
    asked = 'nodes=$(squeue --noheader --states=running --jobs="$0" --format=%N)'
    return ["bash", "-c", f'{asked} && [[ $nodes ]] && scontrol show hostnames "$nodes"', str(job)]


def watchdog_command(job: int, nodes: Sequence[str], *, restarts: int, requeues: int, srun_args: Sequence[str] = ()) -> list[str]:
    """A step on a few nodes that watches the first node, where the batch script runs (watchdog.sh).

    restarts: how often the job was requeued so far, of `requeues` that it has in all.
    """
    options = [*_on_each(nodes[1 : 1 + WATCHDOG_NODES]), "--job-name=watchdog", *srun_args]
    return ["srun", *SURVIVING, *options, str(WATCHDOG), str(job), nodes[0], str(restarts), str(requeues - restarts)]


def probe_command(nodes: Sequence[str], script: Sequence[str], srun_args: Sequence[str] = ()) -> list[str]:
    """A step that runs a command once on every node."""
    return ["srun", "--kill-on-bad-exit=1", *_on_each(nodes), "--job-name=probe", *srun_args, *script]


def everywhere_command(nodes: Sequence[str], context: StepContext, argv: Sequence[str]) -> list[str]:
    """A step that runs a command once on every node, with the set-up lines and the container of the run."""
    script = " && ".join([*map(_braced, context.cluster.setup), shlex.join([*_apptainer(context), *argv])])
    srun, *options = probe_command(nodes, ["bash", "-c", script])
    return [srun, f"--chdir={context.folders[0]}", *_pyxis(context), *context.cluster.srun_args, *options]


def step_id(lines: Sequence[str]) -> str | None:
    """The id of the Slurm step, for example 12.3, read from the log lines since the process started."""
    return next((found[1] for line in lines if (found := STEP.match(line))), None)


def exit_code(lines: Sequence[str], token: str) -> int | None:
    """The exit code as in subprocess (-9 for SIGKILL); None if the step was lost before it could write it."""
    mark = f"{END_MARK}{token} "
    # The process may have left an unfinished line before the mark.
    code = next((int(line.rpartition(mark)[2]) for line in reversed(lines) if mark in line), None)
    return code if code is None or code <= 128 else 128 - code
