"""The engines and judges of a run: they lease from the ledger, let time pass, and report."""

from collections.abc import Callable
from math import inf

from launch.simulate.events import Events
from launch.simulate.scenario import Scenario
from launch.simulate.segments import prompt, segment
from launch.simulate.simulated_engine import CUT, Flight, SimulatedEngine
from launch.simulate.workload import Stream
from rollout.ledger.ledger import RECORDED, Finish, Lease, Ledger, Position, Verdict

LONG_SHARE = 0.75  # a completion counts as long if it reaches this share of the cap
JUDGES = "judges"
STOP, LENGTH = Finish.STOP, Finish.LENGTH
VERDICTS = {True: Verdict(reward=1.0), False: Verdict(reward=0.0)}


class Judges:
    """Sandboxes; `on_group` is called with a group that has all its verdicts, and whether it was dropped for them."""

    def __init__(
        self, events: Events, ledger: Ledger, work: Stream, sandboxes: int, on_group: Callable[[int, bool], None]
    ) -> None:
        self._events, self._ledger, self._work, self._on_group = events, ledger, work, on_group
        self.sandboxes = self.free = sandboxes
        self.waiting = 0
        self.most_waiting = 0
        self.busy_s = 0.0
        self.ready_groups = 0  # that were ever ready

    def finished(self) -> None:
        """A completion waits for its verdict."""
        self.waiting += 1
        if self.free:
            self._start()
        else:
            self.most_waiting = max(self.most_waiting, self.waiting)

    def _start(self) -> None:
        for position, _, _ in self._ledger.lease_grading(JUDGES, 1):
            grading_s = self._work[position.group].grading_s[position.trajectory]
            self.waiting -= 1
            self.free -= 1
            self.busy_s += grading_s
            self._events.at(self._events.now_s + grading_s, self._graded, position)

    def _graded(self, _number: int, position: Position) -> None:
        ledger, index = self._ledger, position.group
        changes = ledger.grade(position, VERDICTS[self._work[index].passes[position.trajectory]])[1]
        ledger.apply(*changes)
        self.free += 1
        if self.waiting:
            self._start()
        group = ledger.state.groups.get(index)
        if group is None:
            self._on_group(index, True)
        elif not group.ungraded:
            self.ready_groups += 1
            self._on_group(index, False)


