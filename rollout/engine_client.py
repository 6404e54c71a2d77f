"""The HTTP calls of SGLang 0.5.23. No other file knows them; `engine_answer.py` knows the answer to a generation request.

`EngineClient` is one server's client for asyncio: the rollout worker generates through it. `EngineFleet` drives the
control calls of several servers from a thread of its own, so that the trainer can ask all engines to receive a bucket
and broadcast the bucket at the same time. Every call has a deadline, checks `success` in the answer's body where the
server says it, and raises an `EngineError` that names the server, the call and the answer.

A push, in order: pause, flush_cache, begin_weight_update, receive_bucket …, end_weight_update(version), continue_. An
engine that waits for a bucket answers no other control call, and one that waits for a dead trainer must be killed.
"""

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, Self, TypeVar

import aiohttp
import numpy as np
import numpy.typing as npt

from rollout.engine_answer import LARGEST_VOCABULARY, AnswerError, Generated, Scored, read_generated, read_scored

UNPUSHED = -1
"""The version that an engine reports before its first push."""

CONTROL_S = 60.0
BODY_EXCERPT_CHARS = 600
MOST_ANSWER_BYTES = 64 << 20  # a completion of 100,000 tokens takes some 10 MB
KEEP_ALIVE_S = 2.0
"""Below the server's 5 s: a connection that it closes while we send on it would look like a dead server."""

T = TypeVar("T")


class EngineError(RuntimeError):
    """An engine, or a call to one, failed."""


class EngineCallError(EngineError):
    """A server refused a call, or its answer makes no sense."""

    answered = True

    def __init__(self, url: str, call: str, reason: str, body: str = "") -> None:
        excerpt = f": {body[:BODY_EXCERPT_CHARS]}" if body else ""
        super().__init__(f"engine {url}, {call}: {reason}{excerpt}")
        self.url, self.call, self.reason, self.body = url, call, reason, body


class BadAnswer(EngineCallError):
    """An answer that no sound engine gives: the engine must be replaced."""


class EngineGone(EngineCallError):
    """The server cannot be reached, or the connection broke: it is dead, or not yet started."""

    answered = False


class EngineTimeout(EngineCallError):
    """No answer within the deadline."""

    answered = False


class FleetError(EngineError):
    """A call failed on some engines of a fleet: `failures` by URL, and `results` of the others."""

    def __init__(self, failures: Mapping[str, EngineError], results: Mapping[str, Any]) -> None:
        super().__init__("; ".join(str(error) for error in failures.values()))
        self.failures, self.results = dict(failures), dict(results)


