"""Rewards by a judge model: what it is asked, and how its answer is read."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from reward.grade import grade
from reward.grading.services import TRIES, Services
from reward.kinds.judge_model import JudgeModelTask
from reward.kinds.kind import Answer, Defaults
from reward.task import TaskError, read_reward
from rollout.ledger.records import Finish, Verdict
from tests.reward.graded import OnlyServices
from tests.reward.http_server import Reply, serving

TASK = {"kind": "judge", "model": "m", "template": "Q: {prompt} ({metadata.level})\nA: {answer}", "scale": [1, 10]}


@pytest.fixture
def lent() -> Iterator[OnlyServices]:
    services = Services()
    yield OnlyServices(services)
    services.close()


def says(text: Any) -> Callable[[Any], Reply]:
    return lambda body: (200, {"choices": [{"message": {"role": "assistant", "content": text}}]})


def graded(lent: OnlyServices, reply: Callable[[Any], Reply], asked: list[Any] | None = None, **task: Any) -> Verdict:
    answer = Answer(completion="<think>{prompt}</think>It is {prompt}.", prompt="6 x 7?", metadata={"level": 3})
    with serving(reply) as server:
        verdict = grade(read_reward({**TASK, "url": f"http://127.0.0.1:{server.port}/v1", **task}), answer, lent)
        if asked is not None:
            asked.extend(server.requests)
    return verdict


def test_judge_reads_the_filled_template_and_braces_of_the_completion_stay_what_they_are(lent: OnlyServices) -> None:
    asked: list[Any] = []
    verdict = graded(lent, says("Score: 10"), asked, system="Be strict.", extra={"top_p": 0.9})
    assert asked == [
        {
            "model": "m", "temperature": 0.0, "max_tokens": 1024, "top_p": 0.9,
            "messages": [
                {"role": "system", "content": "Be strict."},
                {"role": "user", "content": "Q: 6 x 7? (3)\nA: It is {prompt}."},
            ],
        }
    ]  # fmt: skip
    assert (verdict.reward, verdict.reason, verdict.parts) == (1.0, "", {"judge": 1.0, "truncated": 0.0, "unparsed": 0.0})


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("Score: 1", 0.0),
        ("SCORE = **5.5**", 0.5),
        ("The answer says `Score: 10`, but it is wrong.\nScore: 1", 0.0),
        ("<think>Score: 2</think>Score: 10", 1.0),
    ],
)
def test_last_score_counts_on_the_scale_of_the_task(lent: OnlyServices, text: str, reward: float) -> None:
    assert graded(lent, says(text)).reward == reward


@pytest.mark.parametrize("text", ["I like it", "Score: eleven", "Score: 11", "Score: 0", "", None, 7, ["Score: 5"]])
def test_judge_that_never_answers_in_the_format_costs_the_verdict_and_is_counted(lent: OnlyServices, text: Any) -> None:
    asked: list[Any] = []
    verdict = graded(lent, says(text), asked)
    assert len(asked) == TRIES
    assert (verdict.reward, verdict.parts["unparsed"]) == (0.0, 1.0)
    assert "judge model: its" in verdict.reason


def test_pattern_of_the_task_finds_the_score(lent: OnlyServices) -> None:
    assert graded(lent, says("[[3]]"), score=r"\[\[(\d)\]\]", scale=[0, 5]).reward == pytest.approx(0.6)


def test_reasoning_that_never_ends_is_no_answer_and_no_judge_is_asked(lent: OnlyServices) -> None:
    reward = read_reward({**TASK, "url": "http://127.0.0.1:9/v1"})
    assert "never ends" in grade(reward, Answer(completion="<think>hm"), lent).reason
    assert grade(reward, Answer(completion="x", finish=Finish.LENGTH), lent).reason == "the completion reached its cap"


def test_task_without_a_url_asks_the_judge_model_of_the_run() -> None:
    served = Defaults(judge_model=True)
    [part] = read_reward({"kind": "judge", "template": "{answer}"}, defaults=served).parts
    assert isinstance(part.task, JudgeModelTask) and part.task.endpoint.is_own and part.task.request["model"] == "judge"
    with pytest.raises(TaskError, match=r"task.url: is missing: .* or set reward.judge_model=FOLDER"):
        read_reward(TASK)
    with pytest.raises(TaskError, match=r"task.token_env: has no meaning without a `url`"):
        read_reward({**TASK, "token_env": "HOME"}, defaults=served)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"template": "{prompt}"}, r"task.template: it must hold \{answer\}"),
        ({"template": ""}, r"task.template: it must hold \{answer\}"),
        ({"template": None}, "task.template: must be a string"),
        ({"max_tokens": 0}, "task.max_tokens: must be a whole number of at least 1"),
        ({"model": ""}, "task.model: is empty"),
        ({"model": None}, "task.model: must be a string"),
        ({"score": "("}, "task.score: .* is no regular expression"),
        ({"score": "Score"}, "task.score: .* whose first group is the number"),
        ({"scale": [5, 5]}, "task.scale: must be the lowest and the highest score"),
        ({"temperature": -1}, "task.temperature: must be a number from 0"),
        ({"prompt": "x"}, "task.prompt: no such field"),
    ],
)
def test_wrong_field_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(TaskError, match=said):
        read_reward({**TASK, "url": "http://x/v1", **fields})
