"""What a judge asks of services: requests by HTTP, batched, and repeated until there is an answer.

    services = Services()
    score = services.ask(Endpoint(url="http://127.0.0.1:9000/score", batch=16), item, read, cancelled)

A service that cannot be reached, answers too late, or answers with an HTTP error is asked again for as long as it takes: no
completion gets a reward of 0 because a service is down. The log says so every SAY_S seconds. After TRIES failures of its own an
item is given up (`ContractError`): answers that `read` refuses, or failed requests while the service answers others. If nobody
else asks, the service is asked again about an item that it has answered before.
"""

import asyncio
import json
import logging
import math
import os
import random
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp

from reward.jail.limits import Cancelled
from reward.kinds.endpoint import ContractError, Endpoint, OwnServer

log = logging.getLogger("reward")

TRIES = 3
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
GATHER_S = 0.02  # a batch waits this long for more items
AT_ONCE = 64  # items that are under way to one service
MOST_ANSWER_BYTES = 1 << 20  # per item
SAY_S = 30.0
ASK_S = 0.5  # a caller checks this often whether its answer is still wanted
EXCERPT = 200

T = TypeVar("T")
Read = Callable[[Any], T]
"""Makes a value of an answer. Raises ContractError for an answer that breaks the contract."""


class RequestFailed(Exception):
    """A request that brought no answer. `pause_s`: how long the service asks to be left alone. `is_down`: nothing was reached, so
    it is no matter of what was sent."""

    def __init__(self, reason: str, *, pause_s: float = 0.0, is_down: bool = False) -> None:
        super().__init__(reason)
        self.pause_s, self.is_down = pause_s, is_down


@dataclass(slots=True, kw_only=True, eq=False)
class Item:
    """One item on its way."""

    data: Mapping[str, Any]
    read: Read[Any]
    answer: asyncio.Future[Any]
    alone: bool = False  # it is sent in a request of its own, since a request with it has failed
    failures: int = 0  # that are its own
    answered_before: int | None = None  # how many items the service had answered when this one failed the last time


class Services:
    """The connections of a judge. One thread drives them; it starts with the first question. Any thread may ask."""

    def __init__(self, own: OwnServer | None = None) -> None:
        self._own = own
        self._lock = threading.Lock()  # guards the start of the thread
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._services: dict[Endpoint, Service] = {}

    def ask(self, endpoint: Endpoint, data: Mapping[str, Any], read: Read[T], cancelled: Callable[[], bool]) -> T:
        """What `read` makes of the service's answer. Raises ContractError, and Cancelled when nobody wants it any more."""
        future = self._start(self._ask(endpoint, data, read))
        while True:
            try:
                return future.result(timeout=ASK_S)
            except TimeoutError:
                if cancelled():
                    future.cancel()
                    raise Cancelled from None

    def close(self) -> None:
        if self._loop is None or self._thread is None:
            return
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(timeout=2.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=2.0)

    def _start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="services", daemon=True)
                self._thread.start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _ask(self, endpoint: Endpoint, data: Mapping[str, Any], read: Read[T]) -> T:
        if endpoint not in self._services:
            self._services[endpoint] = Service(endpoint, self._own)
        return await self._services[endpoint].ask(data, read)

    async def _close(self) -> None:
        await asyncio.gather(*(service.close() for service in self._services.values()))


