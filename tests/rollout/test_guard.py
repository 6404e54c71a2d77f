"""The guard, below parents that are killed at any moment. All processes hold one pipe, which ends with the last of them."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rollout.guard import PARENT_VARIABLE, guarded

GONE_S = 30.0
RANKS = 8
RANK = ["sh", "-c", "echo runs; exec sleep 120"]
TORCHRUN = f"""
import subprocess, sys, time
for _ in range({RANKS}):
    subprocess.Popen(sys.argv[1:], start_new_session=True)
    print("started", flush=True)
time.sleep(120)
"""
LATE = ["sh", "-c", 'read line < "$0"; exec "$@"']  # comes to its command when the pipe $0 has a line for it


def start(command: list[str], **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **env}, start_new_session=True)


def start_torchrun(rank: list[str]) -> subprocess.Popen[str]:
    return start(guarded([sys.executable, "-c", TORCHRUN, *rank]), **{PARENT_VARIABLE: str(os.getpid())})


def read_lines(process: subprocess.Popen[str], count: int) -> None:
    assert process.stdout is not None
    for _ in range(count):
        process.stdout.readline()


@pytest.mark.parametrize("group", [False, True])
def test_ranks_whose_torchrun_died_before_their_guards_began_do_not_run(group: bool, tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    with pipe.open("r+b", buffering=0) as lines:
        torchrun = start_torchrun([*LATE, str(pipe), *guarded(RANK, group=group)])
        read_lines(torchrun, RANKS)
        torchrun.kill()
        torchrun.wait()
        lines.write(b"\n" * RANKS)
        said = torchrun.communicate(timeout=GONE_S)[0]
    assert "runs" not in said


@pytest.mark.parametrize("seed", range(10))
def test_torchrun_that_is_killed_while_it_starts_ranks_leaves_none(seed: int) -> None:
    torchrun = start_torchrun(guarded(RANK))
    read_lines(torchrun, random.Random(seed).randint(1, RANKS))
    torchrun.kill()
    torchrun.communicate(timeout=GONE_S)


@pytest.mark.parametrize("group", [False, True])
def test_command_runs_under_a_parent_that_does_not_tell_its_process_id(group: bool) -> None:
    command = start(guarded(["echo", "runs"], group=group), **{PARENT_VARIABLE: ""})
    assert "runs" in command.communicate(timeout=GONE_S)[0]


def test_guard_with_another_parent_than_it_was_told_says_so() -> None:
    done = subprocess.run(guarded(["echo", "runs"]), env={PARENT_VARIABLE: "1"}, capture_output=True, text=True, timeout=GONE_S)
    assert done.returncode == 1 and done.stdout == ""
    assert f"the parent is gone: it was process 1 (KESTREL_PARENT), and is {os.getpid()} now" in done.stderr


def test_command_that_is_none_is_named() -> None:
    done = subprocess.run(guarded(["/no/such"]), capture_output=True, text=True, timeout=GONE_S)
    assert (done.returncode, done.stderr) == (1, "guard: cannot run /no/such: No such file or directory\n")


def test_exit_code_is_the_commands_own() -> None:
    assert subprocess.run(guarded(["sh", "-c", "exit 7"]), timeout=GONE_S).returncode == 7
    assert subprocess.run(guarded(["sh", "-c", "kill -9 $$"]), timeout=GONE_S).returncode == -signal.SIGKILL
