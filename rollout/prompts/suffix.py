"""Turns the answer of an environment into the tokens that follow a turn, by the model's chat template.

The tokens of an episode are never made again from text. What a turn is asked with are the tokens of the prompt, of all earlier
turns as they were sampled, and of all earlier answers; only a new answer is rendered. It is the part that the template adds to a
conversation when the answer follows. Placeholders stand for the earlier messages, so a template that drops earlier reasoning
has nothing to drop.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from conf.schema import DataConfig
from rollout.ledger.records import I32, NOT_SAMPLED
from rollout.prompts.problems import ProblemError
from rollout.prompts.render import TEMPLATE_ERRORS, load_tokenizer, opened_reasoning

Message = Mapping[str, Any]
ASKED, ANSWERED = ("QuestionQ7", "QuestionX3"), ("AnswerQ7", "AnswerX3")  # placeholders, which no message holds
SAMPLE: Sequence[Message] = ({"role": "user", "content": "Go on."},)


class SuffixError(ValueError):
    """The model's chat template cannot render these messages after a turn."""


class SuffixRenderer:
    """Renders what follows a turn."""

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any]) -> None:
        """Raises ProblemError if the chat template does not allow several turns."""
        self._tokenizer = tokenizer
        self._options = {**template_kwargs, "tokenize": False, "add_generation_prompt": True}
        try:
            first, second = (self._text(SAMPLE, asked, answered) for asked, answered in zip(ASKED, ANSWERED, strict=True))
        except SuffixError as error:
            raise ProblemError(f"rollout.max_turns: {error}") from error
        if first != second:
            raise ProblemError(
                "rollout.max_turns: what the model's chat template adds after a turn depends on the turn itself "
                f"({first!r:.80} or {second!r:.80}), so an episode cannot go on from the tokens that were sampled"
            )
        self.prefill = opened_reasoning(first)  # the beginning of each turn but the first

    @classmethod
    def of(cls, model_path: str, data: DataConfig) -> Self:
        """A renderer with the tokenizer in the model's folder. Raises ProblemError."""
        return cls(load_tokenizer(model_path), data.chat_template_kwargs)

    def tokens(self, messages: Sequence[Message], end: int) -> I32:
        """The tokens between a turn, whose last token is `end`, and the next turn. Raises SuffixError."""
        text = self._text(messages, ASKED[0], ANSWERED[0])
        if end == NOT_SAMPLED:
            return self._encode(text)
        ending = self._tokenizer.convert_ids_to_tokens(end)
        stripped = text.lstrip()
        # The text is encoded behind the token that ended the turn, because some tokenizers treat a beginning differently.
        tokens = self._encode(stripped if stripped.startswith(ending) else ending + text)
        if tokens[:1].tolist() != [end]:
            raise SuffixError(f"{ending!r} ended a turn, but the tokenizer does not read it as the token {end}")
        return tokens[1:]

    def _encode(self, text: str) -> I32:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)

    def _text(self, messages: Sequence[Message], asked: str, answered: str) -> str:
        """What the template adds to a question and its answer when these messages follow."""
        conversation = [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}, *messages]
        try:
            rendered = str(self._tokenizer.apply_chat_template(conversation, **self._options))
        except TEMPLATE_ERRORS as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise SuffixError(
                f"the model's chat template refuses messages after a turn (roles: {roles}): {type(error).__name__}: {error}"
            ) from error
        _, found, suffix = rendered.partition(answered)
        if not found:
            raise SuffixError("the model's chat template does not show the answer of an earlier turn")
        return suffix
