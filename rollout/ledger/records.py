"""The records that the parts of the system exchange.

Frozen, keyword-only, slotted dataclasses; arrays are numpy, and the comment of each field gives its shape. Invariants are
checked on construction, so a misaligned record cannot exist. A segment has n tokens, and a trajectory has L tokens.
"""

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]

NOT_SAMPLED = -1
"""The version of a token that no policy sampled: a token of the prompt or of an observation."""


def _none() -> F32:
    return np.empty(0, dtype=np.float32)


class RecordError(ValueError):
    """A record whose fields contradict one another."""


class Finish(StrEnum):
    """Why a segment or a trajectory ended."""

    STOP = "stop"  # a stop token was sampled, which ends a turn
    LENGTH = "length"  # the completion reached its cap
    CUT = "cut"  # the segment reached `segment_tokens`: the trajectory goes on in another segment


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """The prompt of one group."""

    id: str
    tokens: I32  # [n], n >= 1, rendered through the model's chat template, the prefill included
    task: Mapping[str, Any]  # how to grade an answer; only `reward/` reads it
    prefill: str = ""  # the beginning of the answer; the prompt's tokens include it
    text: str = ""  # what the problem asks, without the chat template
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_array("tokens", self.tokens, np.int32)
        if not len(self.tokens):
            raise RecordError(f"prompt {self.id!r} has no tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """The tokens of one engine call."""

    tokens: I32  # [n]
    logprobs: F32  # [n], natural log, under the policy and the temperature that sampled each token
    versions: I32  # [n], non-decreasing
    finish: Finish
    engine: str
    teacher: F32 = field(default_factory=_none)  # [n], log-probs under the teacher; [0] if no teacher is asked

    def __post_init__(self) -> None:
        _check_array("tokens", self.tokens, np.int32)
        _check_array("logprobs", self.logprobs, np.float32)
        _check_array("versions", self.versions, np.int32)
        _check_same_length(tokens=self.tokens, logprobs=self.logprobs, versions=self.versions)
        versions = self.versions
        if versions.strides != (0,) and (versions[1:] < versions[:-1]).any():  # stride 0: one version throughout
            raise RecordError(f"versions of a segment must not decrease, got {versions.tolist()}")
        if not math.isfinite(np.add.reduce(self.logprobs)) and not np.isfinite(self.logprobs).all():  # the sum is fast to check
            raise RecordError("a segment holds log-probs that are not finite")
        if len(self.teacher):
            _check_array("teacher", self.teacher, np.float32)
            _check_same_length(tokens=self.tokens, teacher=self.teacher)
            if not np.isfinite(self.teacher).all():
                raise RecordError("a segment holds log-probs of the teacher that are not finite")

    def digest(self, offset: int) -> int:
        """A checksum over the tokens, their log-probs, and the offset in the completion."""
        return zlib.crc32(np.ascontiguousarray(self.logprobs).data, zlib.crc32(np.ascontiguousarray(self.tokens).data, offset))


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """The answer of an environment to a turn. The next turn follows it. No policy sampled its tokens."""

    tokens: I32  # [n], n >= 1, from the end of the turn to where the model begins the next one
    parts: Mapping[str, float] = field(default_factory=dict)  # figures, which are summed over the episode
    wall_s: float = 0.0

    def __post_init__(self) -> None:
        _check_array("tokens", self.tokens, np.int32)
        if not len(self.tokens):
            raise RecordError("an observation has no tokens")


def in_order(segments: Sequence[Segment], observations: Sequence[Observation]) -> "Iterator[Segment | Observation]":
    """The segments and the observations of a completion. A segment that stops ends a turn; the next observation follows it."""
    answers = iter(observations)
    for segment in segments:
        yield segment
        if segment.finish is Finish.STOP and (answer := next(answers, None)) is not None:
            yield answer


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """A prompt and one completion, token by token, graded. A completion of several turns is an episode."""

    tokens: I32  # [L]
    sampled: Bool  # [L], True where the policy sampled the token
    logprobs: F32  # [L], behaviour log-probs; 0 where not sampled
    versions: I32  # [L], NOT_SAMPLED where not sampled
    teacher: F32 = field(default_factory=_none)  # [L], log-probs under the teacher, 0 where not sampled; [0] without a teacher
    reward: float
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""  # why it did not get the full reward
    finish: Finish
    segments: int  # how many engine calls it took
    turns: int = 1
    environment_s: float = 0.0  # how long its environment took, the verdict included

    def __post_init__(self) -> None:
        _check_array("tokens", self.tokens, np.int32)
        _check_array("sampled", self.sampled, np.bool_)
        _check_array("logprobs", self.logprobs, np.float32)
        _check_array("versions", self.versions, np.int32)
        _check_same_length(tokens=self.tokens, sampled=self.sampled, logprobs=self.logprobs, versions=self.versions)
        if len(self.teacher):
            _check_array("teacher", self.teacher, np.float32)
            _check_same_length(tokens=self.tokens, teacher=self.teacher)
        if not np.array_equal(self.versions == NOT_SAMPLED, ~self.sampled):
            raise RecordError("`versions` and `sampled` disagree about which tokens were sampled")
        if not self.sampled.any():
            raise RecordError("a trajectory without a sampled token has nothing to train on")
        if not np.isfinite(self.reward):
            raise RecordError(f"reward {self.reward} is not finite")

    @classmethod
    def of(cls, *, prompt: I32, completion: "Completion") -> "Trajectory":
        """Joins the tokens of the prompt, of the segments and of the observations, unchanged."""
        segments, observations, verdict = completion.segments, completion.observations, completion.verdict
        taught = any(len(s.teacher) for s in segments)
        pieces = [_unsampled(prompt, taught=taught)]
        for piece in in_order(segments, observations):
            pieces.append(piece if isinstance(piece, Segment) else _unsampled(piece.tokens, taught=taught))
        versions = np.concatenate([piece.versions for piece in pieces])
        return cls(
            tokens=np.concatenate([piece.tokens for piece in pieces]),
            sampled=versions != NOT_SAMPLED,
            logprobs=np.concatenate([piece.logprobs for piece in pieces]),
            versions=versions,
            teacher=np.concatenate([piece.teacher for piece in pieces]),
            reward=verdict.reward,
            reward_parts=_summed([verdict.parts, *(o.parts for o in observations)]),
            reason=verdict.reason,
            finish=completion.finish,
            segments=len(segments),
            turns=len(observations) + 1,
            environment_s=verdict.wall_s + sum(o.wall_s for o in observations),
        )

    @property
    def completion_tokens(self) -> int:
        return int(self.sampled.sum())

    def lag(self, version: int) -> int:
        """The largest lag, in versions, of its tokens behind a trainer at `version`."""
        return version - int(self.versions[self.sampled].min())


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The G >= 2 trajectories of one prompt."""

    prompt_id: str
    index: int  # order of admission
    trajectories: Sequence[Trajectory]

    def __post_init__(self) -> None:
        if len(self.trajectories) < 2:
            raise RecordError(f"group {self.index} has {len(self.trajectories)} trajectories; an advantage needs two")

    @property
    def rewards(self) -> F32:
        return np.array([t.reward for t in self.trajectories], dtype=np.float32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The groups of one RL step, which takes the weights from version `step` to `step + 1`."""

    step: int
    groups: Sequence[Group]

    @property
    def trajectories(self) -> list[Trajectory]:
        return [t for g in self.groups for t in g.trajectories]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The result of grading one completion."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    cpu_s: float = 0.0
    wall_s: float = 0.0

    def __post_init__(self) -> None:
        if not np.isfinite(self.reward):
            raise RecordError(f"reward {self.reward} is not finite")


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """A graded completion as it was sampled, with the answers of its environment."""

    segments: Sequence[Segment]
    observations: Sequence[Observation] = ()
    finish: Finish
    verdict: Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupParts:
    """A `Group` before it is assembled: the prompt, which is stored once, and its completions."""

    prompt_id: str
    index: int
    prompt: I32  # [n], the prompt's tokens
    completions: Sequence[Completion]

    def assemble(self) -> Group:
        trajectories = tuple(Trajectory.of(prompt=self.prompt, completion=completion) for completion in self.completions)
        return Group(prompt_id=self.prompt_id, index=self.index, trajectories=trajectories)


class Position(NamedTuple):
    """The position of a lease: its holder continues this trajectory at this offset. Reports are accepted by position."""

    group: int  # index of the group; negative for a group of an evaluation
    trajectory: int  # 0 <= trajectory < G
    offset: int  # completion tokens that are already recorded, those of observations included
    attempt: int = 0  # how often the episode began again, because its environment could not be rebuilt


class Answered(NamedTuple):
    """The answer to a lease to grade: a verdict, or an observation, after which the model takes another turn.

    With neither of them the episode begins again.
    """

    position: Position
    verdict: "Verdict | None" = None
    observation: Observation | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentWork:
    """A lease to generate: continue `input_tokens` by at most `max_new_tokens` tokens, and report them at `position`."""

    position: Position
    input_tokens: I32  # [n], the prompt and the completion so far
    max_new_tokens: int  # min(segment_tokens, max_completion_tokens - offset)


@dataclass(frozen=True, kw_only=True, slots=True)
class GradingWork:
    """A lease to grade a completion, or to continue it by an observation: its last turn has ended."""

    position: Position
    prompt_id: str
    task: Mapping[str, Any]
    prefill: str  # the beginning of the first turn, which is part of the prompt
    prompt: str = ""  # what the problem asks, without the chat template
    metadata: Mapping[str, Any] = field(default_factory=dict)  # the problem's
    turns: Sequence[str]  # what was sampled in each turn, decoded, without special tokens
    observations: Sequence[I32] = ()  # the tokens after each turn but the last
    ends: Sequence[int]  # the token that ended each turn; NOT_SAMPLED where a turn has none
    tokens: int  # how many were sampled, in all turns
    finish: Finish


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineInfo:
    """An engine of the fleet. A restarted engine has a new epoch and counts as a new one: it holds no version until a push."""

    name: str
    url: str
    tp: int
    epoch: int  # changes whenever the engine's weights may have changed without a push
    version: int | None = None  # the published version if the engine holds it, otherwise None

    @property
    def id(self) -> str:
        return f"{self.name}@{self.epoch}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """The batch is not ready yet."""

    table: str  # a text for people: who waits for what
    fleet_changed: bool  # a registered engine lacks the published version, so push to it while waiting


@dataclass(frozen=True, kw_only=True, slots=True)
class Heard:
    """The answer to a heartbeat."""

    cancel: Sequence[Position]  # held by the caller but no longer needed: stop this work
    closing: bool  # the run is over: exit
    condemned: str = ""  # why a push to the caller's engine failed: restart the engine with a new epoch; "" if none failed


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalPrompt:
    prompt_id: str
    rewards: F32  # [k], one per completion; empty if the engine refused the prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalResult:
    """The rewards of an evaluation, and the versions that sampled its completions."""

    eval_id: str
    version_min: int  # version of the oldest token; tokens sampled after a push have a higher one
    version_max: int  # version of the newest token
    tokens: int  # sampled tokens
    prompts: Sequence[EvalPrompt]
    teacher_kl: float | None = None  # mean of log-prob - teacher's log-prob over the tokens that a teacher was asked about

    @property
    def mean_reward(self) -> float:
        """The mean over all completions. A refused prompt counts as one failed completion."""
        rewards = [r for p in self.prompts for r in (p.rewards.tolist() or [0.0])]
        return sum(rewards) / max(len(rewards), 1)

    @property
    def pass_rate(self) -> float:
        """The share of completions with the full reward of 1. A refused prompt counts as one failed completion."""
        passed = [r >= 1.0 for p in self.prompts for r in (p.rewards.tolist() or [0.0])]
        return sum(passed) / max(len(passed), 1)


def _unsampled(tokens: I32, *, taught: bool) -> Segment:
    """The tokens of a prompt or of an observation, in the form of a segment."""
    n = len(tokens)
    return Segment(
        tokens=tokens,
        logprobs=np.zeros(n, np.float32),
        versions=np.full(n, NOT_SAMPLED, np.int32),
        finish=Finish.CUT,
        engine="",
        teacher=np.zeros(n if taught else 0, np.float32),
    )


def _summed(parts: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    if len(parts) == 1:
        return parts[0]
    return {name: sum(figures.get(name, 0.0) for figures in parts) for name in dict.fromkeys(chain(*parts))}


def _check_array(name: str, array: Any, dtype: type[np.generic]) -> None:
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.type is not dtype:
        got = f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
        raise RecordError(f"`{name}` must be a vector of {np.dtype(dtype).name}, got {got}")


def _check_same_length(**arrays: npt.NDArray[Any]) -> None:
    if len(set(map(len, arrays.values()))) > 1:
        raise RecordError(f"lengths differ: { {name: len(a) for name, a in arrays.items()} }")
