"""The text of each token of a run's model, for people. The judges decode whole turns instead (`rollout/prompts/decoder.py`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from conf.compose.run_folder import MODEL_DESCRIPTION, PROMPTS

UNFINISHED = "\ufffd"  # what a part of a character is decoded to
LONGEST_CHARACTER = 8  # tokens; what is longer has bytes that are no character


class TokenText(Protocol):
    def each(self, tokens: Sequence[int]) -> list[str]:
        """One text per token. A character of several tokens is the text of the last of them."""

    def whole(self, tokens: Sequence[int]) -> str: ...


class TokenizerText:
    def __init__(self, path: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(path))

    def each(self, tokens: Sequence[int]) -> list[str]:
        """Each token is decoded together with the one before it, because many tokenizers drop a space at the beginning."""
        texts = []
        before = begin = 0
        for end in range(1, len(tokens) + 1):
            text = self.whole(tokens[before:end])[len(self.whole(tokens[before:begin])) :]
            if text.endswith(UNFINISHED) and end - begin < LONGEST_CHARACTER and end < len(tokens):
                texts.append("")
            else:
                texts.append(text)
                before, begin = begin, end
        return texts

    def whole(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))


class TokenNumbers:
    """Stands in where a run's folder holds no tokenizer."""

    def each(self, tokens: Sequence[int]) -> list[str]:
        return [f"{token} " for token in tokens]

    def whole(self, tokens: Sequence[int]) -> str:
        return "".join(self.each(tokens))


def token_text(run_dir: Path) -> TokenText:
    found = [*sorted((run_dir / PROMPTS).glob("*.tokenizer.json")), run_dir / MODEL_DESCRIPTION / "tokenizer.json"]
    path = next((path for path in found if path.is_file()), None)
    return TokenizerText(path) if path else TokenNumbers()
