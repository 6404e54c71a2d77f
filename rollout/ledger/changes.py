"""The changes of a ledger. The journal keeps these records, and replaying them rebuilds the ledger.

`Durable` holds the sums over everything that its checkpoint covers, so older changes can be deleted. To rebuild a ledger,
apply the last `Durable`, then in their order the earlier changes that outlive it and all later changes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from rollout.ledger.records import Observation, Prompt, Segment, Verdict


class DropKind(StrEnum):
    """Why a group is dropped. Nothing is ever dropped for being old."""

    NO_SIGNAL = "no_signal"  # all rewards equal
    BAD_PROMPT = "bad_prompt"  # the engine refuses the prompt
    UNRUNNABLE = "unrunnable"  # its task cannot be graded
    LEDGER_LOST = "ledger_lost"  # the ledger that held the group was damaged (`rollout/ledger/new_ledger.py`)


class LostKind(StrEnum):
    """Why reported tokens were not recorded, or are recorded no more."""

    DUPLICATE = "duplicate"  # another report for the same position came first
    STALE = "stale"  # sampled by a version older than the trajectory's floor
    GONE = "gone"  # the group was dropped or forgotten
    RESTARTED = "restarted"  # the episode began again


@dataclass(frozen=True, kw_only=True, slots=True)
class Admitted:
    group: int
    version: int  # the published version at admission: no token of the group may be older
    prompt: Prompt
    completions: int
    eval_id: str = ""  # "" for a training group


class Extended(NamedTuple):
    """A named tuple, like `Graded`: nearly all changes are of these two kinds, and a tuple takes half the time of a dataclass."""

    group: int
    trajectory: int
    segment: Segment


class Observed(NamedTuple):
    """The environment has answered the last turn, and the next one may begin."""

    group: int
    trajectory: int
    observation: Observation


class Restarted(NamedTuple):
    """The episode begins again at its prompt."""

    group: int
    trajectory: int


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
    """The account of a group in a batch. The ledger needs no more of the group until the batch is requested."""

    group: int
    tokens: Sequence[int]  # [G], the length of each completion, observations included
    observed: Sequence[int]  # [G], the tokens of observations among them
    digests: Sequence[Sequence[int]]  # [G], the digests of the segments of each completion (`Segment.digest`)


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    step: int
    groups: Sequence[TakenGroup]


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    version: int
    engines: Sequence[str]  # ids of the engines that hold this version


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
    """The run is over until a trainer starts again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """The sums over everything that is forgotten, and the position of the ledger."""

    version: int = 0
    engines: Sequence[str] = ()
    admitted: int = 0  # training groups, dropped ones included; also the position in the stream of prompts
    evals_admitted: int = 0  # evaluation groups
    steps_taken: int = 0
    oldest_step: int = 0  # the batches before it are forgotten
    bypassing: Sequence[int] = ()  # taken groups that are younger than the oldest untaken one
    drops_since_take: int = 0
    dropped_groups: Mapping[str, int] = field(default_factory=dict)  # by kind
    dropped_tokens: Mapping[str, int] = field(default_factory=dict)
    lost_tokens: Mapping[str, int] = field(default_factory=dict)
    trained_tokens: int = 0  # in forgotten batches
    eval_tokens: int = 0  # in closed evaluations
    stopped: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Durable:
    totals: Totals
    forgotten: Sequence[int]  # indices of groups


Change = (
    Admitted | Extended | Observed | Restarted | Graded | Dropped | Taken | Published | Rewound | Lost | EvalClosed | Stopped
    | Durable
)  # fmt: skip
CHANGES: dict[str, type] = {kind.__name__: kind for kind in Change.__args__}