class EngineClient:
    """One server's calls. Use it within one event loop, and close it (or use it as `async with`)."""

    def __init__(self, url: str, *, api_key: str = "", admin_api_key: str = "") -> None:
        self.url = url.rstrip("/")
        self._headers = _bearer(api_key)
        self._admin_headers = _bearer(admin_api_key or api_key)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    # Generation

    async def generate(
        self,
        input_ids: Sequence[int] | npt.NDArray[np.int32],
        sampling: Mapping[str, Any],
        *,
        rid: str,
        max_new_tokens: int,
        stop_token_ids: Sequence[int],
        deadline_s: float,
        vocabulary: int = LARGEST_VOCABULARY,
    ) -> Generated:
        """Samples a continuation; `sampling` is passed on, as in `{"temperature": 1.0}`.

        The call outlives a push, which shows in `versions` only. Cancelling it aborts the request in the server.
        """
        parameters = {**sampling, "max_new_tokens": max_new_tokens, "stop_token_ids": list(stop_token_ids)}
        request = {
            "input_ids": np.asarray(input_ids).tolist(),
            "sampling_params": parameters,
            "return_logprob": True,
            "rid": rid,
        }
        body = await self._json("POST", "/generate", request, deadline_s=deadline_s, headers=self._headers)
        try:
            return read_generated(body, most_tokens=max_new_tokens, vocabulary=vocabulary)
        except AnswerError as error:
            raise BadAnswer(self.url, "/generate", f"unexpected answer: {error}") from error

    async def score(self, tokens: Sequence[int], start: int, *, deadline_s: float, with_text: bool = False) -> Scored:
        """The log-probs of tokens[start:], each after all tokens before it, at temperature 1. start >= 1."""
        request = {
            "input_ids": list(tokens),
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": start - 1,  # it counts the token whose prediction is the first log-prob
            "return_text_in_logprobs": with_text,
        }
        body = await self._json("POST", "/generate", request, deadline_s=deadline_s, headers=self._headers)
        try:
            return read_scored(body, tokens[start:])
        except AnswerError as error:
            raise BadAnswer(self.url, "/generate", f"unexpected answer: {error}") from error

    async def server_info(self, *, deadline_s: float = CONTROL_S) -> dict[str, Any]:
        return await self._json("GET", "/server_info", None, deadline_s=deadline_s, headers=self._headers)

    async def abort(self, rid: str, *, deadline_s: float = CONTROL_S) -> None:
        """Ends one request: its `generate` returns what there is, with finish `abort`. An unknown `rid` is no error.

        Do not call it while paused: the partial completion would be lost.
        """
        await self._control("/abort_request", {"rid": rid}, deadline_s=deadline_s)

    async def healthy(self, *, deadline_s: float = 10.0) -> bool:
        """Whether the server generates. It does not answer while paused."""
        try:
            status, _ = await self._send("GET", "/health", None, deadline_s=deadline_s, headers=self._headers)
        except (EngineGone, EngineTimeout):
            return False
        return status == 200

    # Pause and cache

    async def pause(self, mode: Literal["retract", "in_place", "abort"] = "retract", *, deadline_s: float = CONTROL_S) -> None:
        """`retract`: running requests go back to the queue without their cache and resume after `continue_`."""
        await self._control("/pause_generation", {"mode": mode}, deadline_s=deadline_s)

    async def flush_cache(self, *, deadline_s: float = CONTROL_S) -> None:
        """Forgets all KV. Refused while requests run, so pause with `retract` first."""
        await self._control("/flush_cache", {}, deadline_s=deadline_s)

    async def continue_(self, *, deadline_s: float = CONTROL_S) -> None:
        await self._control("/continue_generation", {}, deadline_s=deadline_s)

    # Weights

    async def init_push_group(
        self,
        master_address: str,
        master_port: int,
        *,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
        deadline_s: float,
    ) -> None:
        """Joins as ranks rank_offset .. rank_offset + tp - 1; returns when all `world_size` ranks are there."""
        request = {
            "master_address": master_address,
            "master_port": master_port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
        }
        await self._checked("/init_weights_update_group", request, deadline_s=deadline_s)

    async def destroy_push_group(self, group_name: str, *, deadline_s: float = CONTROL_S) -> None:
        await self._checked("/destroy_weights_update_group", {"group_name": group_name}, deadline_s=deadline_s)

    async def leave_push_group(self, group_name: str, *, deadline_s: float = CONTROL_S) -> None:
        """Like `destroy_push_group`, but no error if it is not in this group. Raises EngineGone, EngineTimeout."""
        try:
            await self.destroy_push_group(group_name, deadline_s=deadline_s)
        except EngineCallError as error:
            if not error.answered:
                raise

    async def begin_weight_update(self, *, deadline_s: float = CONTROL_S) -> None:
        """Opens an update. One that a dead trainer or a broken push left open is closed first: all of it is sent again."""
        try:
            await self._checked("/begin_weight_update", {}, deadline_s=deadline_s)
        except EngineCallError as refusal:
            if "already open" not in refusal.body:
                raise
            await self._checked("/end_weight_update", {}, deadline_s=deadline_s)
            await self._checked("/begin_weight_update", {}, deadline_s=deadline_s)

    async def receive_bucket(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        *,
        group_name: str,
        deadline_s: float,
    ) -> None:
        """Takes part in one broadcast from rank 0: the tensors' bytes in this order, gapless, as one uint8 array.

        Names are Hugging Face's, dtypes torch's (`float32`). The server ignores an unknown name without an error; a
        wrong shape fails and leaves the weights half updated. On a GPU it answers before the bytes have arrived. Only `checksum`
        tells what it holds.
        """
        request = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group_name,
            "flush_cache": False,
            "load_format": "flattened_bucket",
        }
        await self._checked("/update_weights_from_distributed", request, deadline_s=deadline_s)

    async def end_weight_update(self, version: int, *, deadline_s: float = CONTROL_S) -> None:
        """Makes the received weights whole, then names them: tokens sampled from here on carry `version`."""
        await self._checked("/end_weight_update", {}, deadline_s=deadline_s)
        request = {"new_version": str(version), "abort_all_requests": False}
        await self._checked("/update_weight_version", request, deadline_s=deadline_s)

    async def checksum(self, *, deadline_s: float = CONTROL_S) -> list[dict[str, str]]:
        """For each tensor-parallel rank in order: the checksums of the server's own (fused, sharded) parameters."""
        body = await self._checked("/weights_checker", {"action": "checksum"}, deadline_s=deadline_s)
        ranks = sorted(body["ranks"], key=lambda rank: rank["parallelism_info"][0]["tp_rank"])
        return [rank["checksums"] for rank in ranks]

    # Transport

    async def _checked(self, path: str, request: Mapping[str, Any], *, deadline_s: float) -> dict[str, Any]:
        body = await self._json("POST", path, request, deadline_s=deadline_s, headers=self._admin_headers)
        if body.get("success") is not True:
            raise EngineCallError(self.url, path, "the server says it failed", str(body))
        return body

    async def _control(self, path: str, request: Mapping[str, Any], *, deadline_s: float) -> None:
        status, body = await self._send("POST", path, request, deadline_s=deadline_s, headers=self._admin_headers)
        if status != 200:
            raise EngineCallError(self.url, path, f"HTTP {status}", _shown(body))

    async def _json(
        self,
        method: str,
        path: str,
        request: Mapping[str, Any] | None,
        *,
        deadline_s: float,
        headers: Mapping[str, str],
    ) -> dict[str, Any]:
        status, data = await self._send(method, path, request, deadline_s=deadline_s, headers=headers)
        if status != 200:
            raise EngineCallError(self.url, path, f"HTTP {status}", _shown(data))
        try:
            body = json.loads(data.decode())
        except (ValueError, RecursionError) as error:
            raise BadAnswer(self.url, path, f"the answer is no JSON ({type(error).__name__})", _shown(data)) from error
        if not isinstance(body, dict):
            raise BadAnswer(self.url, path, "the answer is no JSON object", _shown(data))
        return body

    async def _send(
        self,
        method: str,
        path: str,
        request: Mapping[str, Any] | None,
        *,
        deadline_s: float,
        headers: Mapping[str, str],
    ) -> tuple[int, bytes]:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False)
        timeout, url = aiohttp.ClientTimeout(total=deadline_s), self.url + path
        try:
            async with self._session.request(
                method, url, json=request, headers=headers, timeout=timeout, allow_redirects=False
            ) as answer:
                body = bytearray()
                async for part in answer.content.iter_any():
                    body += part
                    if len(body) > MOST_ANSWER_BYTES:
                        raise BadAnswer(self.url, path, f"an answer of more than {MOST_ANSWER_BYTES} bytes")
                return answer.status, bytes(body)
        except TimeoutError as error:
            raise EngineTimeout(self.url, path, f"no answer within {deadline_s:g} s") from error
        except aiohttp.ClientError as error:
            raise EngineGone(self.url, path, repr(error)) from error


