"""A small world around a ledger: engines with real versions, a trainer, judges, a journal, and what must hold of them.

The world keeps its own account of everything that was accepted, so that the ledger is never its own witness.
"""

import itertools
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from rollout.ledger.changes import Admitted, Change, DropKind, Dropped, Durable, Extended, Graded, Observed, Restarted, Taken
from rollout.ledger.ledger import Ledger
from rollout.ledger.records import NOT_SAMPLED, Answered, Batch, Finish, Position, Segment
from rollout.ledger.rules import Rules
from rollout.ledger.state import LedgerState
from tests.rollout.builders import observation, prompt, rules, segment, verdict

JUDGES = ("j0", "j1")


@dataclass
class Engine:
    name: str
    version: int = 0  # of its weights; newer than the published one between a push and `advance`
    history: list[int] = field(default_factory=list)  # of its weights since the start
    held: list[tuple[Position, int, int]] = field(default_factory=list)  # position, max_new_tokens, len(history) at lease


def outlives(change: Change, durable: Durable) -> bool:
    """Returns whether an earlier change is still needed because its group or its batch is not forgotten."""
    match change:
        case Admitted() | Extended() | Observed() | Restarted() | Graded() | Dropped():
            return change.group not in durable.forgotten
        case Taken():
            return change.step >= durable.totals.oldest_step
    return False


def comparable(state: LedgerState) -> dict[str, Any]:
    """The whole state, to compare a ledger with its replay."""
    return {
        "totals": state.totals(oldest_step=state.oldest_step, trained_tokens=state.trained_tokens),
        "groups": state.groups,
        "taken": state.taken,
        "untaken": list(state.untaken),
        "ready": state.ready,
        "batches": state.batches,
        "evals": state.evals,
        "dead": sorted(state.dead),
    }