class SimulatedFleet:
    """Engines that ask for work are served in the order in which they asked, as the queue server does it."""

    def __init__(
        self, events: Events, ledger: Ledger, work: Stream, scenario: Scenario, on_group: Callable[[int, bool], None]
    ) -> None:
        self._events, self._ledger, self._work = events, ledger, work
        self.judges = Judges(events, ledger, work, scenario.sandboxes, on_group)
        self.engines = _engines(scenario)
        self.on_drained: Callable[[], None] | None = None  # called when nothing is in flight
        self.leasing = False
        self._dry = False  # the ledger had nothing more to lease, and nothing has come since
        self.in_flight = 0  # leases of engines, those of dead ones included
        self.lost_tokens = 0  # generated and never reported
        self.long_latencies_s: list[float] = []
        self.long_spans: list[tuple[float, float, str]] = []  # (begin, end, name)
        self._long_tokens = int(LONG_SHARE * scenario.rules.max_completion_tokens)
        self._cap_tokens = scenario.rules.max_completion_tokens
        self._began_s: dict[tuple[int, int], float] = {}  # (group, trajectory) -> start, for long completions
        self._hungry: dict[SimulatedEngine, None] = {}
        self._tail = [engine for engine in self.engines if engine.tail]

    # Work.

    def serve(self) -> None:
        """Hands out what may be generated."""
        hungry = self._hungry
        while hungry and self.leasing and not self._dry:
            engine = next(iter(hungry))
            del hungry[engine]
            free = engine.concurrency - engine.in_flight
            leases = self._lease(engine, free)
            if leases:
                engine.advance(self._events.now_s)
                engine.join(map(self._flight, leases))
                self._schedule(engine)
            if len(leases) < free:
                hungry[engine] = None
                self._dry = True
        if self.on_drained is not None and self.in_flight == 0:
            self.on_drained()

    def serve_again(self) -> None:
        """More may be generated than before."""
        self._dry = False
        self.serve()

    def _lease(self, engine: SimulatedEngine, count: int) -> list[Lease]:
        ledger = self._ledger
        leases = ledger.lease_segments(engine.id, count)
        while len(leases) < count and ledger.may_admit():
            index = ledger.state.admitted
            ledger.apply(*ledger.admit(prompt(index, self._work[index].prompt_tokens)))
            leases += ledger.lease_segments(engine.id, count - len(leases))
        self.in_flight += len(leases)
        return leases

    def _flight(self, lease: Lease) -> Flight:
        position, _, most_tokens = lease
        group, trajectory, offset, _ = position
        prompt_tokens, lengths, _, _ = self._work[group]
        length = lengths[trajectory]
        if not offset and length >= self._long_tokens:
            self._began_s[group, trajectory] = self._events.now_s
        if length - offset > most_tokens:
            return Flight(position, prompt_tokens, most_tokens, CUT)
        return Flight(position, prompt_tokens, length - offset, LENGTH if length >= self._cap_tokens else STOP)

    def _due(self, number: int, engine: SimulatedEngine) -> None:
        if number != engine.event:
            return
        engine.advance(self._events.now_s)
        for flight in engine.landed():
            self._report(engine, flight, flight.finish)
            if self._tail and flight.finish is CUT:
                self._offer_to_tail()
        if not engine.tail:
            self._hungry[engine] = None
        self.serve()
        if number == engine.event:
            self._schedule(engine)

    def _schedule(self, engine: SimulatedEngine) -> None:
        due_s = engine.due_s()
        engine.event = self._events.at(due_s, self._due, engine) if due_s < inf else -1

    def _report(self, engine: SimulatedEngine, flight: Flight, finish: Finish) -> None:
        ledger, position = self._ledger, flight.position
        outcome, changes = ledger.report(position, segment(flight.runs, finish, engine.id), engine.id)
        ledger.apply(*changes)
        self.in_flight -= 1
        if finish is CUT:
            self._dry = False
        elif outcome == RECORDED:
            if position.offset + flight.tokens >= self._long_tokens:
                self._note_long(position, position.offset + flight.tokens)
            self.judges.finished()

    def _note_long(self, position: Position, tokens: int) -> None:
        began_s, now_s = self._began_s.pop((position.group, position.trajectory)), self._events.now_s
        self.long_latencies_s.append(now_s - began_s)
        self.long_spans.append((began_s, now_s, f"{position.group}.{position.trajectory}: {tokens} tokens"))

    def _offer_to_tail(self) -> None:
        """A completion was cut: an engine for long ones asks first, and hands back what is not one."""
        for engine in self._tail:
            if not (self.leasing and engine.alive and engine.in_flight < engine.concurrency):
                continue
            for lease in self._ledger.lease_segments(engine.id, 1):
                if lease.position.offset == 0:
                    self._ledger.report(lease.position, segment((), CUT, engine.id), engine.id)
                    continue
                self.in_flight += 1
                engine.advance(self._events.now_s)
                engine.join([self._flight(lease)])
                self._schedule(engine)
            return

    def totals(self) -> tuple[float, float]:
        """Idle seconds and sampled tokens of all engines until now."""
        for engine in self.engines:
            engine.advance(self._events.now_s)
        return sum(engine.idle_s for engine in self.engines), sum(engine.tokens for engine in self.engines)

    # Weights.

    def begin_push(self, version: int, resume_s: float) -> None:
        """Every engine that lives takes the weights; it generates again from `resume_s` on, when the push is told."""
        self.leasing = False
        for engine in self.engines:
            engine.advance(self._events.now_s)
            if engine.alive:
                engine.push(version, resume_s)
                self._schedule(engine)

    def holders(self, version: int) -> list[str]:
        """The engines that a push of this version reached."""
        return [engine.id for engine in self.engines if engine.alive and engine.version == version]

    def push_told(self) -> None:
        """The ledger knows of the push."""
        self.leasing = True
        for engine in self.engines:
            if engine.alive and not engine.tail and engine.in_flight < engine.concurrency:
                self._hungry.setdefault(engine)
        self.serve_again()

    # Failures.

    def fail(self, node: int) -> list[tuple[str, int]]:
        """A node is lost: the ids of its engines and how many leases each held."""
        lost = []
        for engine in self.engines:
            engine.advance(self._events.now_s)
            if engine.node == node and engine.alive:
                flights = engine.give_up()
                self.lost_tokens += sum(flight.made_tokens for flight in flights)
                lost.append((engine.id, len(flights)))
                engine.alive, engine.event = False, -1
                self._hungry.pop(engine, None)
        return lost

    def leases_return(self, holder: str, count: int) -> None:
        self._ledger.release(holder)
        self.in_flight -= count
        self.serve_again()

    def restart(self, node: int) -> bool:
        """The node serves again, with other engines, which hold no weights; whether there were any to start."""
        dead = [engine for engine in self.engines if engine.node == node and not engine.alive]
        for engine in dead:
            engine.advance(self._events.now_s)
            engine.alive, engine.version = True, -1
            engine.id = f"{engine.name}@{self._events.now_s:.0f}"
        return bool(dead)

    def hand_in(self) -> None:
        """The run is stopped to be resumed: every engine reports what it has."""
        self.leasing = False
        for engine in self.engines:
            engine.advance(self._events.now_s)
            for flight in engine.give_up() if engine.alive else ():
                self._report(engine, flight, CUT)
            engine.event = -1
        self._hungry.clear()


def _engines(scenario: Scenario) -> list[SimulatedEngine]:
    """Engines fill one node after another."""
    engines: list[SimulatedEngine] = []
    gpus = 0
    for fleet in scenario.engine_groups:
        for _ in range(fleet.engines):
            name, node = f"engine-{len(engines)}", gpus // scenario.failures.gpus_per_node
            engines.append(SimulatedEngine(name, fleet.speeds, concurrency=fleet.concurrency, node=node, tail=fleet.tail))
            gpus += fleet.gpus_per_engine
    return engines
