"""The queue's messages: one record per request, each with the type of its answer. Server and clients read nothing else.

On the wire a request is an `Envelope` (who asks, which request, its fields) and an answer an `Answer`. Every request may be sent
again with the same id: repeating one changes nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rollout.ledger.records import I32, Answered, EngineInfo, EvalResult, Finish, GroupParts, Heard, Position, Segment, Waiting


@dataclass(frozen=True, kw_only=True, slots=True)
class Envelope:
    client: str  # name of the process and a number made at its start
    id: int  # id of this request, unique within the client
    op: str  # name of a record below
    fields: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    id: int
    error: str = ""  # "" | refused | malformed | stalled
    value: Any = None  # what the request's `answer` says; the message of an error


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """The request was carried out, and the result is on disk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reported:
    """The outcome of a report: `recorded`, or why it was not (`duplicate`, `stale`, `gone`). The reporter need not act on it."""

    outcome: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswersReported:
    outcomes: Sequence[str]  # one per answer, as in `Reported`


@dataclass(frozen=True, kw_only=True, slots=True)
class TakeAnswer:
    groups: Sequence[GroupParts] | None  # the groups of the batch
    waiting: Waiting | None


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetAnswer:
    engines: Sequence[EngineInfo]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalAnswer:
    result: EvalResult | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentLease:
    """`SegmentWork` whose input is not yet joined: its client does that, so that the server copies no tokens."""

    position: Position
    prompt: I32  # [n], its tokens
    completion: Sequence[I32]  # the tokens of each segment and of each observation so far
    max_new_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentsAnswer:
    work: Sequence[SegmentLease]


@dataclass(frozen=True, kw_only=True, slots=True)
class GradingLease:
    """`GradingWork` whose completion is not yet text: its client makes it that, so that the server need not."""

    position: Position
    prompt_id: str
    task: Mapping[str, Any]
    prefill: str
    prompt: str
    metadata: Mapping[str, Any]
    turns: Sequence[Sequence[I32]]  # the tokens of each segment, turn by turn
    observations: Sequence[I32]
    finish: Finish


@dataclass(frozen=True, kw_only=True, slots=True)
class GradingAnswer:
    work: Sequence[GradingLease]


@dataclass(frozen=True, kw_only=True, slots=True)
class StatusAnswer:
    status: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Take:
    answer: ClassVar[type] = TakeAnswer
    step: int
    wait_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Advance:
    answer: ClassVar[type] = Done
    version: int
    engines: Sequence[str]  # `EngineInfo.id`, or a bare name for the engine that has it now


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    answer: ClassVar[type] = Done
    version: int
    engines: Sequence[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewind:
    answer: ClassVar[type] = Done
    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Durable:
    answer: ClassVar[type] = Done
    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    answer: ClassVar[type] = FleetAnswer


@dataclass(frozen=True, kw_only=True, slots=True)
class StartEval:
    answer: ClassVar[type] = Done
    eval_id: str
    split: str
    completions: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AskEval:
    answer: ClassVar[type] = EvalAnswer
    eval_id: str
    wait_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CloseEval:
    answer: ClassVar[type] = Done
    eval_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RegisterEngine:
    answer: ClassVar[type] = Done
    name: str
    url: str
    tp: int
    epoch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class UnregisterEngine:
    answer: ClassVar[type] = Done
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Condemn:
    answer: ClassVar[type] = Done
    engine: str  # `EngineInfo.id`
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseSegments:
    answer: ClassVar[type] = SegmentsAnswer
    holder: str
    count: int
    wait_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportSegment:
    answer: ClassVar[type] = Reported
    holder: str
    position: Position
    segment: Segment


@dataclass(frozen=True, kw_only=True, slots=True)
class RefuseGroup:
    answer: ClassVar[type] = Done
    group: int
    kind: str  # bad_prompt | unrunnable
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseGrading:
    answer: ClassVar[type] = GradingAnswer
    holder: str
    count: int
    wait_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportAnswers:
    """All that a judge has by now: its slots end while the last report is on its way."""

    answer: ClassVar[type] = AnswersReported
    holder: str
    answers: Sequence[Answered]


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    answer: ClassVar[type] = Heard
    holder: str
    role: str  # worker | judge | trainer | launcher
    held: Sequence[Position]
    engine: EngineInfo | None = None  # a worker's own, so that a restarted server knows it again
    sums: Mapping[str, float] = field(default_factory=dict)  # what it did since it began (`meter.py`)


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    answer: ClassVar[type] = StatusAnswer


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    answer: ClassVar[type] = Done


Request = (
    Take | Advance | Published | Rewind | Durable | Fleet | StartEval | AskEval | CloseEval | RegisterEngine | UnregisterEngine
    | Condemn | LeaseSegments | ReportSegment | RefuseGroup | LeaseGrading | ReportAnswers | Heartbeat | Status | Stop
)  # fmt: skip
REQUESTS: dict[str, type] = {kind.__name__: kind for kind in Request.__args__}
