"""Runs that start on one machine at the same moment get separate ports, although none of them listens yet."""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.schema import ClusterConfig, ConfigError, RolloutConfig, RunConfig
from launch.placement.port_claims import PortClaims
from launch.placement.ports import FIRST_PORT, PORT_LIMIT, SLOT_PORTS, Ports, choose_base_port, slots

PROJECT = Path(__file__).parents[3]
HOLDS = """
import sys
from launch.placement.port_claims import PortClaims
claims = PortClaims()
print(claims.take(range(int(sys.argv[1]), int(sys.argv[1]) + 1)), flush=True)
sys.stdin.read()
"""


def config(engines: int, base_port: int = 0) -> RunConfig:
    return RunConfig(rollout=RolloutConfig(engines=engines), cluster=ClusterConfig(base_port=base_port))


def choose(name: str, config: RunConfig, claims: PortClaims, job: int | None = None) -> range:
    base = choose_base_port(Path("outputs", name), config, lambda port: True, take=claims.take, job=job)
    return range(base, base + Ports.count(config))


@settings(max_examples=25, deadline=None)
@given(runs=st.lists(st.tuples(st.integers(1, 100), st.none() | st.integers(1, 100_000)), min_size=2, max_size=5))
def test_runs_of_any_size_share_no_port_although_none_of_them_listens_yet(runs: list[tuple[int, int | None]]) -> None:
    with ExitStack() as living:
        blocks = [
            choose(f"{os.getpid()}-{n}", config(engines), living.enter_context(PortClaims()), job)
            for n, (engines, job) in enumerate(runs)
        ]
    taken = [port for block in blocks for port in block]
    assert len(taken) == len(set(taken)) and min(taken) >= FIRST_PORT and max(taken) < PORT_LIMIT


def test_ports_are_the_same_again_once_the_run_is_over() -> None:
    chosen = []
    for _ in range(2):
        with PortClaims() as claims:
            chosen.append(choose(f"again-{os.getpid()}", config(2), claims))
    assert chosen[0] == chosen[1]


def test_fixed_ports_that_another_run_has_claimed_are_refused() -> None:
    with PortClaims() as one, PortClaims() as two:
        block = choose(f"fixed-{os.getpid()}", config(2), one)
        with pytest.raises(ConfigError, match=f"another run on this machine has claimed ports .* the run needs {block[0]} to"):
            choose("fixed", config(2, base_port=block[0]), two)


def test_claim_that_fails_claims_no_port() -> None:
    with PortClaims() as one, PortClaims() as two, PortClaims() as three:
        base = choose(f"nothing-{os.getpid()}", config(60), one)[0]  # a port that no other process uses
        one.__exit__(None, None, None)
        assert one.take(range(base + SLOT_PORTS, base + SLOT_PORTS + 1))
        assert not two.take(range(base, base + 2 * SLOT_PORTS))
        assert three.take(range(base, base + 1))


def test_killed_launcher_leaves_no_claim_and_its_children_hold_none() -> None:
    with PortClaims() as mine:
        base = choose(f"killed-{os.getpid()}", config(2), mine)[0]
    command = [sys.executable, "-c", HOLDS, str(base)]
    with subprocess.Popen(command, cwd=PROJECT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "True\n"
        with PortClaims() as mine:
            assert not mine.take(range(base, base + 1))
        other.kill()
        other.wait()
        with PortClaims() as mine:
            assert mine.take(range(base, base + 1))
            child = "import os; print(sum(os.path.realpath(f'/proc/self/fd/{n}').count('socket') for n in range(3, 64)))"
            assert subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, close_fds=False).stdout == "0\n"


def test_every_port_lies_in_one_slot() -> None:
    assert FIRST_PORT % SLOT_PORTS == PORT_LIMIT % SLOT_PORTS == 0
    assert [len(slots(range(128, stop))) for stop in (129, 192, 193, 256)] == [1, 1, 2, 2]
