"""The lifecycle when processes end, fail or disappear: single cases, and laws over random ones."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.schema import ClusterConfig, DataConfig, ModelConfig, RewardConfig, RolloutConfig, RunConfig, TrainerConfig
from launch.placement.placement import Node, ProcessSpec, place
from launch.processes.lifecycle import (
    EARLY_FAILURE_S,
    RESTART_DELAYS_S,
    Action,
    Lifecycle,
    Phase,
    ProcessExit,
    RequestSave,
    RestartRules,
    RunEnd,
    RunOutcome,
    Say,
    Start,
    StopProcess,
)
from rollout.exit_codes import CANNOT_START, NOT_NOW

CONFIG = RunConfig(
    model=ModelConfig(path="m"),
    data=DataConfig(train=["t"]),
    trainer=TrainerConfig(tp=2, pp=2, steps=10),
    rollout=RolloutConfig(engines=4),
    cluster=ClusterConfig(device="cpu"),
)
RULES = RestartRules(worker_restarts=3, trainer_restarts=1, steps=10, save_s=480.0)
OK, KILLED = ProcessExit(code=0, description="ended"), ProcessExit(code=-9, description="was killed")


class World:
    """Nodes that a test controls: n0 and n1 train, n2 and n3 generate, the others are spare."""

    def __init__(self, nodes: int = 5, rules: RestartRules = RULES, config: RunConfig = CONFIG) -> None:
        machines = [Node(name=f"n{n}", address=f"10.0.0.{n}") for n in range(nodes)]
        self.life = Lifecycle(lambda lost: place(config, Path("/run"), machines, 20_000, lost=lost), rules)
        self.now = 0.0
        self.heard_s = 0.0
        self.running: dict[str, ProcessSpec] = {}
        self.stopping: set[str] = set()
        self.lost: set[str] = set()
        self.said: list[str] = []
        self.told: list[str] = []
        self.end: RunEnd | None = None
        self.do(self.life.begin(self.now))

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            assert self.end is None, "something is to be done after the end"
            match action:
                case Start(process=process):
                    assert process.name not in self.running, f"{process.name} is started twice"
                    assert process.node not in self.lost
                    self.running[process.name] = process
                case StopProcess(name=name):
                    assert name in self.running
                    self.stopping.add(name)
                case RequestSave(name=name):
                    self.told.append(name)
                case Say(text=text):
                    self.said.append(text)
                case RunEnd():
                    self.end = action

    def ends(self, name: str, cause: ProcessExit = KILLED) -> None:
        del self.running[name]
        self.stopping.discard(name)
        self.do(self.life.exited(name, cause, self.now))

    def loses(self, node: str) -> None:
        self.lost.add(node)
        self.running = {name: process for name, process in self.running.items() if process.node != node}
        self.stopping &= set(self.running)
        self.do(self.life.node_lost(node, "test", self.now))

    def ticks(self, seconds: float = 1.0) -> None:
        """Time passes, and every node sends a heartbeat."""
        self.now += seconds
        self.heard_s = self.now
        self.do(self.life.tick(self.now, self.heard_s))

    def what_is_to_stop_ends(self) -> None:
        for name in sorted(self.stopping):
            self.ends(name)

    def nodes_of(self, role: str) -> list[str]:
        return [process.node for process in self.running.values() if process.role == role]


def test_everything_starts_at_once() -> None:
    world = World()
    assert list(world.running) == ["queue-0", "trainer-0", "trainer-1", "rollout-0", "rollout-1", "judge-0"]


def test_run_is_done_when_every_trainer_and_then_the_workers_have_ended() -> None:
    world = World()
    world.ends("trainer-0", OK)
    world.ticks()
    assert world.life.phase is Phase.RUNNING
    world.ends("trainer-1", OK)
    for name in ("rollout-0", "rollout-1", "judge-0"):
        world.ticks()
        assert world.end is None
        world.ends(name, OK)
    world.ticks()
    assert world.end == RunEnd(outcome=RunOutcome.DONE)


@pytest.mark.parametrize("name", ["judge-0", "rollout-1"])
def test_worker_that_leaves_too_early_starts_again(name: str) -> None:
    world = World()
    world.ends(name, OK)
    world.ticks(RULES.closing_s - 1)
    assert name not in world.running and not world.said  # the trainer may be about to end
    world.ticks(2)
    assert name in world.running
    assert world.said == [f"{name} left while the run goes on; it starts again"]


def test_failed_worker_is_restarted_alone_with_growing_delays() -> None:
    world = World()
    for back_off_s in RESTART_DELAYS_S[: RULES.worker_restarts]:
        world.ends("judge-0")
        world.ticks(back_off_s - 0.1)
        assert "judge-0" not in world.running
        world.ticks(0.2)
        assert "judge-0" in world.running
    world.ends("judge-0")
    assert world.end is not None and world.end.outcome is RunOutcome.FAILED
    assert "cluster.worker_restarts" in world.end.why


def test_process_that_fails_for_a_reason_that_may_pass_has_all_its_restarts() -> None:
    world = World()
    for _ in range(RULES.worker_restarts):
        world.ends(
            "queue-0", ProcessExit(code=NOT_NOW, description="queue-0 ended with exit code 75", log_tail="the disk is full")
        )
        world.ticks(max(RESTART_DELAYS_S) + 1)
        assert "queue-0" in world.running
    world.ends("queue-0", ProcessExit(code=NOT_NOW, description="queue-0 ended with exit code 75", log_tail="the disk is full"))
    assert world.end is not None and world.end.outcome is RunOutcome.FAILED
    assert "cluster.worker_restarts" in world.end.why and "the disk is full" in world.end.why


def test_node_on_which_the_fleet_cannot_start_is_replaced_by_a_spare_if_the_fleet_runs_on_other_nodes() -> None:
    world = World()
    world.ticks(EARLY_FAILURE_S + 1)
    world.ends("rollout-1", ProcessExit(code=CANNOT_START, description="rollout-1 ended with exit code 2", log_tail="no GPU"))
    world.ticks()
    assert sorted(world.nodes_of("rollout")) == ["n2", "n4"]
    assert "n3 is given up" in world.said[0] and "no GPU" in world.said[0]
    world.ends("rollout-1", ProcessExit(code=CANNOT_START, description="rollout-1 ended with exit code 2"))
    world.ticks()
    assert world.nodes_of("rollout") == ["n2"]
    world.ends("rollout-0", ProcessExit(code=CANNOT_START, description="rollout-0 ended with exit code 2"))
    assert world.end is not None and world.end.outcome is RunOutcome.FAILED


def test_queue_server_with_an_error_that_stays_is_not_restarted_and_says_why() -> None:
    world = World()
    why = "train.jsonl:7: problem 'a': the template refuses the system role"
    world.ends("queue-0", ProcessExit(code=CANNOT_START, description="queue-0 ended with exit code 2", log_tail=why))
    assert world.said == []
    assert world.end == RunEnd(outcome=RunOutcome.FAILED, why=f"queue-0 ended with exit code 2. {why}")


def test_fleet_that_cannot_start_anywhere_ends_the_run_at_once() -> None:
    world = World()
    world.ends("rollout-1", ProcessExit(code=CANNOT_START, description="rollout-1 ended with exit code 2"))
    assert world.end is not None and world.end.outcome is RunOutcome.FAILED


def test_lost_rollout_node_stops_no_process_on_other_nodes() -> None:
    world = World(nodes=4)
    before = dict(world.running)
    world.loses("n3")
    world.ticks()
    assert not world.stopping
    assert world.running == {name: process for name, process in before.items() if name != "rollout-1"}


def test_spare_takes_the_place_of_a_lost_rollout_node() -> None:
    world = World(nodes=5)
    before = world.running["rollout-0"]
    world.loses("n2")
    world.ticks()
    assert world.running["rollout-0"] == replace(before, node="n4", address="10.0.0.4", argv=world.running["rollout-0"].argv)
    assert world.nodes_of("judge") == ["n4"]
    assert not world.stopping


def test_lost_trainer_node_stops_the_whole_trainer_and_a_spare_takes_its_place() -> None:
    world = World(nodes=5)
    world.loses("n1")
    assert world.stopping == {"trainer-0"}
    world.ticks()
    assert "trainer-1" not in world.running  # the other trainer process still runs
    world.what_is_to_stop_ends()
    world.ticks()
    assert world.nodes_of("trainer") == ["n0", "n4"]
    assert world.nodes_of("rollout") == ["n2", "n3"]


def test_without_a_spare_the_last_rollout_node_is_emptied_for_the_trainer() -> None:
    world = World(nodes=4)
    world.loses("n1")
    world.what_is_to_stop_ends()
    world.ticks()
    assert world.stopping == {"rollout-1"}
    assert not world.nodes_of("trainer")
    world.what_is_to_stop_ends()
    world.ticks()
    assert world.nodes_of("trainer") == ["n0", "n3"]
    assert world.nodes_of("rollout") == ["n2"]


def test_run_with_too_few_nodes_left_ends_as_such() -> None:
    world = World(nodes=4)
    for node in ("n1", "n2"):
        world.loses(node)
        for _ in range(3):
            world.what_is_to_stop_ends()
            if world.end is None:
                world.ticks()
    assert world.end is not None and world.end.outcome is RunOutcome.TOO_FEW_NODES
    assert "of 4 nodes n1, n2 are lost" in world.end.why


def test_trainer_failure_is_final_only_after_a_heartbeat_of_every_node() -> None:
    world = World(nodes=5, rules=replace(RULES, trainer_restarts=0))
    world.now = 10.0
    world.ends("trainer-0", ProcessExit(code=1, description="trainer-0 ended with exit code 1"))
    world.what_is_to_stop_ends()
    world.do(world.life.tick(11.0, heartbeat_s=9.0))
    assert world.end is None  # the node of the other trainer process may be lost
    world.loses("n1")
    world.ticks()
    assert world.end is None
    assert world.nodes_of("trainer") == ["n0", "n4"]


def test_restarts_of_the_trainer_without_a_new_checkpoint_are_bounded() -> None:
    world = World()

    def fails() -> None:
        world.ends("trainer-0", ProcessExit(code=1, description="trainer-0 ended with exit code 1", log_tail="boom"))
        world.what_is_to_stop_ends()
        world.ticks()

    fails()
    assert world.nodes_of("trainer") == ["n0", "n1"]
    world.life.checkpointed(4)
    fails()
    assert world.nodes_of("trainer") == ["n0", "n1"]
    assert "from the checkpoint of version 4" in world.said[-1]
    fails()
    assert world.end is not None and world.end.outcome is RunOutcome.FAILED
    assert (
        "1 restarts without a new checkpoint (cluster.trainer_restarts): trainer-0 ended with exit code 1. boom" in world.end.why
    )


def test_failure_of_the_trainer_counts_once_however_long_the_restart_takes() -> None:
    world = World(config=replace(CONFIG, reward=RewardConfig(judges=2)))
    world.ticks(EARLY_FAILURE_S + 1)
    world.ends("rollout-1", ProcessExit(code=CANNOT_START, description="rollout-1 ended with exit code 2"))
    assert world.stopping == {"judge-1"}  # on the node that is given up
    world.ends("trainer-0", ProcessExit(code=1, description="trainer-0 ended with exit code 1"))
    world.ends("trainer-1")
    for _ in range(5):
        world.ticks()
    assert world.end is None and world.nodes_of("trainer") == []
    world.what_is_to_stop_ends()
    world.ticks()
    assert world.nodes_of("trainer") == ["n0", "n1"]


def test_trainer_that_cannot_start_is_not_restarted() -> None:
    world = World()
    world.ends("trainer-0", ProcessExit(code=CANNOT_START, description="trainer-0 ended with exit code 2"))
    world.what_is_to_stop_ends()
    world.ticks()
    assert world.end is not None and world.end.outcome is RunOutcome.FAILED


@pytest.mark.parametrize(("version", "outcome"), [(7, RunOutcome.SAVED), (10, RunOutcome.DONE)])
def test_run_that_is_asked_to_save_ends_when_the_trainer_has_saved(version: int, outcome: RunOutcome) -> None:
    world = World()
    world.do(world.life.save(world.now))
    assert world.told == ["trainer-0", "trainer-1"]
    world.ticks(11.0)
    assert len(world.told) == 4  # a process that was only starting missed it
    world.life.checkpointed(version)
    world.ends("trainer-0", OK)
    world.ends("trainer-1", OK)
    world.ticks(RULES.closing_s + 1)
    assert world.end is not None and world.end.outcome is outcome


def test_trainer_that_does_not_save_in_time_is_not_waited_for() -> None:
    world = World()
    world.do(world.life.save(world.now))
    world.ticks(RULES.save_s + 1)
    assert world.end is not None and world.end.outcome is RunOutcome.SAVED


@pytest.mark.parametrize("lost", [["n2"], ["n2", "n3"]])
def test_fleet_that_is_lost_while_the_trainer_saves_does_not_end_the_save(lost: list[str]) -> None:
    world = World(nodes=4)
    world.do(world.life.save(world.now))
    for node in lost:
        world.loses(node)
        world.ticks()
    assert world.end is None and set(world.nodes_of("trainer")) == {"n0", "n1"}
    assert not set(lost) & {process.node for process in world.running.values()}
    world.life.checkpointed(7)
    world.ends("trainer-0", OK)
    world.ends("trainer-1", OK)
    assert world.end is not None and world.end.outcome is RunOutcome.SAVED


@pytest.mark.parametrize("name", ["rollout-0", "judge-0", "queue-0"])
def test_worker_that_cannot_start_while_the_trainer_saves_does_not_end_the_save(name: str) -> None:
    world = World(nodes=4)
    world.do(world.life.save(world.now))
    world.ends(name, ProcessExit(code=CANNOT_START, description=f"{name} ended with exit code 2"))
    world.ticks(EARLY_FAILURE_S)
    assert world.end is None and name not in world.running
    world.loses("n1")
    assert world.end is not None and world.end.outcome is RunOutcome.SAVED


@pytest.mark.parametrize("code", [CANNOT_START, 1])
@pytest.mark.parametrize("heard", [True, False])
def test_request_to_save_does_not_hide_that_the_run_failed(code: int, heard: bool) -> None:
    world = World(rules=replace(RULES, trainer_restarts=0))
    world.ends("trainer-0", ProcessExit(code=code, description=f"trainer-0 ended with exit code {code}"))
    world.do(world.life.save(world.now))
    assert world.end is None
    if heard:
        world.what_is_to_stop_ends()
        world.ticks()
    else:  # it is not known whether a node was the reason, and the time is over
        world.do(world.life.tick(world.now + RULES.save_s + 1, world.heard_s - 1))
    assert world.end is not None and world.end.outcome is RunOutcome.FAILED


@pytest.mark.parametrize("for_node", [True, False])
def test_trainer_that_is_being_restarted_when_it_should_save_does_not_start(for_node: bool) -> None:
    world = World()
    if for_node:
        world.loses("n1")
    else:
        world.ends("trainer-0", KILLED)
    world.do(world.life.save(world.now))
    world.what_is_to_stop_ends()
    world.ticks()
    assert world.nodes_of("trainer") == []
    assert world.end is not None and world.end.outcome is RunOutcome.SAVED


@pytest.mark.parametrize(("left_s", "save_s"), [(10_000.0, RULES.save_s), (300.0, 240.0), (60.0, 30.0)])
def test_save_has_no_more_time_than_the_job(left_s: float, save_s: float) -> None:
    world = World()
    world.do(world.life.save(world.now, left_s))
    world.ticks(save_s - 1)
    assert world.end is None
    world.ticks(2)
    assert world.end is not None and world.end.outcome is RunOutcome.SAVED and f"within {save_s:.0f} s" in world.end.why


EVENT = st.sampled_from(["crash", "stop", "node", "tick", "save", "progress"])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(EVENT, st.integers(0, 20)), max_size=40))
def test_whatever_happens_no_process_runs_twice_and_the_trainer_is_complete_or_stopped(events: list[tuple[str, int]]) -> None:
    """World.do checks the other half: no process starts twice, on a lost node, or after the end."""
    world = World(nodes=6)
    for kind, n in events:
        if world.end is not None:
            return
        match kind:
            case "crash" if world.running:
                world.ends(sorted(world.running)[n % len(world.running)])
            case "stop" if world.stopping:
                world.ends(sorted(world.stopping)[n % len(world.stopping)])
            case "node" if left := [f"n{k}" for k in range(1, 6) if f"n{k}" not in world.lost]:
                world.loses(left[n % len(left)])
            case "tick":
                world.ticks()
            case "save" if n == 0:
                world.do(world.life.save(world.now))
            case "progress":
                world.life.checkpointed(n // 2)
    for _ in range(60):
        if world.end is None:
            world.what_is_to_stop_ends()
            world.ticks()
    if world.end is None and world.life.phase is Phase.RUNNING:
        assert {process.name: process for process in world.life.processes}.items() >= world.running.items()
        trainers = [process for process in world.running.values() if process.role == "trainer"]
        assert len(trainers) == 2 and not {process.node for process in trainers} & world.lost
        assert len(world.nodes_of("queue")) == 1 and world.nodes_of("rollout")
    assert world.end is not None or world.life.phase is not Phase.RESTARTING