class World:
    def __init__(self, rules: Rules, engines: int = 2) -> None:
        self.rules = rules
        self.ledger = Ledger(rules)
        self.journal: list[Change] = []
        self.made: list[Change] = []  # every change, in order
        self.engines = [Engine(f"e{i}@1") for i in range(engines)]
        self.version = 0  # of the trainer's weights
        self.checkpoint = 0
        self.taken: dict[int, Batch] = {}  # as first served
        self.accepted: dict[tuple[int, int], list[tuple[int, int]]] = {}  # (token, version) of each trajectory
        self.answers: list[Answered] = []  # that were recorded
        self.old_reports: list[tuple[Position, object]] = []  # of episodes that began again
        self.recorded: Counter[str] = Counter()
        self.dropped: set[int] = set()
        self.reports: list[tuple[Position, Segment]] = []
        self.prompts: list[str] = []
        self.stream = itertools.count()
        self.push(range(engines))
        self.do(self.ledger.published(0, [e.name for e in self.engines]))

    def do(self, changes: tuple[Change, ...]) -> None:
        for change in changes:
            self.ledger.apply(change)
            self.made.append(change)
            if isinstance(change, Durable):
                self.journal = [change, *(c for c in self.journal if outlives(c, change))]
            else:
                self.journal.append(change)
            if isinstance(change, Taken):
                self.first_served(change)

    # The fleet.

    def lease(self, engine: Engine, count: int) -> None:
        leases = self.ledger.lease_segments(engine.name, count)
        while len(leases) < count and engine.name in self.ledger.state.engines and self.ledger.may_admit():
            self.prompts.append(f"p{self.ledger.admitted}")
            self.do(self.ledger.admit(prompt(self.ledger.admitted)))
            leases += self.ledger.lease_segments(engine.name, count - len(leases))
        for lease in leases:
            assert engine.version >= self.ledger.version, "leased to an engine that lacks the published version"
            engine.held.append((lease.position, lease.max_new_tokens, len(engine.history)))

    def finish(self, engine: Engine, which: int, tokens: int, finish: str, *, late: bool = False) -> str:
        """The engine ends a segment it holds, sampled by the versions it has had since; cut where they go back.

        Late: the request waited in the engine, and all its tokens are of the engine's last version.
        """
        position, max_new_tokens, since = engine.held.pop(which)
        lived = engine.history[-1 if late else since - 1 :]
        cut = next((i for i, (a, b) in enumerate(itertools.pairwise(lived), 1) if b < a), len(lived))
        tokens = min(tokens, max_new_tokens)
        versions = [lived[min(i, cut - 1)] for i in range(tokens)]
        done = segment(versions, finish if tokens else "cut", engine.name, first_token=next(self.stream) * 100)
        outcome, changes = self.ledger.report(position, done, engine.name)
        self.do(changes)
        if outcome == "recorded":
            key = (position.group, position.trajectory)
            self.accepted.setdefault(key, []).extend(zip(done.tokens.tolist(), versions, strict=True))
            self.recorded["eval" if position.group < 0 else "train"] += tokens
            self.reports.append((position, done))
        elif outcome == "restarted":
            self.recorded["restarted"] += tokens
        return outcome

    def grade(self, judge: str, reward: float | None = None) -> bool:
        """A judge takes a trajectory whose turn has ended, and gives the verdict; by default not the same in a group."""
        for lease in self.ledger.lease_grading(judge, 1):
            given = float(lease.position.trajectory % 2) if reward is None else reward
            return self.answer(Answered(lease.position, verdict(given)), judge)
        return False

    def observe(self, tokens: int, judge: str) -> bool:
        """A judge takes a trajectory whose turn has ended, and lets it go on, or gives the verdict if there is no room."""
        for lease in self.ledger.lease_grading(judge, 1):
            trajectory = self.ledger.trajectory(lease.position)
            room = lease.position.offset + tokens < self.rules.max_completion_tokens
            go_on = room and trajectory.finish is Finish.STOP
            seen = observation(tokens, first_token=next(self.stream) * 100)
            answered = Answered(lease.position, observation=seen) if go_on else Answered(lease.position, verdict(0.0))
            return self.answer(answered, judge)
        return False

    def restart(self, judge: str) -> bool:
        """A judge cannot rebuild the environment of an episode."""
        return any(self.answer(Answered(lease.position), judge) for lease in self.ledger.lease_grading(judge, 1))

    def answer(self, answered: Answered, judge: str) -> bool:
        position, dropped = answered.position, self.ledger.state.dropped_groups.total()
        outcome, changes = self.ledger.answer(answered, judge)
        assert outcome == "recorded"
        self.do(changes)
        self.answers.append(answered)
        key = (position.group, position.trajectory)
        if answered.observation is not None:
            self.accepted[key].extend((token, NOT_SAMPLED) for token in answered.observation.tokens.tolist())
        elif answered.verdict is None:
            sampled = sum(version != NOT_SAMPLED for _, version in self.accepted.pop(key))
            self.recorded["eval" if position.group < 0 else "train"] -= sampled
            self.recorded["restarted"] += sampled
            old = [report for report in self.reports if report[0][:2] == key]
            self.reports = [report for report in self.reports if report[0][:2] != key]
            self.old_reports += old
        if self.ledger.state.dropped_groups.total() > dropped:
            self.dropped.add(position.group)
        return True

    def drop_oldest(self) -> None:
        for group in self.ledger.unready(1):
            self.do(self.ledger.drop(group, DropKind.BAD_PROMPT, "too long"))
            self.dropped.add(group)

    # The trainer.

    def push(self, engines: "range | list[int]") -> None:
        for i in engines:
            self.engines[i].version = self.version
            self.engines[i].history.append(self.version)

    def step(self, engines: list[int], *, dies_before_advance: bool = False) -> bool:
        """Takes a batch, pushes the result to these engines, and says so. False if there is no batch yet."""
        changes = self.ledger.take(self.version)
        if changes is None:
            return False
        self.do(changes)
        self.check_batch(self.ledger.batch(self.version))
        self.version += 1
        self.push(engines)
        if not dies_before_advance:
            self.do(self.ledger.advance(self.version, [self.engines[i].name for i in engines]))
        return True

    def save(self) -> None:
        self.checkpoint = self.version
        self.do(self.ledger.durable(self.version))

    def restart_trainer(self, engines: list[int]) -> None:
        self.version = self.checkpoint
        self.do(self.ledger.rewind(self.version))
        self.push(engines)
        self.do(self.ledger.published(self.version, [self.engines[i].name for i in engines]))

    def restart_server(self) -> None:
        before = comparable(self.ledger.state)
        self.ledger = Ledger.replay(self.rules, self.journal)
        assert comparable(self.ledger.state) == before
        for engine in self.engines:
            engine.held = [h for h in engine.held if self.ledger.adopt(engine.name, h[0])]

    def collect_evals(self) -> None:
        for eval_id in list(self.ledger.state.evals):
            result = self.ledger.eval_result(eval_id)
            if result is not None:
                assert result.version_min <= result.version_max <= self.ledger.state.steps_taken
                self.do(self.ledger.close_eval(eval_id))

    # What must hold.

    def first_served(self, change: Taken) -> None:
        """Exactly once, and in order but for at most W that bypass."""
        batch = self.ledger.batch(change.step)
        earlier = {g.index for b in self.taken.values() for g in b.groups}
        mine = [g.index for g in batch.groups]
        assert mine == sorted(set(mine)) and not earlier & set(mine), "trained on twice"
        assert not self.dropped & set(mine), "dropped and trained on"
        self.taken[change.step] = batch
        taken = earlier | set(mine)
        untaken = set(range(self.ledger.admitted)) - taken - self.dropped
        if untaken:
            assert sum(i > min(untaken) for i in taken) <= self.rules.window

    def check_batch(self, batch: Batch) -> None:
        first = self.taken[batch.step]
        assert [g.index for g in batch.groups] == [g.index for g in first.groups], "another batch than the first time"
        assert len(batch.groups) == self.rules.groups_per_step
        for group in batch.groups:
            assert len(group.trajectories) == self.rules.completions_per_group
            for i, trajectory in enumerate(group.trajectories):
                completion = slice(len(prompt().tokens), None)
                tokens, versions = trajectory.tokens[completion].tolist(), trajectory.versions[completion].tolist()
                assert list(zip(tokens, versions, strict=True)) == self.accepted[group.index, i]
                assert (trajectory.sampled == (trajectory.versions != NOT_SAMPLED)).all()
                assert not trajectory.logprobs[~trajectory.sampled].any()
                versions = [version for version in versions if version != NOT_SAMPLED]
                assert versions == sorted(versions)
                assert all(0 <= batch.step - v <= self.rules.max_staleness for v in versions), "beyond the bound"

    def check_account(self) -> None:
        counts = self.ledger.summary()
        parts = counts["trained_tokens"] + counts["waiting_tokens"] + sum(counts["dropped_tokens"].values())
        assert parts == self.recorded["train"]
        assert counts["eval_tokens"] == self.recorded["eval"]
        trained = [g.index for step, b in self.taken.items() if step < self.ledger.version for g in b.groups]
        assert counts["trained_tokens"] == sum(
            version != NOT_SAMPLED for (group, _), t in self.accepted.items() if group in set(trained) for _, version in t
        )
        assert counts["lost_tokens"].get("restarted", 0) == self.recorded["restarted"]
        assert self.prompts == [f"p{i}" for i in range(self.ledger.admitted)], "the stream skipped or repeated a prompt"
        assert sum(counts["dropped_groups"].values()) == len(self.dropped)

    def run_steps(self, steps: int, tokens: int = 3) -> None:
        """Everybody does his part, in turns: the steps must come, after a number of turns that is bounded."""
        goal = self.version + steps
        everyone = list(range(len(self.engines)))
        for _turn in range(2_000):
            if self.version >= goal:
                return
            if self.ledger.state.engines != {e.name for e in self.engines}:
                self.push(everyone)
                self.do(self.ledger.published(self.version, [e.name for e in self.engines]))
            for engine in self.engines:
                self.lease(engine, 3)
                while engine.held:
                    self.finish(engine, 0, tokens, "cut")
            for judge in JUDGES:
                while self.grade(judge):
                    pass
            self.step(everyone)
        raise AssertionError(f"no progress: {self.ledger.summary()}")


