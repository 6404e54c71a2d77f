"""A run in simulated time: the real ledger, driven by simulated engines, judges, a trainer, and failures.

result = simulate(scenario)
"""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from launch.simulate.events import Events
from launch.simulate.scenario import Scenario
from launch.simulate.simulated_engine import SimulatedEngine
from launch.simulate.simulated_fleet import SimulatedFleet
from launch.simulate.simulated_trainer import SimulatedStep, SimulatedTrainer, SimulationError
from rollout.ledger.ledger import Ledger

SAMPLE_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """The state of the run at one time."""

    time_s: float
    running: tuple[int, ...]  # sequences per engine
    grading: int
    to_grade: int
    ready_groups: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    time_s: float
    node: int
    of: str  # trainer | rollout


@dataclass(frozen=True, kw_only=True)
class Result:
    """The outcome of a simulated run."""

    scenario: Scenario
    steps: list[SimulatedStep]  # in the order of their ends; steps that are repeated after a failure come twice
    engines: list[SimulatedEngine]
    samples: list[Sample]
    failures: list[Failure]
    long_spans: list[tuple[float, float, str]]
    long_latencies_s: list[float]
    seconds: float  # simulated
    engine_lost_tokens: int
    ledger_lost_tokens: int
    trained_tokens: int
    trainer_down_s: float
    redone_steps: int
    judge_busy_s: float
    most_waiting_for_judges: int
    cpu_s: float = field(compare=False)  # CPU time that the simulation itself took


def simulate(scenario: Scenario) -> Result:
    """Raises SimulationError when the run cannot end, with the ledger's state."""
    with _no_collections():
        return _Run(scenario).result()


class _Run:
    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._events = Events()
        self._ledger = Ledger(scenario.rules)
        self._fleet = SimulatedFleet(self._events, self._ledger, scenario.workload.stream(), scenario, self._graded)
        self._trainer = SimulatedTrainer(self._events, self._ledger, self._fleet, scenario)
        self._samples: list[Sample] = []
        self._failures: list[Failure] = []
        self._progress: tuple[float, ...] = ()
        self._progress_s = 0.0

    def result(self) -> Result:
        began_s = time.process_time()
        self._plan_failures()
        self._events.at(0.0, self._sample)
        self._trainer.begin()
        if not self._events.run():
            raise SimulationError(f"no event is left after {self._events.now_s:.0f} s: {self._standing()}")
        trainer, fleet, state = self._trainer, self._fleet, self._ledger.state
        counts = state.counts()
        return Result(
            scenario=self._scenario,
            steps=trainer.steps,
            engines=fleet.engines,
            samples=self._samples,
            failures=self._failures,
            long_spans=fleet.long_spans,
            long_latencies_s=fleet.long_latencies_s,
            seconds=self._events.now_s,
            engine_lost_tokens=fleet.lost_tokens,
            ledger_lost_tokens=state.lost_tokens.total(),
            trained_tokens=counts["trained_tokens"],
            trainer_down_s=trainer.down_s,
            redone_steps=trainer.redone_steps,
            judge_busy_s=fleet.judges.busy_s,
            most_waiting_for_judges=fleet.judges.most_waiting,
            cpu_s=time.process_time() - began_s,
        )

    def _standing(self) -> str:
        """What each part is doing, to explain a run that is stuck."""
        trainer, engines, state = self._trainer, self._fleet.engines, self._ledger.state
        alive = sum(engine.alive for engine in engines)
        return (
            f"the trainer, at version {trainer.version}, is {trainer.doing.value}; {alive} of {len(engines)} engines are alive "
            f"and {len(state.engines)} hold its weights; {state.ready} groups are ready of {len(state.untaken)} admitted; "
            f"{self._fleet.judges.waiting} completions wait for a sandbox; {len(self._failures)} nodes were lost"
        )

    def _graded(self, group: int, dropped: bool) -> None:
        if dropped:
            self._fleet.serve_again()  # another group may be admitted in its place
        else:
            self._trainer.group_ready(group)

    def _sample(self, _: int, __: object) -> None:
        judges, state = self._fleet.judges, self._ledger.state
        progress = (state.admitted, state.version, state.steps_taken, judges.busy_s, sum(e.tokens for e in self._fleet.engines))
        if progress != self._progress:
            self._progress, self._progress_s = progress, self._events.now_s
        elif self._events.now_s - self._progress_s > self._scenario.patience_s:
            raise SimulationError(
                f"there has been no progress since {self._progress_s:.0f} s of simulated time: {self._standing()}"
            )
        self._samples.append(
            Sample(
                time_s=self._events.now_s,
                running=tuple(engine.running for engine in self._fleet.engines),
                grading=judges.sandboxes - judges.free,
                to_grade=judges.waiting,
                ready_groups=judges.ready_groups - state.steps_taken * self._scenario.rules.groups_per_step,
            )
        )
        self._events.after(SAMPLE_S, self._sample)

    # Failures.

    def _plan_failures(self) -> None:
        scenario, failures = self._scenario, self._scenario.failures
        for time_s, node in failures.planned:
            self._events.at(time_s, self._lose, node)
        self._rng = np.random.default_rng(failures.seed)
        both = (scenario.rollout_nodes, scenario.trainer_nodes)
        self._nodes = max(both) if scenario.colocated else sum(both)
        if failures.node_mtbf_s:
            self._events.after(self._until_failure_s(), self._lose_any)

    def _until_failure_s(self) -> float:
        return float(self._rng.exponential(self._scenario.failures.node_mtbf_s / self._nodes))

    def _lose_any(self, number: int, _: object) -> None:
        self._events.after(self._until_failure_s(), self._lose_any)
        self._lose(number, int(self._rng.integers(self._nodes)))

    def _lose(self, _: int, node: int) -> None:
        scenario = self._scenario
        if node < scenario.rollout_nodes:
            self._failures.append(Failure(time_s=self._events.now_s, node=node, of="rollout"))
            self._fail_engines(node)
        if node >= scenario.rollout_nodes or scenario.colocated:
            self._failures.append(Failure(time_s=self._events.now_s, node=node, of="trainer"))
            self._trainer.fail()

    def _fail_engines(self, node: int) -> None:
        failures = self._scenario.failures
        lost = self._fleet.fail(node)
        if lost:
            self._events.after(failures.lease_s, self._leases_return, lost)
            self._events.after(failures.engine_restart_s, self._restart, node)

    def _leases_return(self, _: int, lost: list[tuple[str, int]]) -> None:
        for holder, count in lost:
            self._fleet.leases_return(holder, count)

    def _restart(self, _: int, node: int) -> None:
        if self._fleet.restart(node):
            self._trainer.engines_joined()


@contextmanager
def _no_collections() -> Iterator[None]:
    """Turns garbage collection off. The ledger makes millions of records and no cycles, and the search for cycles would take half
    of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