class Service:
    """One endpoint. It lives in the thread of `Services`."""

    def __init__(self, endpoint: Endpoint, own: OwnServer | None) -> None:
        self._endpoint, self._own = endpoint, own
        self._session = aiohttp.ClientSession(
            trust_env=not (endpoint.is_local or endpoint.is_own),  # a proxy is never asked for the run's own machines
            timeout=aiohttp.ClientTimeout(total=endpoint.timeout_s),
            connector=aiohttp.TCPConnector(limit=AT_ONCE),
        )
        self._items: asyncio.Queue[Item] = asyncio.Queue()
        self._waiting = self._answered = 0
        self._known: Item | None = None  # the last that the service has answered
        self._failing_since_s: float | None = None
        self._said_s = -math.inf
        self._pause_s = FIRST_PAUSE_S
        self._forming = asyncio.Lock()  # one batch is put together at a time
        self._probe = asyncio.Lock()  # while the service fails, one request at a time
        self._senders = [asyncio.create_task(self._send_all()) for _ in range(max(1, AT_ONCE // max(1, endpoint.batch)))]

    async def ask(self, data: Mapping[str, Any], read: Read[T]) -> T:
        item = Item(data=data, read=read, answer=asyncio.get_running_loop().create_future())
        self._items.put_nowait(item)
        self._waiting += 1
        try:
            return await item.answer
        finally:
            self._waiting -= 1

    async def close(self) -> None:
        for sender in self._senders:
            sender.cancel()
        await asyncio.gather(*self._senders, return_exceptions=True)
        await self._session.close()

    # Sending

    async def _send_all(self) -> None:
        while True:
            items = [item for item in await self._next_batch() if not item.answer.done()]
            if not items:
                continue
            if self._failing_since_s is None:
                await self._send(items)
                continue
            async with self._probe:
                pause_s = await self._send(items)
                await asyncio.sleep(pause_s)

    async def _next_batch(self) -> list[Item]:
        async with self._forming:
            items = [await self._items.get()]
            if items[0].alone or self._endpoint.batch <= 1:
                return items
            if self._items.qsize() + 1 < self._endpoint.batch:
                await asyncio.sleep(GATHER_S)
            while len(items) < self._endpoint.batch and not self._items.empty():
                item = self._items.get_nowait()
                if item.alone:
                    self._items.put_nowait(item)
                    break
                items.append(item)
            return items

    async def _send(self, items: Sequence[Item]) -> float:
        """Sends a request, and says how long to leave the service alone."""
        try:
            answers = await self._request(items)
        except RequestFailed as failure:
            self._has_failed(str(failure))
            for item in items:
                is_own = item.alone and len(items) == 1 and not failure.is_down and await self._answers_others(item)
                item.alone |= not failure.is_down
                item.answered_before = self._answered
                self._again(item, str(failure), is_own=is_own)
            pause_s = max(self._pause_s * random.uniform(0.5, 1.0), min(failure.pause_s, LONGEST_PAUSE_S))
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            return pause_s
        for item, answer in zip(items, answers, strict=True):
            self._take(item, answer)
        return 0.0

    async def _request(self, items: Sequence[Item]) -> list[Any]:
        """The answer to each item. Raises RequestFailed."""
        if not self._endpoint.batch:
            return [await self._post(items[0].data, MOST_ANSWER_BYTES)]
        answer = await self._post({"items": [item.data for item in items]}, MOST_ANSWER_BYTES * len(items))
        answers = answer.get("items") if isinstance(answer, dict) else None
        if isinstance(answers, list) and len(answers) == len(items):
            return answers
        if len(items) == 1:
            return [answer]  # to be refused by the item's own `read`
        raise RequestFailed(f"its answer must be an object whose `items` is a list of {len(items)}, got {str(answer)[:EXCERPT]}")

    async def _post(self, body: Mapping[str, Any], most_bytes: int) -> Any:
        url, token = self._where()
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
        answer = bytearray()
        try:
            request = self._session.post(url, data=json.dumps(body), headers=headers, allow_redirects=False)
            async with request as response:
                async for chunk in response.content.iter_chunked(1 << 16):
                    answer += chunk
                    if len(answer) > most_bytes:
                        raise RequestFailed(f"its answer is longer than {most_bytes} bytes")
        except TimeoutError:
            raise RequestFailed(f"no answer within {self._endpoint.timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise RequestFailed(f"it cannot be reached: {error or type(error).__name__}", is_down=True) from None
        text = answer.decode("utf-8", "replace")
        if response.status != 200:
            after = response.headers.get("Retry-After", "")
            pause_s = float(after) if after.isdecimal() else 0.0
            raise RequestFailed(f"it answers {response.status}: {text[:EXCERPT]}", pause_s=pause_s)
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text  # to be refused by `read`

    def _where(self) -> tuple[str, str]:
        """The URL and the token. Raises RequestFailed."""
        endpoint = self._endpoint
        if self._own is None or not endpoint.is_own:
            return endpoint.url, os.environ.get(endpoint.token_env, "") if endpoint.token_env else ""
        try:
            return self._own.address() + endpoint.url, self._own.api_key
        except OSError:
            raise RequestFailed("its server is not there yet", is_down=True) from None

    # What came of it

    def _take(self, item: Item, answer: Any) -> None:
        try:
            found = item.read(answer)
        except ContractError as error:
            item.alone = True
            self._again(item, str(error), is_own=True)
            return
        if self._failing_since_s is not None:
            log.error("%s answers again, after %.0f s", self._endpoint, time.monotonic() - self._failing_since_s)
        self._answered, self._known = self._answered + 1, item
        self._failing_since_s, self._said_s, self._pause_s = None, -math.inf, FIRST_PAUSE_S
        if not item.answer.done():
            item.answer.set_result(found)

    def _again(self, item: Item, reason: str, *, is_own: bool) -> None:
        item.failures += is_own
        if item.failures < TRIES:
            self._items.put_nowait(item)
        elif not item.answer.done():
            item.answer.set_exception(ContractError(f"{reason} ({TRIES} times)"))

    async def _answers_others(self, item: Item) -> bool:
        """Whether the service has answered another item since this one failed the last time, or does so now."""
        if item.answered_before is None:
            return False
        if self._answered > item.answered_before:
            return True
        if self._known is None:
            return False
        try:
            [answer] = await self._request([self._known])
            self._known.read(answer)
        except (RequestFailed, ContractError):
            return False
        return True

    def _has_failed(self, reason: str) -> None:
        now = time.monotonic()
        if self._failing_since_s is None:
            self._failing_since_s = now
        if now - self._said_s > SAY_S:
            self._said_s = now
            log.error("%s: %s; %d completions wait and are asked again", self._endpoint, reason, self._waiting)