EVENTS = {
    "work": 30, "work_slowly": 20, "train": 30, "train_push_to_one": 5, "die_after_push": 2, "save": 5, "trainer_dies": 3,
    "server_dies": 3, "lease_expires": 4, "worker_dies": 3, "refuse_prompt": 3, "report_again": 5, "eval": 2, "collect": 4,
    "answer_again": 5, "judge_dies": 3, "restart": 3,
}  # fmt: skip


class Walk:
    """One long random history, in which most things go well most of the time."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        p, s = chance.randint(1, 3), chance.randint(0, 3)
        self.world = World(
            rules(
                groups_per_step=p, max_staleness=s, window=chance.choice([0, chance.randint(0, s * p), s * p]),
                segment_tokens=chance.randint(1, 3), max_completion_tokens=chance.choice([chance.randint(1, 5), 12]),
                drop_no_signal=chance.random() < 0.3,
            )
        )  # fmt: skip
        self.stragglers = chance.choice([0.05, 0.3, 0.6])
        self.turns = chance.choice([0.0, 0.3, 0.7])  # how often a turn is not the last one

    def run(self, events: int) -> None:
        names, weights = zip(*EVENTS.items(), strict=True)
        for name in self.chance.choices(names, weights, k=events):
            getattr(self, name)()
            self.world.check_account()
        self.world.restart_server()
        self.world.run_steps(2 + self.world.rules.max_staleness)
        self.world.check_account()

    def work(self, stragglers: float | None = None) -> None:
        chance, stragglers = self.chance, self.stragglers if stragglers is None else stragglers
        for engine in chance.sample(self.world.engines, 2):
            self.world.lease(engine, chance.randint(1, 6))
            for i in reversed(range(len(engine.held))):
                if chance.random() >= stragglers:
                    self.world.finish(engine, i, chance.randint(0, 3), chance.choice(["cut", "stop"]), late=chance.random() < 0.2)
        while chance.random() >= stragglers / 4 and self.judge(chance.choice(JUDGES)):
            pass

    def judge(self, judge: str) -> bool:
        chance = self.chance
        if chance.random() < self.turns:
            return self.world.observe(chance.randint(1, 2), judge)
        return self.world.grade(judge, chance.choice([0.0, 1.0]))

    def work_slowly(self) -> None:
        self.work(stragglers=0.8)

    def train(self) -> None:
        self.world.step([0, 1])

    def train_push_to_one(self) -> None:
        self.world.step([self.chance.randint(0, 1)])

    def die_after_push(self) -> None:
        if self.world.step([0, 1], dies_before_advance=True):
            self.work()
            self.world.restart_trainer([0, 1])

    def save(self) -> None:
        self.world.save()

    def trainer_dies(self) -> None:
        self.world.restart_trainer(self.chance.choice([[0], [1], [0, 1]]))

    def server_dies(self) -> None:
        self.world.restart_server()

    def lease_expires(self) -> None:
        self.world.ledger.release(self.chance.choice(self.world.engines).name)

    def worker_dies(self) -> None:
        engine = self.chance.choice(self.world.engines)
        engine.held.clear()
        self.world.ledger.release(engine.name)

    def refuse_prompt(self) -> None:
        self.world.drop_oldest()

    def report_again(self) -> None:
        if self.world.reports:
            position, segment = self.chance.choice(self.world.reports)
            outcome, changes = self.world.ledger.report(position, segment)
            assert outcome == "gone" or (outcome, changes) == ("recorded", ())
            other = replace(segment, tokens=segment.tokens + 1)
            assert self.world.ledger.report(position, other)[0] in ("duplicate", "gone")
        if self.world.old_reports:
            position, segment = self.chance.choice(self.world.old_reports)
            assert self.world.ledger.report(position, segment)[0] in ("restarted", "duplicate", "gone")

    def answer_again(self) -> None:
        if self.world.answers:
            outcome, changes = self.world.ledger.answer(self.chance.choice(self.world.answers), self.chance.choice(JUDGES))
            assert outcome in ("duplicate", "gone") and not changes

    def judge_dies(self) -> None:
        self.world.ledger.release(self.chance.choice(JUDGES))

    def restart(self) -> None:
        if self.turns:
            self.world.restart(self.chance.choice(JUDGES))

    def eval(self) -> None:
        prompts = [prompt(1000 + i) for i in range(2)]
        self.world.do(self.world.ledger.admit_eval(f"eval-{self.chance.random()}", prompts, self.chance.randint(1, 2)))

    def collect(self) -> None:
        self.world.collect_evals()
