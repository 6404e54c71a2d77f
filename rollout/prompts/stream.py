"""The endless order in which a run trains on its prompts."""

import hashlib
import random
from collections.abc import Sequence

from rollout.ledger.records import Prompt
from rollout.prompts.problems import ProblemError


class PromptStream:
    """Position p of n prompts is in epoch p // n. The order depends only on the seed and the epoch, so a run can be resumed."""

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        if not prompts:
            raise ProblemError("there is no prompt to train on: the files are empty, or every prompt is too long")
        self._prompts = prompts
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []

    @property
    def digest(self) -> str:
        """Changes if the prompt at any position changes."""
        digest = hashlib.sha256(f"{self._seed}\n".encode())
        for prompt in self._prompts:
            digest.update(f"{prompt.id}\n{len(prompt.tokens)}\n".encode() + prompt.tokens.tobytes())
        return digest.hexdigest()

    def at(self, position: int) -> Prompt:
        epoch, place = divmod(position, len(self._prompts))
        if epoch != self._epoch:
            self._order = list(range(len(self._prompts)))
            random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
            self._epoch = epoch
        return self._prompts[self._order[place]]
