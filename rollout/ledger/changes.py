"""What can happen to a ledger: the records that its journal keeps and that rebuild it.

`Durable` sums up everything that its checkpoint covers, so what it forgets need not be kept: a ledger is the last
`Durable`, followed in their order by the other changes that outlive it and by those made since.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from rollout.ledger.records import Prompt, Segment, Verdict


class DropKind(StrEnum):
    """Why a group is dropped. Nothing is ever dropped for being old."""

    NO_SIGNAL = "no_signal"  # all rewards equal
    BAD_PROMPT = "bad_prompt"  # the engine refuses it
    UNRUNNABLE = "unrunnable"  # its task cannot be graded
    LEDGER_LOST = "ledger_lost"  # the ledger that knew of it was damaged (`rollout/ledger/new_ledger.py`)


class LostKind(StrEnum):
    """Why reported tokens were not recorded."""

    DUPLICATE = "duplicate"  # another sample of the same place was first
    STALE = "stale"  # sampled by an older version than the trajectory allows
    GONE = "gone"  # the group was dropped or forgotten


@dataclass(frozen=True, kw_only=True, slots=True)
class Admitted:
    group: int
    version: int  # published when admitted: no token of the group may be older
    prompt: Prompt
    completions: int
    eval_id: str = ""  # "" for a training group


class Extended(NamedTuple):
    """Like `Graded` a named tuple: nearly all changes are one of the two, and a tuple is made and written in half of the time."""

    group: int
    trajectory: int
    segment: Segment


class Graded(NamedTuple):
    group: int
    trajectory: int
    verdict: Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class Dropped:
    group: int
    kind: DropKind
    reason: str


class TakenGroup(NamedTuple):
    """The account of a group in a batch: all that the ledger must know of it until somebody asks for the batch."""

    group: int
    tokens: Sequence[int]  # of each completion
    digests: Sequence[Sequence[int]]  # of the segments of each (`Segment.digest`)


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    step: int
    groups: Sequence[TakenGroup]


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    version: int
    engines: Sequence[str]  # ids of those that hold it


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewound:
    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Lost:
    kind: LostKind
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalClosed:
    eval_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Stopped:
    """The run is over, until a trainer begins again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """The sums over what is forgotten, and the ledger's position."""

    version: int = 0
    engines: Sequence[str] = ()
    admitted: int = 0  # training groups, the dropped ones included: also the position in the stream of prompts
    evals_admitted: int = 0  # evaluation groups
    steps_taken: int = 0
    oldest_step: int = 0  # the batches before it are forgotten
    bypassing: Sequence[int] = ()  # taken groups that are younger than the oldest untaken one
    drops_since_take: int = 0
    dropped_groups: Mapping[str, int] = field(default_factory=dict)  # by kind
    dropped_tokens: Mapping[str, int] = field(default_factory=dict)
    lost_tokens: Mapping[str, int] = field(default_factory=dict)
    trained_tokens: int = 0  # of forgotten batches
    eval_tokens: int = 0  # of closed evaluations
    stopped: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Durable:
    totals: Totals
    forgotten: Sequence[int]  # groups


Change = Admitted | Extended | Graded | Dropped | Taken | Published | Rewound | Lost | EvalClosed | Stopped | Durable
CHANGES: dict[str, type] = {kind.__name__: kind for kind in Change.__args__}


def outlives(change: Change, durable: Durable) -> bool:
    """Whether an earlier change is still needed: it is part of a group or a batch that is not forgotten."""
    match change:
        case Admitted() | Extended() | Graded() | Dropped():
            return change.group not in durable.forgotten
        case Taken():
            return change.step >= durable.totals.oldest_step
    return False
