"""The teacher's server as a worker sees it: it gives the log-probs of tokens that the policy sampled (`algo.teacher`).

A worker asks before it reports a segment. Meanwhile the trainer trains on earlier batches, so no GPU of it waits for the answer.
A server that is slow, dead, or answers nonsense is asked again, with growing pauses, for as long as the segment is wanted.
So nothing that was sampled is lost, and nothing is trained on without the teacher's log-probs.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from conf.schema import RunConfig
from rollout.engine_client import EngineCallError, EngineClient, EngineError
from rollout.ledger.records import F32, I32
from rollout.prompts.problems import ProblemError
from rollout.prompts.render import load_tokenizer
from rollout.queue.keys import RunKeys
from rollout.servers import TEACHER, address_file

KEY_VARIABLE = "TEACHER_API_KEY"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
TELL_S = 30.0  # between two warnings that the teacher does not answer
LAST_S = 3.0  # for an answer about a segment that is to be reported now, because the worker ends
EXAMINED_TOKENS = 1024  # this many tokens of the vocabulary are compared
IN_ONE_REQUEST = 128

log = logging.getLogger(__name__)
T = TypeVar("T")


class TeacherError(RuntimeError):
    """The teacher cannot teach this model. Asking again would not help."""


class TeacherRefuses(TeacherError):
    """The teacher will never score these tokens: they are too many for its context, for instance."""


class Teacher:
    """Use it within one event loop, as `async with`."""

    def __init__(self, address: Callable[[], str], *, api_key: str, request_s: float) -> None:
        """address: where the server listens now; raises OSError while there is none."""
        self._address, self._api_key, self._request_s = address, api_key, request_s
        self._client: EngineClient | None = None
        self._waiting = 0
        self._told_s = -TELL_S

    @classmethod
    def of(cls, config: RunConfig, run_dir: Path, keys: RunKeys) -> Self | None:
        """The teacher that the run's workers ask; None if they ask none."""
        algo, request_s = config.algo, config.rollout.request_s
        if algo.teacher_has_address:
            return cls(lambda: algo.teacher, api_key=os.environ.get(KEY_VARIABLE, ""), request_s=request_s)
        if algo.teacher_has_engine:
            return cls(address_file(run_dir, TEACHER).read_text, api_key=keys.engine_api_key, request_s=request_s)
        return None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._client is not None:
            await self._client.close()

    async def logprobs(self, before: I32, sampled: I32, stop: asyncio.Future[None]) -> F32 | None:
        """The log-probs of `sampled` [n] after the tokens `before`. None if `stop` is set before the teacher answers.

        Raises TeacherRefuses.
        """
        asking = asyncio.create_task(self._ask([*before.tolist(), *sampled.tolist()], len(before)))
        either: list[asyncio.Future[Any]] = [asking, stop]
        self._waiting += 1
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([asking], timeout=LAST_S)
            return asking.result() if asking.done() else None
        finally:
            self._waiting -= 1
            asking.cancel()

    async def _ask(self, tokens: Sequence[int], start: int) -> F32:
        """Asks until there is an answer. Raises TeacherRefuses."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                client = await self._current()
                return (await client.score(tokens, start, deadline_s=self._request_s)).logprobs
            except (EngineError, OSError) as error:
                if isinstance(error, EngineCallError) and error.reason == "HTTP 400":
                    raise TeacherRefuses(f"the teacher will not score it: {error}") from error
                self._tell(error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _current(self) -> EngineClient:
        address = self._address()
        if self._client is None or self._client.url != address:
            if self._client is not None:
                await self._client.close()
            self._client = EngineClient(address, api_key=self._api_key)
        return self._client

    def _tell(self, error: Exception) -> None:
        if time.monotonic() - self._told_s >= TELL_S:
            self._told_s = time.monotonic()
            log.error("the teacher does not answer, and %d segments wait for it: %s", self._waiting, error)

    async def check(self, config: RunConfig, model: Path) -> None:
        """Waits for a teacher that somebody else runs, and compares it with the model's folder. Raises TeacherError."""
        try:
            tokenizer = load_tokenizer(str(model))
        except ProblemError as error:
            raise TeacherError(str(error)) from error
        try:
            async with asyncio.timeout(config.rollout.engine_start_s):
                await self._compare_context(config)
                await self._compare_tokens(tokenizer)
        except TimeoutError as error:
            limit = f"rollout.engine_start_s={config.rollout.engine_start_s:g}"
            raise TeacherError(f"algo.teacher={config.algo.teacher} did not answer within {limit}") from error

    async def _compare_context(self, config: RunConfig) -> None:
        longest = config.data.max_prompt_tokens + config.rollout.max_completion_tokens
        room = (await self._patiently(partial(EngineClient.server_info, deadline_s=self._request_s))).get("max_req_input_len")
        if isinstance(room, int) and room < longest:
            raise TeacherError(
                f"algo.teacher={config.algo.teacher} takes {room} tokens at most, but data.max_prompt_tokens + "
                f"rollout.max_completion_tokens = {longest}: lower one, or start the teacher with a larger --context-length"
            )

    async def _compare_tokens(self, tokenizer: Any) -> None:
        """The server must read a token's number as the same text that our tokenizer does."""
        ids = sorted(tokenizer.get_vocab().values())
        spread = ids[:: max(1, len(ids) // EXAMINED_TOKENS)]
        chosen = sorted({*tokenizer.all_special_ids, *spread} - {ids[-1]})  # SGLang shows the last token as token 0
        for begin in range(0, len(chosen), IN_ONE_REQUEST):
            part = chosen[begin : begin + IN_ONE_REQUEST]
            tokens = [part[0], *part]  # a first token has no log-prob
            call = partial(EngineClient.score, tokens=tokens, start=1, deadline_s=self._request_s, with_text=True)
            scored = await self._patiently(call)
            for token, text in zip(part, scored.texts, strict=True):
                if text is None:
                    raise TeacherError(
                        "the teacher's server has no tokenizer, so it cannot be compared with the model's: start it without "
                        "--skip-tokenizer-init"
                    )
                if text != (ours := tokenizer.decode([token])):
                    raise TeacherError(
                        f"the teacher has another tokenizer than model.path: token {token} is {text!r} to the teacher and "
                        f"{ours!r} to the model. Choose a teacher with the model's tokenizer"
                    )

    async def _patiently(self, call: Callable[[EngineClient], Coroutine[Any, Any, T]]) -> T:
        """The answer to a call that may fail because the server is not there yet. Raises TeacherError if it refuses."""
        while True:
            try:
                return await call(await self._current())
            except EngineError as error:
                if isinstance(error, EngineCallError) and error.reason.startswith("HTTP 4"):
                    raise TeacherError(f"the teacher cannot be used: {error}") from error
                self._tell(error)
            await asyncio.sleep(FIRST_PAUSE_S)
