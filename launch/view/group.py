"""A group as the pages show it: its prompt and its completions side by side, and each completion token by token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from launch.view.token_text import TokenText
from rollout.ledger.changes import Admitted, Change, Extended, Graded, Observed, Restarted
from rollout.ledger.records import Observation, Prompt, Segment, Verdict

Piece = Segment | Observation


@dataclass(kw_only=True, slots=True)
class Attempt:
    """What the ledger holds of one completion, finished or not."""

    pieces: list[Piece] = field(default_factory=list)
    verdict: Verdict | None = None

    @property
    def tokens(self) -> list[int]:
        return [token for piece in self.pieces for token in piece.tokens.tolist()]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """A group as it is in the ledger."""

    prompt: Prompt
    attempts: Sequence[Attempt]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One completion beside the others of its group."""

    number: int
    text: str  # at most so many characters as asked for
    characters: int
    tokens: int  # observations included
    sampled: int  # tokens that the policy sampled
    segments: int
    turns: int
    versions: tuple[int, int] | None  # the first and the last that sampled a token; None before the first token
    finish: str  # why its last segment ended
    reward: float | None  # None until it is graded
    reason: str
    parts: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPage:
    problem: str
    prompt: str  # as the model reads it, through its chat template
    prompt_tokens: int
    samples: Sequence[Sample]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A stretch of tokens: the prompt, one segment, or one observation."""

    kind: str  # prompt, segment or observation
    begin: int
    end: int
    engine: str  # "" where nothing was sampled
    finish: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenPage:
    """A completion token by token. Of a token that no policy sampled, version, lag and log-prob are None."""

    texts: Sequence[str]
    ids: Sequence[int]
    versions: Sequence[int | None]
    lags: Sequence[int | None]  # behind the step that trained on it; None until then
    logprobs: Sequence[float | None]  # under the policy that sampled it
    parts: Sequence[Part]
    sample: Sample


def recorded(changes: Sequence[Change]) -> Recorded | None:
    """None if the ledger has forgotten the group."""
    admitted = next((change for change in changes if isinstance(change, Admitted)), None)
    if admitted is None:
        return None
    attempts = [Attempt() for _ in range(admitted.completions)]
    for change in changes:
        match change:
            case Extended(_, number, piece) | Observed(_, number, piece):
                attempts[number].pieces.append(piece)
            case Restarted(_, number):
                attempts[number] = Attempt()
            case Graded(_, number, verdict):
                attempts[number].verdict = verdict
    return Recorded(prompt=admitted.prompt, attempts=attempts)


def group_page(group: Recorded, text: TokenText, longest: int) -> GroupPage:
    return GroupPage(
        problem=group.prompt.id,
        prompt=text.whole(group.prompt.tokens.tolist())[:longest],
        prompt_tokens=len(group.prompt.tokens),
        samples=[_sample(number, attempt, text, longest) for number, attempt in enumerate(group.attempts)],
    )


def token_page(group: Recorded, number: int, trained_at: int | None, text: TokenText) -> TokenPage:
    """trained_at: the version of the weights that the group was trained with, if it was."""
    attempt, prompt = group.attempts[number], group.prompt.tokens.tolist()
    ids, versions, logprobs = [*prompt], [None for _ in prompt], [None for _ in prompt]
    texts = text.each(prompt)
    parts = [Part(kind="prompt", begin=0, end=len(prompt), engine="", finish="")]
    for piece in attempt.pieces:
        parts.append(_part(piece, len(ids)))
        ids += piece.tokens.tolist()
        if isinstance(piece, Segment):
            versions += piece.versions.tolist()
            logprobs += [round(value, 5) for value in piece.logprobs.tolist()]
        else:
            versions += [None for _ in piece.tokens]
            logprobs += [None for _ in piece.tokens]
    texts += text.each(attempt.tokens)
    return TokenPage(
        texts=texts,
        ids=ids,
        versions=versions,
        lags=[None if trained_at is None or version is None else trained_at - version for version in versions],
        logprobs=logprobs,
        parts=parts,
        sample=_sample(number, attempt, text, 0),
    )


def _part(piece: Piece, begin: int) -> Part:
    end = begin + len(piece.tokens)
    if isinstance(piece, Segment):
        return Part(kind="segment", begin=begin, end=end, engine=piece.engine, finish=piece.finish.value)
    return Part(kind="observation", begin=begin, end=end, engine="", finish="")


def _sample(number: int, attempt: Attempt, text: TokenText, longest: int) -> Sample:
    segments = [piece for piece in attempt.pieces if isinstance(piece, Segment)]
    whole = text.whole(attempt.tokens)
    verdict = attempt.verdict
    sampled = [piece for piece in segments if len(piece.versions)]
    return Sample(
        number=number,
        text=whole[:longest],
        characters=len(whole),
        tokens=sum(len(piece.tokens) for piece in attempt.pieces),
        sampled=sum(len(piece.tokens) for piece in segments),
        segments=len(segments),
        turns=len(attempt.pieces) - len(segments) + 1,
        versions=(int(sampled[0].versions[0]), int(sampled[-1].versions[-1])) if sampled else None,
        finish=segments[-1].finish.value if segments else "",
        reward=verdict.reward if verdict else None,
        reason=verdict.reason if verdict else "",
        parts=verdict.parts if verdict else {},
    )
