"""The trainer of a run: take, log-probs, train, push, advance, checkpoint; and back to a checkpoint when it fails."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from launch.simulate.events import Events
from launch.simulate.scenario import PushMode, Scenario
from launch.simulate.segments import SimulatedSegment
from launch.simulate.simulated_fleet import SimulatedFleet
from rollout.ledger.ledger import Ledger


class SimulationError(RuntimeError):
    """The simulated run cannot go on, or broke the contract."""


class Doing(Enum):
    WAITING = "waiting for a batch"
    TRAINING = "training"
    DRAINING = "waiting for the fleet to be ready for the weights"
    PUSHING = "pushing"
    DOWN = "down"


@dataclass(kw_only=True, slots=True)
class SimulatedStep:
    """One RL step, as the metrics of a real run tell it."""

    step: int  # the version that it led to
    begin_s: float
    wait_s: float = 0.0
    old_logprob_s: float = 0.0
    ref_logprob_s: float = 0.0
    train_s: float = 0.0
    drain_s: float = 0.0  # the push waits for the fleet
    push_s: float = 0.0
    checkpoint_s: float = 0.0
    end_s: float = 0.0
    trained_tokens: int = 0  # completions
    ready_groups: int = 0  # when its batch was taken, and not in it
    untaken_groups: int = 0
    lag_tokens: Counter[int] = field(default_factory=Counter)  # tokens by lag, in versions
    engine_idle_s: float = 0.0  # over all engines, no request in flight
    generated_tokens: float = 0.0  # by all engines

    @property
    def step_s(self) -> float:
        return self.end_s - self.begin_s


class SimulatedTrainer:
    def __init__(self, events: Events, ledger: Ledger, fleet: SimulatedFleet, scenario: Scenario) -> None:
        self._events, self._ledger, self._fleet, self._scenario = events, ledger, fleet, scenario
        self._speeds = scenario.trainer
        self.version = 0
        self.durable_version = 0
        self.steps: list[SimulatedStep] = []
        self.failures = 0
        self.redone_steps = 0
        self.down_s = 0.0
        self.doing = Doing.DOWN
        self._since_s = 0.0
        self._awaited = -1  # the oldest group that was not ready; -1: none, as more must be admitted first
        self._life = 0  # events of an earlier life mean nothing
        self._step = SimulatedStep(step=1, begin_s=0.0)
        self._before = (0.0, 0.0)  # idle seconds and tokens of all engines when the step began

    def begin(self) -> None:
        """Starts with the weights of `version`: pushes them to the fleet, then asks for the first batch."""
        self._push(self._told_again)

    # A step.

    def group_ready(self, group: int) -> None:
        """Without a window only the oldest group that was not ready can make a batch whole."""
        if self.doing is Doing.WAITING and (self._scenario.rules.window or group == self._awaited or self._awaited < 0):
            self._try_take()

    def _try_take(self) -> None:
        ledger = self._ledger
        changes = ledger.take(self.version)
        if changes is None:
            self._awaited = next(iter(ledger.unready(1)), -1)
            return
        ledger.apply(*changes)
        step, speeds = self._step, self._speeds
        step.wait_s += self._events.now_s - self._since_s
        tokens = self._look_at(step)
        weight = tokens * speeds.spread[self.version % len(speeds.spread)]
        step.old_logprob_s = weight * speeds.old_logprob_s_per_token
        step.ref_logprob_s = weight * speeds.ref_logprob_s_per_token
        step.train_s = weight * speeds.train_s_per_token + speeds.step_overhead_s
        self._turn_to(Doing.TRAINING)
        self._later(step.old_logprob_s + step.ref_logprob_s + step.train_s, self._trained)

    def _look_at(self, step: SimulatedStep) -> int:
        """Notes what the batch is like, and that the ledger kept its word; its tokens with the prompts'."""
        ledger, bound = self._ledger, self._scenario.rules.max_staleness
        tokens = 0
        by_version: dict[int, int] = {}
        for index in ledger.state.batches[self.version]:
            group = ledger.state.loaded[index]
            tokens += len(group.prompt.tokens) * len(group.trajectories)
            for trajectory in group.trajectories:
                step.trained_tokens += trajectory.length
                for segment in trajectory.segments:
                    assert isinstance(segment, SimulatedSegment)
                    for version, count in segment.runs:
                        by_version[version] = by_version.get(version, 0) + count
        lags = step.lag_tokens
        lags.update({self.version - version: count for version, count in by_version.items()})
        if lags and not 0 <= min(lags) <= max(lags) <= bound:
            raise SimulationError(f"step {self.version} trains on lags {min(lags)} to {max(lags)}; max_staleness is {bound}")
        step.untaken_groups, step.ready_groups = len(ledger.state.untaken), ledger.state.ready
        return tokens + step.trained_tokens

    def _trained(self) -> None:
        self._turn_to(Doing.DRAINING)
        mode = self._scenario.push_mode
        if mode is PushMode.INTERRUPT or self._fleet.in_flight == 0:
            self._drained()
            return
        self._fleet.on_drained = self._drained
        if mode is PushMode.DRAIN:
            self._fleet.leasing = False

    def _drained(self) -> None:
        self._fleet.on_drained = None
        self._step.drain_s = self._events.now_s - self._since_s
        self.version += 1
        self._push(self._advanced)

    def _advanced(self) -> None:
        ledger, step = self._ledger, self._step
        step.push_s += self._speeds.push_s
        ledger.apply(*ledger.advance(self.version, self._fleet.holders(self.version)))
        every = self._scenario.checkpoint_every
        due = self.version == self._scenario.steps or (every > 0 and self.version % every == 0)
        if due:
            step.checkpoint_s = self._speeds.checkpoint_stall_s
            version = self.version
            self._later(step.checkpoint_s + self._speeds.checkpoint_write_s, lambda: self._durable(version))
        self._fleet.push_told()
        self._later(step.checkpoint_s, self._step_ended)

    def _step_ended(self) -> None:
        now_s, step = self._events.now_s, self._step
        step.end_s = now_s
        idle_s, tokens = self._fleet.totals()
        step.engine_idle_s, step.generated_tokens = idle_s - self._before[0], tokens - self._before[1]
        self._before = (idle_s, tokens)
        self.steps.append(step)
        if self.version == self._scenario.steps:
            self._events.over = True
            return
        self._begin_step()

    def _begin_step(self) -> None:
        self._step = SimulatedStep(step=self.version + 1, begin_s=self._events.now_s)
        self._turn_to(Doing.WAITING)
        self._try_take()

    def _durable(self, version: int) -> None:
        self._ledger.apply(*self._ledger.durable(version))
        self.durable_version = version

    # Engines join, and failures.

    def engines_joined(self) -> None:
        """While a batch is waited for, the fleet gets the present weights again; otherwise the next push is soon enough."""
        if self.doing is Doing.WAITING:
            self._step.wait_s += self._events.now_s - self._since_s
            self._push(self._told_again)

    def fail(self) -> None:
        """A node of the trainer is lost. A push that has begun is finished first; one that is down already begins anew."""
        if self.doing is Doing.PUSHING:
            self._events.after(self._speeds.push_s, lambda *_: self.fail())
            return
        if self.doing is not Doing.DOWN:
            self.failures += 1
            self._turn_to(Doing.DOWN)
        self._life += 1
        self._fleet.on_drained = None
        self._later(self._scenario.failures.trainer_restart_s, self._resume)

    def _resume(self) -> None:
        """All that runs hands in what it has; the run goes on from the last checkpoint."""
        ledger = self._ledger
        self.down_s += self._events.now_s - self._since_s
        self.redone_steps += self.version - self.durable_version
        self.version = self.durable_version
        self._fleet.hand_in()
        ledger.apply(*ledger.rewind(self.version))
        self._before = self._fleet.totals()  # while the trainer was down is no part of a step
        self._step = SimulatedStep(step=self.version + 1, begin_s=self._events.now_s)
        self.begin()

    def _told_again(self) -> None:
        self._step.push_s += self._speeds.push_s
        ledger = self._ledger
        ledger.apply(*ledger.published(self.version, self._fleet.holders(self.version)))
        self._turn_to(Doing.WAITING)
        self._fleet.push_told()
        self._try_take()

    # Helpers.

    def _push(self, then: Callable[[], None]) -> None:
        self._turn_to(Doing.PUSHING)
        self._fleet.begin_push(self.version, self._events.now_s + self._speeds.push_s)
        self._later(self._speeds.push_s, then)

    def _turn_to(self, doing: Doing) -> None:
        self.doing, self._since_s = doing, self._events.now_s

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        self._events.after(delay_s, self._if_alive, (self._life, action))

    def _if_alive(self, _: int, what: tuple[int, Callable[[], None]]) -> None:
        life, action = what
        if life == self._life:
            action()
