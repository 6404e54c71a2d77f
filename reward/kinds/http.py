"""The kind `http`: a service of your own gives the reward (docs/reward.md has its contract and an example server).

{"kind": "http", "url": "http://127.0.0.1:9000/score", "data": {"answer": 42}, "batch": 16, "token_env": "", "timeout_s": 60}
"""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from reward.kinds.endpoint import FIELDS as ENDPOINT_FIELDS
from reward.kinds.endpoint import ContractError, Endpoint, read_endpoint
from reward.kinds.kind import Answer, Defaults, Resources, Task, TaskError
from reward.kinds.thoughts import Tags, answer_after
from rollout.ledger.records import Verdict

FIELDS = ("kind", *ENDPOINT_FIELDS, "batch", "data")
MOST_BATCH = 1024
MOST_PARTS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpTask(Task):
    endpoint: Endpoint
    data: Any  # of the problem; sent along as it is
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
            return Verdict(reward=0.0, parts={"failed": 1.0}, reason=f"{self.endpoint.url}: {error}")


def read_http_task(data: Mapping[str, Any], defaults: Defaults) -> HttpTask:
    if unknown := sorted(set(data) - set(FIELDS)):
        raise TaskError(f"task.{unknown[0]}: no such field in an 'http' task: it has {', '.join(FIELDS)}")
    batch = data.get("batch", 16)
    if isinstance(batch, bool) or not isinstance(batch, int) or not 1 <= batch <= MOST_BATCH:
        raise TaskError(f"task.batch: must be a whole number from 1 to {MOST_BATCH}, got {batch!r:.80}")
    try:
        endpoint = read_endpoint(data, batch=batch)
    except ValueError as error:
        raise TaskError(f"task.{error}") from None
    return HttpTask(endpoint=endpoint, data=data.get("data"), reasoning=defaults.reasoning)


def read_score(answer: Any) -> Verdict:
    """The verdict that a service gives to one item: a number, or {"reward": 0.5, "parts": {"style": 1.0}, "reason": "…"}."""
    if not isinstance(answer, Mapping):
        answer = {"reward": answer}
    parts, reason = answer.get("parts", {}), answer.get("reason", "")
    if not isinstance(parts, Mapping) or len(parts) > MOST_PARTS or not isinstance(reason, str):
        raise ContractError(f"`parts` must be an object of at most {MOST_PARTS} numbers, `reason` a text: {str(answer)[:200]}")
    figures = {str(name): _number(value, f"parts.{name}") for name, value in parts.items()}
    return Verdict(reward=_number(answer.get("reward"), "reward"), parts={"failed": 0.0, **figures}, reason=reason)


def _number(value: Any, name: str) -> float:
    number = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        with suppress(OverflowError):  # an integer that no float can hold
            number = float(value)
    if not math.isfinite(number):
        raise ContractError(f"`{name}` must be a finite number, got {str(value)[:200]!r}")
    return number
