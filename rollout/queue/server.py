"""The queue server without its socket: it decides each request, writes the journal, and returns the answers.

    receive(route, bytes) ...  decides a request at once, or parks it if it must wait
    settle() -> answers        serves parked requests, takes leases back from silent holders, and commits the journal

Answers may be sent only after `settle`, so everything that was answered is on disk. There is one thread, one ledger and one
journal.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.ledger.changes import Change, DropKind, Lost, Published
from rollout.ledger.journal import Journal
from rollout.ledger.leases import Lease
from rollout.ledger.ledger import Ledger, LedgerError
from rollout.ledger.records import EngineInfo, Finish, Heard, Prompt, Waiting
from rollout.ledger.wire import WireError, decode, pack, unpack
from rollout.prompts.stream import PromptStream
from rollout.queue import messages as m
from rollout.queue import status
from rollout.queue.current_trainer import CurrentTrainer, LateCopy
from rollout.queue.roster import Roster

log = logging.getLogger("queue")
LONGEST_MESSAGE_BYTES = 32 * 1024 * 1024
LONGEST_WAIT_S = 60.0
CLIENTS_KNOWN = 256  # clients whose last sums are remembered, because figures are the difference since the last request
PAUSE_S = 1.0  # if two turns are further apart, the server itself was stopped
TRAINER_REQUESTS = (m.Take, m.Advance, m.Published, m.Rewind, m.Durable, m.Condemn, m.Stop)
ROLES: dict[type, str] = {
    m.LeaseSegments: "worker", m.ReportSegment: "worker", m.LeaseGrading: "judge", m.ReportAnswers: "judge",
}  # fmt: skip


class Stalled(RuntimeError):
    """Nothing has changed for `stall_s`, so a wait would never end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parked:
    route: bytes
    envelope: m.Envelope
    request: Any
    due_s: float


