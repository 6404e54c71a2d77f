"""What an engine answers to a request to generate or to score, checked before anything of it is used.

This is the one place that decides whether an engine's tokens may enter the ledger. An engine that answers anything else is broken
or is not ours; the worker replaces it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from reprlib import repr as short
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

LARGEST_VOCABULARY = 1 << 19  # more tokens than any model has; for callers that do not know theirs
MOST_STEPS = 1 << 31  # versions are below
LOWEST_LOGPROB, HIGHEST_LOGPROB = -1e30, 1e-4  # rounding may put the log-prob of a certain token above 0

Finish = Literal["stop", "length", "abort"]


class AnswerError(ValueError):
    """The answer is not what a sound engine gives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Generated:
    """The answer to one `generate`."""

    tokens: npt.NDArray[np.int32]  # [n], the stop token included
    logprobs: npt.NDArray[np.float32]  # [n], natural log, at the sampling temperature
    versions: npt.NDArray[np.int32]  # [n], version of the weights that sampled each token
    finish: Finish


def read_generated(body: Mapping[str, Any], *, most_tokens: int, vocabulary: int = LARGEST_VOCABULARY) -> Generated:
    """The answer of `/generate` as arrays. Raises AnswerError."""
    meta = _get(body, "meta_info", dict)
    tokens = _get(body, "output_ids", list)
    finish = _get(_get(meta, "finish_reason", dict), "type", str)
    scored = meta.get("output_token_logprobs") or []
    _need(finish in ("stop", "length", "abort"), f"finish reason {short(finish)}")
    _need(len(tokens) <= most_tokens, f"{len(tokens)} tokens where {most_tokens} were asked for")
    _need(bool(tokens) or finish != "stop", "a stop token that is not there")
    for token in tokens:
        _need(type(token) is int and 0 <= token < vocabulary, f"token {short(token)} of a vocabulary of {vocabulary}")
    _need(
        isinstance(scored, list) and all(isinstance(one, list) and len(one) == 3 for one in scored), "log-probs of another shape"
    )
    _need([token for _, token, _ in scored] == tokens, "output_ids and output_token_logprobs disagree")
    _check_logprobs(scored)
    return Generated(
        tokens=np.array(tokens, dtype=np.int32),
        logprobs=np.array([logprob for logprob, _, _ in scored], dtype=np.float32),
        versions=_versions(meta.get("weight_versions") or [], len(tokens)),
        finish=finish,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """The answer to one `score`."""

    logprobs: npt.NDArray[np.float32]  # [n], natural log, at temperature 1
    texts: Sequence[str | None]  # [n], the text of each token, if it was asked for and the server has a tokenizer


def read_scored(body: Mapping[str, Any], tokens: Sequence[int]) -> Scored:
    """The log-probs of the last n `tokens` of a prompt, from the answer of `/generate`. Raises AnswerError."""
    scored = _get(_get(body, "meta_info", dict), "input_token_logprobs", list)
    _need(all(isinstance(one, list) and len(one) == 3 for one in scored), "log-probs of another shape")
    _need(len(scored) == len(tokens) + 1, f"{len(scored) - 1} log-probs for {len(tokens)} tokens")
    for (_, said, _), token in zip(scored[1:], tokens, strict=True):
        # SGLang names the last token of the vocabulary 0 here, with the right log-prob.
        _need(said in (token, 0), f"the log-prob of token {short(said)} for token {token}")
    _check_logprobs(scored[1:])  # the first is the token before them, without a log-prob
    return Scored(
        logprobs=np.array([logprob for logprob, _, _ in scored[1:]], dtype=np.float32),
        texts=tuple(text if isinstance(text, str) else None for _, _, text in scored[1:]),
    )


def _check_logprobs(scored: Sequence[Sequence[Any]]) -> None:
    for logprob, *_ in scored:
        sound = type(logprob) in (int, float) and LOWEST_LOGPROB <= logprob <= HIGHEST_LOGPROB  # NaN is neither
        _need(sound, f"log-prob {short(logprob)}")


def _versions(spans: Any, tokens: int) -> npt.NDArray[np.int32]:
    """One version per token, from spans [start, end) of one version each. They must cover the tokens without a gap."""
    _need(isinstance(spans, list) and all(isinstance(span, dict) for span in spans), "weight_versions of another shape")
    starts, ends = [[_get(span, name, int) for span in spans] for name in ("start", "end")]
    bounds = [0, *ends]
    covered = starts == bounds[:-1] and bounds[-1] == tokens and all(begin <= end for begin, end in pairwise(bounds))
    _need(covered, f"weight_versions that do not cover {tokens} tokens once each: from {short(starts)} to {short(ends)}")
    found = [_version(span.get("version")) for span in spans]
    _need(found == sorted(found), f"weight_versions that go back: {short(found)}")
    return np.repeat(np.array(found, dtype=np.int32), np.diff(bounds))


def _version(said: Any) -> int:
    """SGLang says versions as text."""
    text = str(said) if type(said) is int else said
    known = isinstance(text, str) and text.isascii() and text.isdecimal() and len(text) <= 10 and int(text) < MOST_STEPS
    _need(known, f"version {short(said)}")
    return int(said)


def _get(values: Any, name: str, kind: type) -> Any:
    found = values.get(name) if isinstance(values, Mapping) else None
    _need(type(found) is kind, f"{name} is {type(found).__name__}, not {kind.__name__}")
    return found


def _need(condition: bool, otherwise: str) -> None:
    if not condition:
        raise AnswerError(otherwise)
