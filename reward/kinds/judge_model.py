"""The kind `judge`: a model behind an OpenAI-compatible endpoint reads the answer and gives a score.

{"kind": "judge", "url": "http://127.0.0.1:30000/v1", "model": "Qwen3-32B", "scale": [1, 10],
 "template": "Question: {prompt}\\nAnswer: {answer}\\nGive a score from 1 to 10, as in `Score: 7`."}

Without a `url` it asks the judge model that the run itself serves (`reward.judge_model`); then it needs no `model` either.
`{prompt}`, `{answer}` (without its reasoning), `{completion}` (with it) and `{metadata.NAME}` are filled in once: what a
completion holds is never taken for a place to fill. The reward is the last score of the judge's answer, mapped from the scale to
0 … 1.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from reward.kinds.endpoint import ContractError, Endpoint
from reward.kinds.fields import ENDPOINT, read_count, read_endpoint, read_text, read_timeout, refuse_unknown
from reward.kinds.kind import Answer, Defaults, Resources, Task, TaskError
from reward.kinds.thoughts import Tags, answer_after, never_ends
from rollout.ledger.records import Verdict

PATH = "/chat/completions"
TIMEOUT_S = 300.0
FIELDS = (*ENDPOINT, "model", "template", "system", "score", "scale", "max_tokens", "temperature", "extra")
PLACE = re.compile(r"\{(prompt|answer|completion|metadata\.(\w+))\}")
SCORE = r"(?i)score\W{0,9}(-?\d+(?:\.\d+)?)"
MOST_TEMPERATURE = 100.0
READ_CHARACTERS = 4096  # at the end of the judge's answer: a pattern may need time that grows with the square of the length


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeModelTask(Task):
    endpoint: Endpoint
    request: Mapping[str, Any]  # all of it but the messages
    system: str
    template: str
    score: re.Pattern[str]  # its first group is a number
    scale: tuple[float, float]
    reasoning: tuple[Tags, ...]
    figures: ClassVar[Mapping[str, float]] = {"unparsed": 0.0}

    def grade(self, answer: Answer, resources: Resources) -> Verdict:
        final = answer_after(answer.text, self.reasoning)
        if final is None:
            return Verdict(reward=0.0, parts=self.figures, reason=never_ends(answer.text, self.reasoning))
        messages = [{"role": "user", "content": self.render(answer, final)}]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        try:
            reward = resources.ask(self.endpoint, {**self.request, "messages": messages}, self.read)
        except ContractError as error:
            return Verdict(reward=0.0, parts={"unparsed": 1.0}, reason=f"judge model: {error}")
        return Verdict(reward=reward, parts=self.figures)

    def render(self, answer: Answer, final: str) -> str:
        texts = {"prompt": answer.prompt, "answer": final.strip(), "completion": answer.text}

        def fill(place: re.Match[str]) -> str:
            return str(answer.metadata.get(place[2], "")) if place[2] else texts[place[1]]

        return PLACE.sub(fill, self.template)

    def read(self, answer: Any) -> float:
        """The reward in a chat completion: the last score in its text, from 0 to 1."""
        try:
            text = answer["choices"][0]["message"]["content"]
        except (LookupError, TypeError):
            text = None
        if not isinstance(text, str):
            raise ContractError(f"its answer is no chat completion: {str(answer)[:200]}")
        low, high = self.scale
        found = [match[1] for match in self.score.finditer(text[-READ_CHARACTERS:])]
        try:
            score = float(found[-1])
        except (IndexError, ValueError, TypeError):
            raise ContractError(f"its answer holds no score: {text[-200:]}") from None
        if not low <= score <= high:
            raise ContractError(f"its score {score:g} is not on the scale from {low:g} to {high:g}")
        return (score - low) / (high - low)


def read_judge_task(data: Mapping[str, Any], defaults: Defaults) -> JudgeModelTask:
    refuse_unknown(data, *FIELDS)
    template, extra = read_text(data.get("template"), "task.template"), data.get("extra", {})
    if not {"answer", "completion"} & {place[1] for place in PLACE.finditer(template)}:
        raise TaskError("task.template: it must hold {answer} or {completion}, or the judge sees nothing of what was written")
    if not isinstance(extra, Mapping):
        raise TaskError(f"task.extra: must be an object of further fields of the request, got {extra!r:.80}")
    endpoint = _endpoint(data, defaults)
    model = read_text(data.get("model", "judge" if endpoint.is_own else None), "task.model")
    if not model:
        raise TaskError("task.model: is empty: give the name that the endpoint knows the model by")
    request = {
        "model": model,
        "temperature": _temperature(data.get("temperature", 0.0)),
        "max_tokens": read_count(data.get("max_tokens", 1024), "max_tokens"),
        **extra,
    }
    return JudgeModelTask(
        endpoint=endpoint,
        request=request,
        system=read_text(data.get("system", ""), "task.system"),
        template=template,
        score=_pattern(data.get("score", SCORE)),
        scale=_scale(data.get("scale", [0, 1])),
        reasoning=defaults.reasoning,
    )


def _endpoint(data: Mapping[str, Any], defaults: Defaults) -> Endpoint:
    if "url" in data:
        return read_endpoint(data, path=PATH, timeout_s=TIMEOUT_S)
    if not defaults.judge_model:
        raise TaskError(
            "task.url: is missing: give the address of an OpenAI-compatible endpoint, or set reward.judge_model=FOLDER, so that "
            "the run serves that model"
        )
    if "token_env" in data:
        raise TaskError("task.token_env: has no meaning without a `url`: leave it out")
    return Endpoint(url=f"/v1{PATH}", timeout_s=read_timeout(data, TIMEOUT_S))


def _temperature(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST_TEMPERATURE:
        raise TaskError(f"task.temperature: must be a number from 0 to {MOST_TEMPERATURE:g}, got {value!r:.80}")
    return float(value)


def _scale(value: object) -> tuple[float, float]:
    if isinstance(value, list | tuple) and len(value) == 2:
        low, high = value
        if all(isinstance(end, int | float) and not isinstance(end, bool) and abs(end) <= 1e6 for end in value) and low < high:
            return float(low), float(high)
    raise TaskError(f"task.scale: must be the lowest and the highest score, as in [1, 10], got {value!r:.80}")


def _pattern(value: object) -> re.Pattern[str]:
    try:
        pattern = re.compile(value) if isinstance(value, str) else None
    except re.error as error:
        raise TaskError(f"task.score: {value!r:.80} is no regular expression: {error}") from None
    if pattern is None or not pattern.groups:
        raise TaskError(f"task.score: {value!r:.80} must be a regular expression whose first group is the number")
    return pattern
