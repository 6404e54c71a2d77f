"""The state of a ledger, and how each change alters it. It is deterministic, and it never refuses a change."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from rollout.ledger.changes import (
    Admitted,
    Change,
    Dropped,
    Durable,
    EvalClosed,
    Extended,
    Graded,
    Lost,
    Observed,
    Published,
    Restarted,
    Rewound,
    Stopped,
    Taken,
    TakenGroup,
    Totals,
)
from rollout.ledger.records import I32, Completion, Finish, GroupParts, Observation, Prompt, Segment, Verdict, in_order
from rollout.ledger.rules import Rules

_CUT = Finish.CUT  # an attribute lookup on an enum is as slow as a call


@dataclass(slots=True, kw_only=True)
class TrajectoryState:
    floor: int  # the next token's version must not be lower; first the group's version, then the last token's version
    segments: list[Segment] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)
    length: int = 0  # completion tokens, those of observations included
    observed: int = 0  # tokens of observations
    attempt: int = 0  # how often the episode began again
    finish: Finish | None = None  # of the last turn; None while it goes on
    verdict: Verdict | None = None

    def holds(self, offset: int, segment: Segment) -> bool:
        """Returns whether exactly this segment was recorded at this offset."""
        return segment.digest(offset) in self.digests()

    def digests(self) -> tuple[int, ...]:
        pieces = self.pieces()
        offsets = accumulate((len(piece.tokens) for piece in pieces), initial=0)
        return tuple(piece.digest(offset) for offset, piece in zip(offsets, pieces, strict=False) if isinstance(piece, Segment))

    def pieces(self) -> Sequence[Segment | Observation]:
        return [*in_order(self.segments, self.observations)] if self.observations else self.segments

    def turns(self) -> list[list[I32]]:
        """The tokens of each segment, turn by turn."""
        turns: list[list[I32]] = [[]]
        for piece in self.pieces():
            if isinstance(piece, Segment):
                turns[-1].append(piece.tokens)
            else:
                turns.append([])
        return turns


@dataclass(slots=True, kw_only=True)
class GroupState:
    index: int
    version: int  # the published version when the group was admitted
    prompt: Prompt
    eval_id: str
    trajectories: list[TrajectoryState]
    ungraded: int
    dropped: bool = False  # evaluation groups only: a dropped training group is removed

    @property
    def tokens(self) -> int:
        """The sampled tokens."""
        return sum(t.length - t.observed for t in self.trajectories)

    def account(self) -> TakenGroup:
        return TakenGroup(
            group=self.index,
            tokens=tuple(t.length for t in self.trajectories),
            observed=tuple(t.observed for t in self.trajectories),
            digests=tuple(t.digests() for t in self.trajectories),
        )

    def parts(self) -> GroupParts:
        """The group as the trainer gets it. Every trajectory must be graded."""
        completions = [
            Completion(segments=t.segments, observations=t.observations, finish=t.finish, verdict=t.verdict)
            for t in self.trajectories
            if t.finish is not None and t.verdict is not None
        ]
        return GroupParts(prompt_id=self.prompt.id, index=self.index, prompt=self.prompt.tokens, completions=completions)


class LedgerState:
    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.version = 0  # the version published to the fleet
        self.stopped = False  # the run is over
        self.engines: frozenset[str] = frozenset()  # ids of the engines that hold the published version
        self.admitted = 0  # training groups, dropped ones included
        self.evals_admitted = 0  # evaluation groups; their indices are -1, -2, ...
        self.steps_taken = 0
        self.oldest_step = 0  # the batches before it are forgotten
        self.bypassing: tuple[int, ...] = ()  # sorted: taken groups that are younger than the oldest untaken group
        self.drops_since_take = 0
        self.dropped_groups: Counter[str] = Counter()  # by kind
        self.dropped_tokens: Counter[str] = Counter()
        self.lost_tokens: Counter[str] = Counter()
        self.trained_tokens = 0  # in forgotten batches only
        self.eval_tokens = 0  # in closed evaluations only
        self.groups: dict[int, GroupState] = {}  # open groups: untaken groups and evaluation groups
        self.untaken: dict[int, GroupState] = {}  # training groups, in order of admission
        self.ready = 0  # number of untaken groups that have all their verdicts
        self.batches: dict[int, tuple[int, ...]] = {}  # the groups of each batch that is not forgotten
        self.taken: dict[int, TakenGroup] = {}  # the accounts of these groups
        self.loaded: dict[int, GroupState] = {}  # the taken groups that are completely in memory
        self.evals: dict[str, list[int]] = {}
        self.dead: list[int] = []  # groups whose changes the next `Durable` forgets

    @property
    def oldest_untaken(self) -> int:
        return next(iter(self.untaken), self.admitted)

    def apply(self, change: Change) -> None:
        match change:
            case Extended():
                self._extended(*change)
            case Graded():
                group = self.groups[change.group]
                group.trajectories[change.trajectory].verdict = change.verdict
                group.ungraded -= 1
                if not group.ungraded and not group.eval_id:
                    self.ready += 1
            case Admitted():
                self._admitted(change)
            case Observed():
                self._observed(*change)
            case Restarted():
                group = self.groups[change.group]
                old = group.trajectories[change.trajectory]
                group.trajectories[change.trajectory] = TrajectoryState(floor=group.version, attempt=old.attempt + 1)
            case Dropped():
                self._dropped(change)
            case Taken():
                self._taken(change)
            case Published():
                self.version, self.engines = change.version, frozenset(change.engines)
            case Rewound():
                self.version, self.engines, self.stopped = change.version, frozenset(), False
                for eval_id in list(self.evals):
                    self._close_eval(eval_id)
            case Lost():
                self.lost_tokens[change.kind.value] += change.tokens
            case EvalClosed():
                self._close_eval(change.eval_id)
            case Stopped():
                self.stopped = True
            case Durable():
                self._durable(change)

    def totals(self, *, oldest_step: int, trained_tokens: int) -> Totals:
        oldest = self.oldest_untaken
        return Totals(
            version=self.version,
            engines=tuple(sorted(self.engines)),
            admitted=self.admitted,
            evals_admitted=self.evals_admitted,
            steps_taken=self.steps_taken,
            oldest_step=oldest_step,
            bypassing=tuple(i for i in self.bypassing if i > oldest),
            drops_since_take=self.drops_since_take,
            dropped_groups=dict(self.dropped_groups),
            dropped_tokens=dict(self.dropped_tokens),
            lost_tokens=dict(self.lost_tokens),
            trained_tokens=trained_tokens,
            eval_tokens=self.eval_tokens,
            stopped=self.stopped,
        )

    def counts(self) -> dict[str, Any]:
        """Counts for the status. Recorded tokens = trained + waiting + dropped. Lost tokens were reported but never recorded."""
        tokens = {index: group.tokens for index, group in self.groups.items()}
        batches = {step: self.tokens_of(step) for step in self.batches}
        trained = sum(n for step, n in batches.items() if step < self.version)
        return {
            "version": self.version,
            "engines": sorted(self.engines),
            "steps_taken": self.steps_taken,
            "oldest_step": self.oldest_step,
            "admitted_groups": self.admitted,
            "untaken_groups": len(self.untaken),
            "ready_groups": self.ready,
            "dropped_groups": dict(self.dropped_groups),
            "trained_tokens": self.trained_tokens + trained,
            "waiting_tokens": sum(n for i, n in tokens.items() if i >= 0) + sum(batches.values()) - trained,
            "dropped_tokens": dict(self.dropped_tokens),
            "lost_tokens": dict(self.lost_tokens),
            "eval_tokens": self.eval_tokens + sum(n for i, n in tokens.items() if i < 0),
            "evals": {name: self._eval_counts(groups) for name, groups in self.evals.items()},
        }

    def _eval_counts(self, groups: Sequence[int]) -> dict[str, int]:
        completions = sum(len(self.groups[i].trajectories) for i in groups)
        waiting = sum(self.groups[i].ungraded for i in groups if not self.groups[i].dropped)
        return {"completions": completions, "graded": completions - waiting}

    def tokens_of(self, step: int) -> int:
        accounts = [self.taken[index] for index in self.batches[step]]
        return sum(sum(account.tokens) - sum(account.observed) for account in accounts)

    def _admitted(self, change: Admitted) -> None:
        group = GroupState(
            index=change.group,
            version=change.version,
            prompt=change.prompt,
            eval_id=change.eval_id,
            trajectories=[TrajectoryState(floor=change.version) for _ in range(change.completions)],
            ungraded=change.completions,
        )
        self.groups[change.group] = group
        if change.eval_id:
            self.evals.setdefault(change.eval_id, []).append(change.group)
            self.evals_admitted = max(self.evals_admitted, -change.group)
        else:
            self.untaken[change.group] = group
            self.admitted = max(self.admitted, change.group + 1)

    def _extended(self, group: int, index: int, segment: Segment) -> None:
        trajectory = self.groups[group].trajectories[index]
        trajectory.segments.append(segment)
        tokens = len(segment.tokens)
        if tokens:
            trajectory.length += tokens
            trajectory.floor = segment.versions.item(-1)
        if segment.finish is not _CUT:
            trajectory.finish = segment.finish
        elif trajectory.length >= self.rules.max_completion_tokens:
            trajectory.finish = Finish.LENGTH

    def _observed(self, group: int, index: int, observation: Observation) -> None:
        trajectory = self.groups[group].trajectories[index]
        trajectory.observations.append(observation)
        trajectory.length += len(observation.tokens)
        trajectory.observed += len(observation.tokens)
        trajectory.finish = None

    def _dropped(self, change: Dropped) -> None:
        group = self.groups[change.group]
        if group.eval_id:  # the group stays, because the result counts it
            group.dropped = True
            return
        del self.groups[change.group], self.untaken[change.group]
        self.ready -= not group.ungraded
        self.dead.append(change.group)
        self.dropped_groups[change.kind.value] += 1
        self.dropped_tokens[change.kind.value] += group.tokens
        self.drops_since_take += 1

    def _taken(self, change: Taken) -> None:
        batch = self.batches[change.step] = tuple(account.group for account in change.groups)
        for account in change.groups:
            self.taken[account.group] = account
            self.admitted = max(self.admitted, account.group + 1)
            if account.group in self.untaken:  # otherwise this is a replay, and the journal gives only the account
                self.loaded[account.group] = self.groups.pop(account.group)
                del self.untaken[account.group]
                self.ready -= 1
        oldest = self.oldest_untaken
        self.bypassing = tuple(sorted({i for i in (*self.bypassing, *batch) if i > oldest}))
        if change.step >= self.steps_taken:  # otherwise this is a replay, and the last `Durable` already counts this step
            self.steps_taken = change.step + 1
            self.drops_since_take = 0

    def _durable(self, change: Durable) -> None:
        totals = change.totals
        self.version, self.engines = totals.version, frozenset(totals.engines)
        self.admitted, self.evals_admitted = totals.admitted, totals.evals_admitted
        self.steps_taken, self.oldest_step = totals.steps_taken, totals.oldest_step
        self.bypassing = tuple(totals.bypassing)
        self.drops_since_take = totals.drops_since_take
        self.dropped_groups = Counter(totals.dropped_groups)
        self.dropped_tokens = Counter(totals.dropped_tokens)
        self.lost_tokens = Counter(totals.lost_tokens)
        self.trained_tokens, self.eval_tokens = totals.trained_tokens, totals.eval_tokens
        self.stopped = totals.stopped
        self.dead.clear()
        self._forget(change.forgotten)
        self.batches = {step: groups for step, groups in self.batches.items() if step >= totals.oldest_step}

    def _close_eval(self, eval_id: str) -> None:
        indices = self.evals.pop(eval_id)
        self.eval_tokens += sum(self.groups[index].tokens for index in indices)
        self.dead.extend(indices)
        self._forget(indices)

    def _forget(self, indices: Iterable[int]) -> None:
        for index in indices:
            for groups in (self.groups, self.taken, self.loaded):
                groups.pop(index, None)
