"""The endless order in which a run trains on its prompts."""

import hashlib
import random
from collections.abc import Sequence

from rollout.ledger.records import Prompt
from rollout.prompts.problems import ProblemError


class PromptStream:
    """A mixture of parts by weight. Each part repeats all its prompts, in a new order in each epoch of its own.

    The prompt at a position depends on the parts, the weights, the seed and the position alone, so a run can be resumed anywhere.
    """

    def __init__(self, parts: Sequence[Sequence[Prompt]], seed: int, weights: Sequence[float] = ()) -> None:
        if not all(parts):
            raise ProblemError("there is no prompt to train on: a source is empty, or every prompt is too long")
        self._parts = [_Part(prompts, seed) for prompts in parts]
        self._shares = [weight / sum(weights) for weight in weights] or [1.0]
        self._counts = [0] * len(parts)  # how many of the first `_position` prompts each part gave
        self._position = 0

    @property
    def digest(self) -> str:
        """Changes if the prompt at any position changes."""
        digest = hashlib.sha256()
        for part, share in zip(self._parts, self._shares, strict=True):
            digest.update(f"{share}\n{part.digest}\n".encode())
        return digest.hexdigest()

    def at(self, position: int) -> Prompt:
        if position < self._position:
            self._counts, self._position = [0] * len(self._parts), 0
        while self._position < position:
            self._counts[self._next()] += 1
            self._position += 1
        part = self._next()
        return self._parts[part].at(self._counts[part])

    def _next(self) -> int:
        """The part that gives the prompt at this position: the one that is furthest behind its share."""
        due = self._position + 1
        return max(range(len(self._parts)), key=lambda part: self._shares[part] * due - self._counts[part])


class _Part:
    """Prompts in an endless order: number n is in epoch n // len(prompts)."""

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        self._prompts = prompts
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []

    @property
    def digest(self) -> str:
        digest = hashlib.sha256(f"{self._seed}\n".encode())
        for prompt in self._prompts:
            digest.update(f"{prompt.id}\n{len(prompt.tokens)}\n".encode() + prompt.tokens.tobytes())
        return digest.hexdigest()

    def at(self, number: int) -> Prompt:
        epoch, place = divmod(number, len(self._prompts))
        if epoch != self._epoch:
            self._order = list(range(len(self._prompts)))
            random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
            self._epoch = epoch
        return self._prompts[self._order[place]]