class EngineFleet:
    """Control calls to several engines at once, for a caller that is not asynchronous. A context manager."""

    def __init__(self, clients: Sequence[EngineClient]) -> None:
        self.clients = {client.url: client for client in clients}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine-fleet", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, call: Callable[[EngineClient], Coroutine[Any, Any, T]]) -> dict[str, Future[T]]:
        """Starts `call(client)` on every engine and returns at once; the futures by URL, to be handed to `wait`."""
        return {url: asyncio.run_coroutine_threadsafe(call(client), self._loop) for url, client in self.clients.items()}

    def wait(self, calls: Mapping[str, Future[T]]) -> dict[str, T]:
        """The results by URL, once all calls have ended; each call's own deadline bounds the wait.

        Raises FleetError if any failed.
        """
        results: dict[str, T] = {}
        failures: dict[str, EngineError] = {}
        for url, future in calls.items():
            try:
                results[url] = future.result()
            except EngineError as error:
                failures[url] = error
        if failures:
            raise FleetError(failures, results)
        return results

    def call(self, call: Callable[[EngineClient], Coroutine[Any, Any, T]]) -> dict[str, T]:
        """`call(client)` on every engine at once, waited for."""
        return self.wait(self.submit(call))

    def remove(self, url: str) -> None:
        """Takes an engine out of the fleet."""
        client = self.clients.pop(url)
        asyncio.run_coroutine_threadsafe(client.close(), self._loop).result()

    def close(self) -> None:
        for url in list(self.clients):
            self.remove(url)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def _shown(body: bytes) -> str:
    """The beginning of a body, without the characters that would change the terminal on which it is shown."""
    text = body[: 4 * BODY_EXCERPT_CHARS].decode(errors="replace")
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
