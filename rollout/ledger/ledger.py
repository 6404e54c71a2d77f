"""The ledger: the off-policy contract as a pure state machine. No clock, socket, file or thread.

A decision method checks a request and returns `Change` records. Only `apply` alters the durable state, and replaying all
changes rebuilds the ledger. So the caller writes

    changes = ledger.admit(prompt)
    ledger.apply(*changes)  # and writes them to the journal

Leases are not changes: they are lost with the server, and `adopt` restores them. A report names a group, a
trajectory and an offset; it is accepted if it continues the trajectory there, whoever sends it. So no finished work is lost, and
repeated reports are harmless. `docs/ledger.md` states the rules.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, Self

import numpy as np

from rollout.ledger.changes import (
    Admitted,
    Change,
    DropKind,
    Dropped,
    Durable,
    EvalClosed,
    Extended,
    Graded,
    Lost,
    LostKind,
    Observed,
    Published,
    Restarted,
    Rewound,
    Stopped,
    Taken,
)
from rollout.ledger.leases import Lease, Leases
from rollout.ledger.records import (
    F32,
    I32,
    Answered,
    Batch,
    EvalPrompt,
    EvalResult,
    Finish,
    GroupParts,
    Observation,
    Position,
    Prompt,
    Segment,
    Verdict,
)
from rollout.ledger.rules import Rules
from rollout.ledger.state import GroupState, LedgerState, TrajectoryState

Changes = tuple[Change, ...]
RECORDED = "recorded"
RETURNED = "returned"


class LedgerError(RuntimeError):
    """The contract forbids this request. The ledger is unchanged."""


class Ledger:
    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.state = LedgerState(rules)
        self.leases = Leases(rules, self.state)
        self._takeable: tuple[int, ...] | None = None
        self._takeable_is_known = True

    @classmethod
    def replay(cls, rules: Rules, changes: Iterable[Change]) -> Self:
        ledger = cls(rules)
        for change in changes:
            ledger.apply(change)
        return ledger

    # Memory: groups that were trained on are needed again only if the trainer goes back. The journal still has them.

    def unload_trained(self) -> None:
        """Frees the groups of all batches before the published version. Only their accounts stay in memory."""
        state = self.state
        for step in range(state.oldest_step, state.version):
            for index in state.batches[step]:
                state.loaded.pop(index, None)

    def unloaded(self, step: int) -> list[int]:
        """The groups that must be loaded before `batch(step)` can be called."""
        return [index for index in self.state.batches.get(step, ()) if index not in self.state.loaded]

    def load(self, index: int, changes: Iterable[Change]) -> None:
        """Loads a group of a batch again, from all its changes in their order."""
        alone = LedgerState(self.rules)
        for change in changes:
            alone.apply(change)
        group = alone.groups.get(index)
        if group is None or group.ungraded or group.account() != self.state.taken[index]:
            raise LedgerError(f"group {index} differs from the group that was taken into its batch")
        self.state.loaded[index] = group

    @property
    def version(self) -> int:
        """The version published to the fleet."""
        return self.state.version

    @property
    def admitted(self) -> int:
        """How many training groups were admitted so far, dropped ones included. This is the position in the stream of prompts."""
        return self.state.admitted

    # Admission.

    def may_admit(self) -> bool:
        live = self.state.admitted - self.state.dropped_groups.total()
        return live < self.rules.admissible(self.state.version) and not self._too_many_drops

    def admit(self, prompt: Prompt) -> Changes:
        """Admits a training group for the prompt at position `admitted`."""
        state = self.state
        if not self.may_admit():
            raise LedgerError(f"group {state.admitted} may not be admitted yet at version {state.version}")
        completions = self.rules.completions_per_group
        return (Admitted(group=state.admitted, version=state.version, prompt=prompt, completions=completions),)

    def admit_eval(self, eval_id: str, prompts: Sequence[Prompt], completions: int) -> Changes:
        """Admits the groups of an evaluation. They have negative indices, are leased first, and are never trained on."""
        if eval_id in self.state.evals:
            return ()
        if not eval_id or not prompts or completions < 1:
            found = f"{len(prompts)} prompts x {completions} completions"
            raise LedgerError(f"evaluation {eval_id!r} has {found}: it needs an id, and at least one of each")
        first, version = -1 - self.state.evals_admitted, self.state.version
        return tuple(
            Admitted(group=first - i, version=version, prompt=prompt, completions=completions, eval_id=eval_id)
            for i, prompt in enumerate(prompts)
        )

    # Leases.

    def lease_segments(self, engine: str, count: int, holder: str = "") -> list[Lease]:
        """Leases up to `count` segments to an engine that holds the published version."""
        return self.leases.grant_segments(holder or engine, count) if engine in self.state.engines else []

    def lease_grading(self, holder: str, count: int) -> list[Lease]:
        return self.leases.grant_grading(holder, count)

    def adopt(self, holder: str, position: Position) -> bool:
        """Returns whether a holder that claims this lease may keep it."""
        return self.leases.adopt(holder, position)

    def release(self, holder: str) -> int:
        """Takes back all leases of a holder that is gone. Returns how many there were."""
        returned = sum(self.leases.release(holder, position) for position in self.leases.held(holder))
        self.leases.leave(holder)
        return returned

    # Reports.

    def report(self, position: Position, segment: Segment, holder: str = "") -> tuple[str, Changes]:
        """Records a segment. Returns the outcome and the changes. An empty segment with finish CUT gives the lease back."""
        group, index, offset, attempt = position
        if group in self.state.taken:
            return self._report_taken(position, segment)
        trajectory = self._reported(group, index)
        if trajectory is None:
            return self._lost(LostKind.GONE, segment)
        if attempt < trajectory.attempt:
            return self._lost(LostKind.RESTARTED, segment)
        if attempt > trajectory.attempt or offset > trajectory.length:
            raise LedgerError(f"{position} is beyond the {trajectory.length} recorded tokens")
        if offset < trajectory.length or trajectory.finish is not None:
            if trajectory.holds(offset, segment):  # a repeated report: the answer to the first one was lost
                return RECORDED, ()
            return self._lost(LostKind.DUPLICATE, segment)
        tokens = len(segment.tokens)
        if not tokens and segment.finish is Finish.CUT:
            self.leases.release(holder, position)
            return RETURNED, ()
        self._check_segment(position, segment)
        if tokens and segment.versions.item(0) < trajectory.floor:
            self.leases.release(holder, position)
            return self._lost(LostKind.STALE, segment)
        return RECORDED, (Extended(group, index, segment),)

    # Answers to a turn that has ended.

    def answer(self, answered: Answered, holder: str = "") -> tuple[str, Changes]:
        """Records what a judge says of a turn that has ended. Returns the outcome and the changes."""
        if answered.verdict is not None:
            return self.grade(answered.position, answered.verdict)
        if answered.observation is not None:
            return self.observe(answered.position, answered.observation, holder)
        return self.restart(answered.position)

    def grade(self, position: Position, verdict: Verdict) -> tuple[str, Changes]:
        """Records a verdict. With `drop_no_signal`, the last verdict of a group also drops it if all its rewards are equal."""
        if why := self._unneeded(position):
            return why, ()
        group, trajectory = position[:2]
        graded = Graded(group, trajectory, verdict)
        if self.rules.drop_no_signal and not (record := self.state.groups[group]).eval_id and record.ungraded == 1:
            others = {t.verdict.reward for t in record.trajectories if t.verdict is not None}
            if others == {verdict.reward}:
                reason = f"all rewards are {verdict.reward:g}"
                return RECORDED, (graded, Dropped(group=group, kind=DropKind.NO_SIGNAL, reason=reason))
        return RECORDED, (graded,)

    def observe(self, position: Position, observation: Observation, holder: str = "") -> tuple[str, Changes]:
        """Records an observation, after which the trajectory waits for an engine. The holder keeps the episode's state."""
        if why := self._unneeded(position):
            return why, ()
        group, index, offset, _ = position
        trajectory = self.state.groups[group].trajectories[index]
        cap, tokens = self.rules.max_completion_tokens, len(observation.tokens)
        if trajectory.finish is not Finish.STOP or offset + tokens >= cap:
            raise LedgerError(
                f"{position} ({trajectory.finish}) with an observation of {tokens} tokens leaves no room for a turn within "
                f"max_completion_tokens={cap}: only a verdict can follow"
            )
        if holder:
            self.leases.stay((group, index), holder)
        return RECORDED, (Observed(group, index, observation),)

    def restart(self, position: Position) -> tuple[str, Changes]:
        """Lets an episode begin again whose environment cannot be rebuilt. What was sampled counts as lost."""
        if why := self._unneeded(position):
            return why, ()
        group, index = position[:2]
        trajectory = self.state.groups[group].trajectories[index]
        lost = Lost(kind=LostKind.RESTARTED, tokens=trajectory.length - trajectory.observed)
        return RECORDED, (Restarted(group, index), lost)

    def drop(self, group: int, kind: DropKind, reason: str) -> Changes:
        """Drops a group that cannot be run. Repeating it changes nothing."""
        self._check_known(group)
        if group in self.state.taken:
            raise LedgerError(f"group {group} is part of a batch and cannot be dropped ({kind}: {reason})")
        record = self.state.groups.get(group)
        if record is None or record.dropped:
            return ()
        return (Dropped(group=group, kind=kind, reason=reason),)

    # The trainer.

    def take(self, step: int) -> Changes | None:
        """Forms the batch of this step. Returns no changes if it was taken before, and None if it is not ready yet."""
        state = self.state
        if step in state.batches and step <= state.version:
            return ()
        if self.rules.total_steps is not None and step >= self.rules.total_steps:
            raise LedgerError(f"step {step} does not exist: the run has {self.rules.total_steps} steps")
        if step != state.version or step != state.steps_taken:
            raise LedgerError(
                f"step {step} cannot be taken: the fleet has version {state.version}, {state.steps_taken} steps were taken, "
                f"and the steps before {state.oldest_step} are forgotten"
            )
        if self._too_many_drops:
            raise LedgerError(
                f"{state.drops_since_take} groups were dropped since the last step, more than max_drops_per_step="
                f"{self.rules.max_drops_per_step}: the problems are too easy, too hard, or broken "
                f"(dropped so far, by kind: {dict(state.dropped_groups)})"
            )
        groups = self.takeable()
        return None if groups is None else (Taken(step=step, groups=tuple(state.untaken[i].account() for i in groups)),)

    def takeable(self) -> tuple[int, ...] | None:
        """The next batch: the oldest ready groups. At most W of them may bypass the oldest group that is not ready."""
        if not self._takeable_is_known:
            self._takeable, self._takeable_is_known = self._next_batch(), True
        return self._takeable

    def batch(self, step: int) -> Batch:
        """The batch of a step that was taken and is not forgotten."""
        return Batch(step=step, groups=tuple(parts.assemble() for parts in self.parts(step)))

    def parts(self, step: int) -> list[GroupParts]:
        """The parts from which the batch of this step is assembled."""
        if step not in self.state.batches:
            raise LedgerError(f"there is no batch of step {step}: not taken yet, or forgotten")
        return [self.state.loaded[index].parts() for index in self.state.batches[step]]

    def advance(self, version: int, engines: Iterable[str]) -> Changes:
        """The step before `version` is done, and exactly these engines hold the new weights."""
        if version != self.state.version + 1:
            return self.published(version, engines)
        if self.state.steps_taken < version:
            raise LedgerError(f"version {version} cannot follow: the batch of step {version - 1} was never taken")
        return (Published(version=version, engines=tuple(sorted(engines))),)

    def published(self, version: int, engines: Iterable[str]) -> Changes:
        """Exactly these engines hold the current version."""
        if version != self.state.version:
            raise LedgerError(f"version {version} was pushed, but the ledger is at version {self.state.version}")
        holders = frozenset(engines)
        return () if self.state.engines == holders else (Published(version=version, engines=tuple(sorted(holders))),)

    def rewind(self, version: int) -> Changes:
        """The trainer starts from the checkpoint of `version`. Later batches are served again, unchanged."""
        state = self.state
        if not state.oldest_step <= version <= state.version:
            raise LedgerError(
                f"cannot go back to version {version}: the ledger is at version {state.version} and has forgotten the "
                f"batches before step {state.oldest_step}; resume from a checkpoint in between"
            )
        unchanged = version == state.version and not (state.engines or state.evals or state.stopped)
        return () if unchanged else (Rewound(version=version),)

    def durable(self, version: int) -> Changes:
        """The checkpoint of `version` is on disk, so the batches before it are forgotten."""
        state = self.state
        if version > state.version:
            raise LedgerError(f"the checkpoint of version {version} is ahead of the ledger, at version {state.version}")
        if version <= state.oldest_step:
            return ()
        trained = [index for step in range(state.oldest_step, version) for index in state.batches[step]]
        tokens = state.trained_tokens + sum(map(state.tokens_of, range(state.oldest_step, version)))
        totals = state.totals(oldest_step=version, trained_tokens=tokens)
        return (Durable(totals=totals, forgotten=(*trained, *state.dead)),)

    def stop(self) -> Changes:
        """The run is over until a trainer starts again (`rewind`)."""
        return () if self.state.stopped else (Stopped(),)

    # Evaluations.

    def eval_result(self, eval_id: str) -> EvalResult | None:
        """None until every completion is graded."""
        if eval_id not in self.state.evals:
            raise LedgerError(f"no evaluation {eval_id!r}: it was never started, was closed, or ended when the trainer restarted")
        groups = [self.state.groups[index] for index in self.state.evals[eval_id]]
        if any(g.ungraded and not g.dropped for g in groups):
            return None
        segments = [s for g in groups for t in g.trajectories for s in t.segments]
        sampled = [s.versions for s in segments if len(s.versions)]
        return EvalResult(
            eval_id=eval_id,
            version_min=min((int(v[0]) for v in sampled), default=groups[0].version),
            version_max=max((int(v[-1]) for v in sampled), default=groups[0].version),
            tokens=sum(g.tokens for g in groups),
            prompts=tuple(EvalPrompt(prompt_id=g.prompt.id, rewards=_rewards(g)) for g in groups),
            teacher_kl=_teacher_kl(segments),
        )

    def close_eval(self, eval_id: str) -> Changes:
        return (EvalClosed(eval_id=eval_id),) if eval_id in self.state.evals else ()

    # Changes.

    def apply(self, *changes: Change) -> None:
        """Applies changes to the state, and updates the leases and what may be leased."""
        for change in changes:
            self.state.apply(change)
            match change:
                case Extended() | Observed() | Restarted():
                    self.leases.moved(change[:2])
                    continue  # this makes no group ready
                case Graded():
                    self.leases.graded(change[:2])
                    if self.state.groups[change.group].ungraded:
                        continue
                case Lost():
                    continue
                case Admitted():
                    self.leases.begin(change.group, change.completions)
                case Dropped():
                    self.leases.end([change.group])
                case EvalClosed():
                    self.leases.end(self.state.dead)
                case Rewound():
                    self.leases.end(self.state.dead)
                    self.leases.reconsider()
                case Published() | Durable():
                    self.leases.reconsider()
            self._takeable_is_known = False

    # The content of a lease, and what the next batch waits for.

    def prompt(self, group: int) -> Prompt:
        return self.state.groups[group].prompt

    def trajectory(self, position: Position) -> TrajectoryState:
        return self.state.groups[position.group].trajectories[position.trajectory]

    def completion(self, position: Position) -> list[I32]:
        """The tokens of each recorded segment and of each observation of a trajectory, in order."""
        return [piece.tokens for piece in self.trajectory(position).pieces()]

    def unready(self, count: int) -> list[int]:
        """The oldest untaken groups that are not ready. The next batch waits for them."""
        return list(islice((index for index, group in self.state.untaken.items() if group.ungraded), count))

    def summary(self) -> dict[str, Any]:
        phases: Counter[str] = Counter()
        for index in [*self.state.untaken, *(i for groups in self.state.evals.values() for i in groups)]:
            phases += self.leases.phases(index)
        return {**self.state.counts(), "trajectories": dict(phases), "leases": dict(self.leases.counts())}

    # Helpers.

    @property
    def _too_many_drops(self) -> bool:
        return self.state.drops_since_take > self.rules.max_drops_per_step

    def _next_batch(self) -> tuple[int, ...] | None:
        if self.state.ready < self.rules.groups_per_step:
            return None
        chosen: list[int] = []
        bypasses_left: int | None = None  # known once the oldest group that is not ready is met
        for index, group in self.state.untaken.items():
            if not group.ungraded:
                chosen.append(index)
                bypasses_left = None if bypasses_left is None else bypasses_left - 1
            elif bypasses_left is None:
                bypassing = self.state.bypassing
                bypasses_left = self.rules.window - (len(bypassing) - bisect_right(bypassing, index))
            if len(chosen) == self.rules.groups_per_step:
                return tuple(chosen)
            if bypasses_left is not None and bypasses_left <= 0:
                return None
        return None

    def _reported(self, group: int, trajectory: int) -> TrajectoryState | None:
        """The trajectory of a report, or None if its group was dropped or forgotten."""
        record = self.state.groups.get(group)
        if record is None:
            self._check_known(group)
            return None
        if not 0 <= trajectory < len(record.trajectories):
            raise LedgerError(f"group {group} has {len(record.trajectories)} trajectories, and no number {trajectory}")
        return None if record.dropped else record.trajectories[trajectory]

    def _unneeded(self, position: Position) -> str:
        """Why no answer is needed at this position; "" if its turn has ended and waits for one."""
        group, index, offset, attempt = position
        if group in self.state.taken:
            return LostKind.DUPLICATE
        found = self._reported(group, index)
        if found is None:
            return LostKind.GONE
        if (attempt, offset) < (found.attempt, found.length) or found.verdict is not None:
            return LostKind.DUPLICATE
        if (attempt, offset) > (found.attempt, found.length) or found.finish is None:
            raise LedgerError(f"{position} has an answer but is not finished: {found.length} tokens are recorded")
        return ""

    def _report_taken(self, position: Position, segment: Segment) -> tuple[str, Changes]:
        """Answers a report for a group in a batch. The group is complete, so the segment is a repeat or it is lost."""
        account, (group, index, offset, _) = self.state.taken[position.group], position
        if not 0 <= index < len(account.tokens):
            raise LedgerError(f"group {group} has {len(account.tokens)} trajectories, and no number {index}")
        repeated = offset <= account.tokens[index] and segment.digest(offset) in account.digests[index]
        return (RECORDED, ()) if repeated else self._lost(LostKind.DUPLICATE, segment)

    def _check_known(self, group: int) -> None:
        if not -self.state.evals_admitted <= group < self.state.admitted:
            raise LedgerError(f"group {group} does not exist: {self.state.admitted} groups were admitted")

    def _check_segment(self, position: Position, segment: Segment) -> None:
        tokens, cap = len(segment.tokens), self.rules.max_completion_tokens
        length = position.offset + tokens
        if length > cap:
            raise LedgerError(f"{position} with {tokens} more tokens exceeds max_completion_tokens={cap}")
        if length == 0:
            raise LedgerError(f"{position} ends ({segment.finish}) without a token: refuse a prompt that cannot be run")
        if tokens and (newest := segment.versions.item(-1)) > self.state.steps_taken:
            raise LedgerError(
                f"{position} was sampled by version {newest} of {segment.engine}, but only {self.state.steps_taken} "
                "steps were taken: this engine has the weights of another run"
            )

    @staticmethod
    def _lost(kind: LostKind, segment: Segment) -> tuple[str, Changes]:
        tokens = len(segment.tokens)
        return kind, (Lost(kind=kind, tokens=tokens),) if tokens else ()


def _rewards(group: GroupState) -> F32:
    """The reward of every completion; empty if the group was dropped."""
    graded = [] if group.dropped else [t.verdict.reward for t in group.trajectories if t.verdict is not None]
    return np.array(graded, dtype=np.float32)


def _teacher_kl(segments: Sequence[Segment]) -> float | None:
    """The mean of log-prob - teacher's log-prob over their tokens; None if no teacher was asked."""
    gaps = [s.logprobs - s.teacher for s in segments if len(s.teacher)]
    return float(np.concatenate(gaps).mean(dtype=np.float64)) if gaps else None
