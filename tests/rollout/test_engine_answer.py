"""Only what a sound engine gives becomes tokens, log-probs and versions; anything else is one kind of error."""

import math
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.engine_answer import AnswerError, read_generated
from tests.rollout.fake_engine import spans

VERSIONS = st.lists(st.integers(0, 3), max_size=20).map(sorted)


def answer(tokens: list[Any], *, logprob: Any = -0.5, finish: Any = "length", versions: Any = None) -> dict[str, Any]:
    meta = {
        "output_token_logprobs": [[logprob, token, None] for token in tokens],
        "weight_versions": [{"version": "0", "start": 0, "end": len(tokens)}] if versions is None else versions,
        "finish_reason": {"type": finish},
    }
    return {"output_ids": tokens, "meta_info": meta}


def read(body: Any) -> Any:
    return read_generated(body, most_tokens=20, vocabulary=100)


@given(VERSIONS)
def test_spans_become_the_versions_they_stand_for(versions: list[int]) -> None:
    got = read(answer(list(range(len(versions))), versions=spans([str(version) for version in versions])))
    assert got.versions.tolist() == versions and got.tokens.tolist() == list(range(len(versions)))


@pytest.mark.parametrize("token", [-5, 100, 10**6, 2**40, True, 1.0, "1", None])
def test_token_that_the_model_does_not_have_is_refused(token: Any) -> None:
    with pytest.raises(AnswerError, match="of a vocabulary of 100"):
        read(answer([1, token]))


@pytest.mark.parametrize(
    "logprob",
    [math.nan, math.inf, -math.inf, 5.0, 0.01, None, True, "-1", 10**400, -(10**400)],
    ids=lambda value: str(value)[:12],
)
def test_number_that_is_no_log_prob_is_refused(logprob: Any) -> None:
    with pytest.raises(AnswerError, match="log-prob"):
        read(answer([1], logprob=logprob))


@pytest.mark.parametrize("version", ["-1", -1, "abc", str(2**31), 2**40, "9" * 5000, "\u0663", "", None, 1.5, True])
def test_version_that_no_trainer_gives_is_refused(version: Any) -> None:
    with pytest.raises(AnswerError, match="version"):
        read(answer([1], versions=[{"version": version, "start": 0, "end": 1}]))


def span(version: int, start: Any, end: Any) -> dict[str, Any]:
    return {"version": str(version), "start": start, "end": end}


@pytest.mark.parametrize(
    "versions",
    [
        [],
        [span(1, 0, 1)],
        [span(1, 1, 2)],
        [span(1, 0, 1), span(2, 0, 2)],
        [span(1, 0, 3)],
        [span(0, 0, -1), span(0, -1, 2)],
        [span(0, 0, 5), span(0, 5, 2)],
        [span(2, 0, 1), span(1, 1, 2)],
        [span(0, 0, True), span(0, True, 2)],
        [span(0, 0, 2**70)],
        ["0"],
        "0",
        {"start": 0},
    ],
)
def test_versions_that_do_not_cover_every_token_once_and_in_order_are_refused(versions: Any) -> None:
    with pytest.raises(AnswerError):
        read(answer([8, 9], versions=versions))


def test_more_tokens_than_were_asked_for_are_refused() -> None:
    with pytest.raises(AnswerError, match="21 tokens where 20 were asked for"):
        read(answer([1] * 21))


@pytest.mark.parametrize("finish", ["ended", None, ["stop"], 5])
def test_unknown_reason_to_end_is_refused(finish: Any) -> None:
    with pytest.raises(AnswerError):
        read(answer([1], finish=finish))


def test_stop_without_a_token_is_refused() -> None:
    with pytest.raises(AnswerError, match="a stop token that is not there"):
        read(answer([], finish="stop", versions=[]))


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
PLACES = ("output_ids", "meta_info", "output_token_logprobs", "weight_versions", "finish_reason", "type")


@settings(deadline=None)
@given(place=st.sampled_from(PLACES), value=ANYTHING)
def test_whatever_stands_in_an_answer_it_is_sound_or_an_answer_error(place: str, value: Any) -> None:
    body = answer([1])
    for part in (body, body["meta_info"], body["meta_info"]["finish_reason"]):
        if place in part:
            part[place] = value
    with suppress(AnswerError):
        got = read(body)
        assert got.tokens.min(initial=0) >= 0 and got.tokens.max(initial=0) < 100 and len(got.tokens) <= 20
        assert len(got.tokens) == len(got.logprobs) == len(got.versions) and got.versions.min(initial=0) >= 0
