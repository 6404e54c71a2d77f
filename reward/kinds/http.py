"""The kind `http`: a service of your own gives the reward (docs/reward.md has its contract and an example server).

{"kind": "http", "url": "http://127.0.0.1:9000/score", "data": {"answer": 42}, "batch": 16, "token_env": "", "timeout_s": 60}
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from reward.kinds.endpoint import ContractError, Endpoint
from reward.kinds.fields import ENDPOINT, read_count, read_endpoint, refuse_unknown
from reward.kinds.functions.returned import BadReward, read_returned
from reward.kinds.kind import Answer, Defaults, Resources, Task, TaskError
from reward.kinds.thoughts import Tags, answer_after
from rollout.ledger.records import Verdict

MOST_BATCH = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpTask(Task):
    endpoint: Endpoint
    data: Any  # whatever the problem holds for the service; it is sent along as it is
    reasoning: tuple[Tags, ...]
    grades_truncated: ClassVar[bool] = True
    figures: ClassVar[Mapping[str, float]] = {"failed": 0.0}

    def grade(self, answer: Answer, resources: Resources) -> Verdict:
        item = {
            "prompt": answer.prompt,
            "completion": answer.text,
            "answer": answer_after(answer.text, self.reasoning),  # None: the reasoning never ends
            "metadata": answer.metadata,
            "finish": answer.finish.value,
            "tokens": answer.tokens,
            "data": self.data,
        }
        try:
            return resources.ask(self.endpoint, item, read_score)
        except ContractError as error:
            return Verdict(reward=0.0, parts={"failed": 1.0}, reason=f"{self.endpoint}: {error}")


def read_http_task(data: Mapping[str, Any], defaults: Defaults) -> HttpTask:
    refuse_unknown(data, *ENDPOINT, "batch", "data")
    if (batch := read_count(data.get("batch", 16), "batch")) > MOST_BATCH:
        raise TaskError(f"task.batch: must be at most {MOST_BATCH}, got {batch}")
    return HttpTask(endpoint=read_endpoint(data, batch=batch), data=data.get("data"), reasoning=defaults.reasoning)


def read_score(answer: Any) -> Verdict:
    """The verdict that a service gives to one item: a number, or {"reward": 0.5, "parts": {"style": 1.0}, "reason": "…"}."""
    if not isinstance(answer, Mapping):
        answer = {"reward": answer}
    if not isinstance(reason := answer.get("reason", ""), str):
        raise ContractError(f"it returned a reason that is no text: {str(reason)[:200]}")
    try:
        found = read_returned((answer.get("reward"), answer.get("parts", {})))
    except BadReward as error:
        raise ContractError(f"it {error}") from None
    return Verdict(reward=found.reward, parts={"failed": 0.0, **found.parts}, reason=reason)