class QueueServer:
    """The caller gives the time: `now` is always in seconds on a monotonic clock."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        journal: Journal,
        stream: PromptStream,
        evals: Mapping[str, Sequence[Prompt]],
        lease_s: float,
        stall_s: float,
        now: float,
    ) -> None:
        self._ledger = ledger
        self._journal = journal
        self._stream = stream
        self._evals = evals
        self._stall_s = stall_s
        self._roster = Roster(lease_s)
        self._parked: dict[tuple[str, int], _Parked] = {}
        self._answers: list[tuple[bytes, bytes]] = []
        self._trainer = CurrentTrainer()
        self._now = self._moved_s = now
        self._asked: dict[str, float] = {}  # what the trainer waits for -> the time when it first asked
        self._busy: dict[str, status.Busy] = {}  # client -> the sums at its last request
        self._taken_back: Counter[str] = Counter()  # number of leases, by the reason
        self._asking = ""  # the client whose request is being decided
        self._decide: dict[type, Callable[[Any], Any]] = {
            m.Take: self._take, m.Advance: self._advance, m.Published: self._published, m.Rewind: self._rewind,
            m.Durable: self._durable, m.Condemn: self._condemn, m.Fleet: self._tell_fleet, m.Status: self._status,
            m.StartEval: self._start_eval, m.AskEval: self._ask_eval, m.CloseEval: self._close_eval, m.Stop: self._stop,
            m.RegisterEngine: self._register_engine, m.UnregisterEngine: self._unregister_engine,
            m.LeaseSegments: self._lease_segments, m.ReportSegment: self._report_segment, m.RefuseGroup: self._refuse,
            m.LeaseGrading: self._lease_grading, m.ReportAnswers: self._report_answers, m.Heartbeat: self._heartbeat,
        }  # fmt: skip

    def receive(self, route: bytes, data: bytes, now: float) -> None:
        """Handles one message. No message can damage the ledger."""
        self._turn(now)
        try:
            if len(data) > LONGEST_MESSAGE_BYTES:
                raise WireError(f"a message of {len(data)} bytes is longer than {LONGEST_MESSAGE_BYTES}")
            envelope = unpack(m.Envelope, data)
        except WireError as error:
            self._answer(route, m.Answer(id=0, error="malformed", value=str(error)))
            return
        try:
            kind = m.REQUESTS.get(envelope.op)
            if kind is None:
                raise WireError(f"unknown request {envelope.op!r}")
            request = decode(kind, envelope.fields)
        except WireError as error:
            self._answer(route, m.Answer(id=envelope.id, error="malformed", value=str(error)))
            return
        self._parked.pop((envelope.client, envelope.id), None)  # the client has sent it again
        if holder := getattr(request, "holder", ""):
            self._roster.heard(holder, now, ROLES.get(kind, ""))
        due_s = now + min(max(getattr(request, "wait_s", 0.0), 0.0), LONGEST_WAIT_S)
        self._serve(_Parked(route=route, envelope=envelope, request=request, due_s=due_s))

    def settle(self, now: float) -> list[tuple[bytes, bytes]]:
        """Ends a turn and returns the answers to send. Raises JournalError, and then no answer may be sent."""
        self._turn(now)
        for name in self._roster.expired(now):
            returned = self._take_back(name, "silent")
            log.warning("%s has sent nothing for too long and is removed; %d leases are taken back", name, returned)
        self._serve_parked(now)
        self._journal.commit()
        answers, self._answers = self._answers, []
        return answers

    # Turns.

    def _serve_parked(self, now: float) -> None:
        """Serves the requests that can be served now, or that have waited long enough."""
        present = self._roster.holders
        for key, parked in list(self._parked.items()):
            request = parked.request
            match request:
                case m.LeaseSegments():
                    may_be = self._ledger.leases.to_generate or self._ledger.may_admit()
                case m.LeaseGrading():
                    may_be = self._ledger.leases.to_grade(request.holder)
                case _:
                    may_be = True
            holder = getattr(request, "holder", "")
            if holder and holder not in present:
                del self._parked[key]  # the holder is gone, so nobody would work on the lease
            elif may_be or now >= parked.due_s:
                self._serve(parked)

    def _turn(self, now: float) -> None:
        if now - self._now > PAUSE_S:
            self._roster.pause(now - self._now)
        self._now = now

    def _serve(self, parked: _Parked) -> None:
        key = (parked.envelope.client, parked.envelope.id)
        self._asking = parked.envelope.client
        answer_id = parked.envelope.id
        try:
            if isinstance(parked.request, TRAINER_REQUESTS):
                self._trainer.check(self._asking, answer_id, begins=isinstance(parked.request, m.Rewind))
            value = self._decide[type(parked.request)](parked.request)
            if value is None and self._now < parked.due_s:
                self._parked[key] = parked
                return
            if value is None:
                value = self._nothing_yet(parked.request)
            answer = m.Answer(id=answer_id, value=value)
        except LateCopy:
            self._parked.pop(key, None)
            return
        except LedgerError as error:
            answer = m.Answer(id=answer_id, error="refused", value=str(error))
        except Stalled as error:
            answer = m.Answer(id=answer_id, error="stalled", value=str(error))
        self._parked.pop(key, None)
        self._answer(parked.route, answer)

    def _take_back(self, holder: str, why: str) -> int:
        """Takes back the leases of a holder that will not report them. Returns how many there were."""
        returned = self._ledger.release(holder)
        self._taken_back[why] += returned
        return returned

    def _answer(self, route: bytes, answer: m.Answer) -> None:
        if answer.error:
            log.warning("%s: %s", answer.error, answer.value)
        self._answers.append((route, pack(answer)))

    def _do(self, changes: tuple[Change, ...]) -> m.Done:
        self._ledger.apply(*changes)
        self._journal.append(changes)
        if any(not isinstance(change, Lost | Published) for change in changes):
            self._moved_s = self._now
        return m.Done()

    # Requests. A method returns None if the request must wait.

    def _advance(self, request: m.Advance) -> m.Done:
        done = self._do(self._ledger.advance(request.version, self._engine_ids(request.engines)))
        self._ledger.unload_trained()
        return done

    def _published(self, request: m.Published) -> m.Done:
        return self._do(self._ledger.published(request.version, self._engine_ids(request.engines)))

    def _rewind(self, request: m.Rewind) -> m.Done:
        return self._do(self._ledger.rewind(request.version))

    def _durable(self, request: m.Durable) -> m.Done:
        return self._do(self._ledger.durable(request.version))

    def _tell_fleet(self, _: m.Fleet) -> m.FleetAnswer:
        self._roster.tell()
        return m.FleetAnswer(engines=self._fleet())

    def _stop(self, _: m.Stop) -> m.Done:
        return self._do(self._ledger.stop())

    @property
    def _closing(self) -> bool:
        """Whether the run is over. A stopped run that is resumed with more steps is not over, even before its trainer starts."""
        steps = self._ledger.rules.total_steps
        return self._ledger.state.stopped and (steps is None or self._ledger.version >= steps)

    def _register_engine(self, request: m.RegisterEngine) -> m.Done:
        return self._register(EngineInfo(name=request.name, url=request.url, tp=request.tp, epoch=request.epoch))

    def _unregister_engine(self, request: m.UnregisterEngine) -> m.Done:
        self._roster.unregister(request.name)
        self._roster.holders.pop(request.name, None)
        self._take_back(request.name, "left")
        return m.Done()

    def _report_segment(self, request: m.ReportSegment) -> m.Reported:
        outcome, changes = self._ledger.report(request.position, request.segment, request.holder)
        self._do(changes)
        return m.Reported(outcome=outcome)

    def _report_answers(self, request: m.ReportAnswers) -> m.AnswersReported:
        outcomes = []
        for answered in request.answers:
            outcome, changes = self._ledger.answer(answered, request.holder)
            self._do(changes)
            outcomes.append(outcome)
        return m.AnswersReported(outcomes=outcomes)

    def _take(self, request: m.Take) -> m.TakeAnswer | None:
        changes = self._ledger.take(request.step)
        if changes is None:
            if self._roster.newcomers(self._ledger.state.engines):
                return self._waiting(fleet_changed=True)
            self._check_stall(f"step {request.step}")
            return None
        self._asked.clear()
        self._do(changes)
        for group in self._ledger.unloaded(request.step):  # needed after the trainer went back, or after the server was restarted
            self._ledger.load(group, self._journal.group(group))
        return m.TakeAnswer(groups=self._ledger.parts(request.step), waiting=None)

    def _waiting(self, *, fleet_changed: bool) -> m.TakeAnswer:
        return m.TakeAnswer(groups=None, waiting=Waiting(table=self._table(), fleet_changed=fleet_changed))

    def _close_eval(self, request: m.CloseEval) -> m.Done:
        return self._do(self._ledger.close_eval(request.eval_id))

    def _start_eval(self, request: m.StartEval) -> m.Done:
        prompts = self._evals.get(request.split)
        if not prompts:
            known = ", ".join(name for name, found in self._evals.items() if found) or "none"
            raise LedgerError(f"the split {request.split!r} has no problems to evaluate on (splits with problems: {known})")
        return self._do(self._ledger.admit_eval(request.eval_id, prompts, request.completions))

    def _ask_eval(self, request: m.AskEval) -> m.EvalAnswer | None:
        result = self._ledger.eval_result(request.eval_id)
        if result is None:
            self._check_stall(f"evaluation {request.eval_id}")
            return None
        self._asked.clear()
        return m.EvalAnswer(result=result)

    def _register(self, engine: EngineInfo) -> m.Done:
        self._roster.heard(engine.name, self._now, "worker")
        if self._roster.register(engine):
            self._take_back(engine.name, "restarted")
        return m.Done()

    def _condemn(self, request: m.Condemn) -> m.Done:
        name = self._roster.condemn(request.engine, request.reason)
        if name is not None:
            log.warning("engine %s must be restarted: %s", request.engine, request.reason)
            self._take_back(name, "condemned")
        return m.Done()

    def _refuse(self, request: m.RefuseGroup) -> m.Done:
        if request.kind not in (DropKind.BAD_PROMPT, DropKind.UNRUNNABLE):
            raise LedgerError(f"a group may be refused as {DropKind.BAD_PROMPT} or {DropKind.UNRUNNABLE}, not {request.kind!r}")
        log.warning("group %d is dropped (%s): %s", request.group, request.kind, request.reason)
        return self._do(self._ledger.drop(request.group, DropKind(request.kind), request.reason))

    def _lease_segments(self, request: m.LeaseSegments) -> m.SegmentsAnswer | None:
        ledger, engine = self._ledger, self._roster.engine_id(request.holder)
        if self._closing or not engine:
            return None
        leases = ledger.lease_segments(engine, request.count, request.holder)
        while len(leases) < request.count and engine in ledger.state.engines and ledger.may_admit():
            self._do(ledger.admit(self._stream.at(ledger.admitted)))
            leases += ledger.lease_segments(engine, request.count - len(leases), request.holder)
        self._note_hunger(request.holder, fed=bool(leases))
        return m.SegmentsAnswer(work=tuple(map(self._segment_work, leases))) if leases else None

    def _lease_grading(self, request: m.LeaseGrading) -> m.GradingAnswer | None:
        leases = [] if self._closing else self._ledger.lease_grading(request.holder, request.count)
        self._note_hunger(request.holder, fed=bool(leases))
        return m.GradingAnswer(work=tuple(map(self._grading_work, leases))) if leases else None

    def _note_hunger(self, name: str, *, fed: bool) -> None:
        holder = self._roster.holders.get(name)
        if holder is not None:
            holder.hungry_s = None if fed else self._now if holder.hungry_s is None else holder.hungry_s

    def _heartbeat(self, request: m.Heartbeat) -> Heard:
        holder = self._roster.heard(request.holder, self._now, request.role)
        holder.sums = request.sums
        if request.engine is not None:
            self._register(request.engine)
        leased = set(self._ledger.leases.held(request.holder))
        cancel = [p for p in request.held if p not in leased and not self._ledger.adopt(request.holder, p)]
        # If two heartbeats in a row do not list a lease, the answer that granted it never reached the holder.
        unclaimed = leased.difference(request.held)
        for position in unclaimed & holder.unclaimed:
            self._ledger.leases.release(request.holder, position)
        holder.unclaimed = frozenset(unclaimed)
        return Heard(cancel=cancel, closing=self._closing, condemned=self._roster.why_condemned(request.holder))

    def _nothing_yet(self, request: m.Request) -> Any:
        """The answer to a request that has waited long enough."""
        match request:
            case m.Take():
                return self._waiting(fleet_changed=any(engine.version is None for engine in self._fleet()))
            case m.LeaseSegments():
                return m.SegmentsAnswer(work=())
            case m.LeaseGrading():
                return m.GradingAnswer(work=())
            case m.AskEval():
                return m.EvalAnswer(result=None)
        raise LedgerError(f"{type(request).__name__} has no answer")

    # The contents of answers.

    def _fleet(self) -> list[EngineInfo]:
        return self._roster.fleet(self._ledger.version, self._ledger.state.engines)

    def _engine_ids(self, engines: Sequence[str]) -> list[str]:
        """Engine ids, where a bare name is replaced by the id of the engine that has this name now, if there is one."""
        return [engine_id for e in engines if (engine_id := e if "@" in e else self._roster.engine_id(e))]

    def _status(self, _: m.Status) -> m.StatusAnswer:
        busy = status.busy(self._roster)
        figures = status.figures(self._ledger, busy, self._busy.get(self._asking, status.Busy()))
        self._busy[self._asking] = busy
        if len(self._busy) > CLIENTS_KNOWN:  # each start of a client uses a new name, so the oldest is removed
            del self._busy[next(iter(self._busy))]
        standing = status.status(self._ledger, self._roster, self._now)
        return m.StatusAnswer(
            status=standing | {"figures": figures, "closing": self._closing, "leases_taken_back": dict(self._taken_back)}
        )

    def _table(self) -> str:
        return status.table(self._ledger, self._roster, self._asked, self._now)

    def _check_stall(self, what: str) -> None:
        """Raises Stalled if nothing was admitted, generated, graded or taken for `stall_s`."""
        since_s = max(self._asked.setdefault(what, self._now), self._moved_s)
        if self._now - since_s > self._stall_s:
            raise Stalled(f"{what} does not come: nothing has moved for {self._now - since_s:.0f} s\n{self._table()}")

    def _segment_work(self, lease: Lease) -> m.SegmentLease:
        tokens = self._ledger.completion(lease.position)
        prompt = self._ledger.prompt(lease.position.group).tokens
        return m.SegmentLease(position=lease.position, prompt=prompt, completion=tokens, max_new_tokens=lease.max_new_tokens)

    def _grading_work(self, lease: Lease) -> m.GradingLease:
        prompt = self._ledger.prompt(lease.position.group)
        trajectory = self._ledger.trajectory(lease.position)
        return m.GradingLease(
            position=lease.position,
            prompt_id=prompt.id,
            task=prompt.task,
            prefill=prompt.prefill,
            prompt=prompt.text,
            metadata=prompt.metadata,
            turns=trajectory.turns(),
            observations=[observation.tokens for observation in trajectory.observations],
            finish=trajectory.finish or Finish.CUT,
        )
