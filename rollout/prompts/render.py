"""Turns problems into prompts: the model's chat template renders a problem as text, and its tokenizer encodes the text."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from jinja2 import TemplateError

from conf.schema import DataConfig
from rollout.ledger.records import Prompt
from rollout.prompts.problems import Problem, ProblemError

OPENED_REASONING = re.compile(r"[<\[◁][^<>\[\]◁▷/]{0,20}(?:think|thought|reasoning)[^<>\[\]◁▷/]{0,20}[>\]▷]\s*\Z", re.IGNORECASE)

# All errors that the code inside a chat template may raise.
TEMPLATE_ERRORS = (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Renderer:
    """Makes prompts for one model."""

    tokenizer: Any
    system_prompt: str = ""  # for problems that have no system message of their own
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # for example {"enable_thinking": False}

    @classmethod
    def of(cls, model_path: str, data: DataConfig) -> Self:
        """A renderer with the tokenizer in the model's folder. Raises ProblemError."""
        return cls(
            tokenizer=load_tokenizer(model_path),
            system_prompt=data.system_prompt,
            template_kwargs=data.chat_template_kwargs,
        )

    def render(self, problem: Problem) -> Prompt:
        """The tokens that the model continues, the prefill included. Raises ProblemError."""
        text = self._text(problem) if problem.raw is None else problem.raw
        tokens = self.tokenizer.encode(text + problem.prefill, add_special_tokens=False)
        if not tokens:
            raise ProblemError(f"{problem.where}: problem {problem.id!r}: the prompt has no tokens")
        return Prompt(
            id=problem.id,
            tokens=np.array(tokens, dtype=np.int32),
            task=problem.task,
            prefill=opened_reasoning(text) + problem.prefill if problem.raw is None else problem.prefill,
            text=problem.text,
            metadata=problem.metadata,
        )

    def _text(self, problem: Problem) -> str:
        where = f"{problem.where}: problem {problem.id!r}"
        if not self.tokenizer.chat_template:
            raise ProblemError(
                f'{where} needs a chat template, but the tokenizer has none: add one to the model\'s folder, or set "raw": true'
            )
        messages = list(problem.messages)
        if self.system_prompt and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        options = {**self.template_kwargs, "tokenize": False, "add_generation_prompt": True}
        try:
            return str(self.tokenizer.apply_chat_template(messages, **options))
        except TEMPLATE_ERRORS as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ProblemError(
                f"{where}: the model's chat template refuses it (roles: {roles}): {type(error).__name__}: {error}"
            ) from error


def opened_reasoning(text: str) -> str:
    """The tag with which a chat template itself opens the reasoning, such as `<think>`: for a judge it begins the answer."""
    found = OPENED_REASONING.search(text)
    return found[0] if found else ""


def load_tokenizer(model_path: str) -> Any:
    """The tokenizer of a model's folder. Raises ProblemError."""
    import transformers  # here, because the import is slow

    # AutoTokenizer of transformers 5 rebuilds tokenizer.json by the model's type, with the rules of that type for
    # splitting text. They are wrong for a model that was trained with another tokenizer, so tokenizer.json is used unchanged.
    verbatim = (Path(model_path) / "tokenizer.json").is_file()
    kind = transformers.PreTrainedTokenizerFast if verbatim else transformers.AutoTokenizer
    try:
        return kind.from_pretrained(model_path, local_files_only=True)
    except Exception as error:  # for a damaged file, tokenizers raises a plain Exception and transformers a KeyError
        raise ProblemError(f"cannot load the tokenizer in model.path={model_path}: {type(error).__name__}: {error}") from error
