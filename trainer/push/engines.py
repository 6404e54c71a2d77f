"""Drives the engines' side of a push from rank 0: one conversation per engine, all at the same time, in a thread of its own.

An engine's answer to a bucket does not say that the bucket has arrived: on a GPU it comes when the broadcast is enqueued. So each
engine is asked for the checksums of its weights, for which it waits until they are there. Only an engine whose weights have
exactly the checksums of the trainer's ends the update and holds the version.

When one engine fails, its weight group breaks for all. So an engine whose call fails leaves its groups at once, which frees the
engines that wait for it. It then takes part in the next attempt with the others, which sends everything again and so completes
an engine that the broken attempt left half updated. Only these engines are lost:

    an engine that does not even answer that it has left its groups;
    an engine that holds other weights than the trainer sent;
    if all engines answer: the first one that refused a call, because its refusal broke the group.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from rollout.engine_client import EngineCallError, EngineClient, EngineError, EngineFleet, FleetError
from rollout.ledger.records import EngineInfo
from trainer.megatron.hf_weights import HfTensor
from trainer.push import weight_group
from trainer.push.broadcasts import LAST_CALL_S

LEAVE_SHARE = 1 / 4  # the share of the remaining time in which an engine must answer that it has left its groups

Bucket = tuple[HfTensor, ...]
LeftS = Callable[[], float]
Checksums = list[dict[str, str]]
"""The checksums of the parameters that each tensor-parallel rank of an engine holds, by name, [tp]."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightGroup:
    """The weight group of one stage: the source is rank 0, and the ranks of the engines follow in the order of the fleet."""

    name: str
    address: str  # where the source listens
    port: int
    world_size: int
    backend: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptResult:
    """How an attempt ended."""

    broken: bool  # the groups cannot be used again, and every engine that answers has left them
    waiting: Sequence[EngineInfo]  # engines that do not hold the version and take part in the next attempt


class Engines:
    """The engines of one push. On ranks other than 0 there are none."""

    def __init__(self, engines: Sequence[EngineInfo], api_key: str, ends_s: float) -> None:
        """ends_s: the deadline of the push, by the monotonic clock; each call gets the time that is left."""
        self._by_url = {e.url.rstrip("/"): e for e in engines}
        self._ends_s = self._attempt_ends_s = ends_s
        self._fleet = EngineFleet([EngineClient(e.url, api_key=api_key) for e in engines])
        self._groups: Sequence[WeightGroup] = ()
        self._receiving: dict[str, Future[Checksums | EngineCallError | None]] = {}
        self._failing_order: list[str] = []  # urls, in the order in which their conversations failed
        self._retrying: dict[str, EngineCallError] = {}  # by url: they take part in the next attempt
        self.failed: dict[str, str] = {}  # id of a lost engine -> what went wrong

    def __enter__(self) -> "Engines":
        return self

    def __exit__(self, *_: object) -> None:
        self._fleet.close()

    def pause(self) -> Sequence[EngineInfo]:
        """Pauses all engines and flushes their KV caches; returns the engines that did so."""
        self._results(self._fleet.submit(lambda client: _pause(client, self._left_s)))
        return [self._by_url[url] for url in self._fleet.clients]

    def start_receiving(
        self,
        engines: Sequence[EngineInfo],
        leave: Sequence[str],
        join: bool,
        groups: Sequence[WeightGroup],
        plan: Sequence[Sequence[Bucket]],
        ends_s: float,
    ) -> None:
        """Begins an attempt. leave: names of groups in which engines still are since an earlier push; ends_s: its deadline."""
        self._attempt_ends_s, self._groups, self._failing_order = ends_s, groups, []
        offsets, offset = {}, 1
        for engine in engines:
            offsets[engine.url.rstrip("/")] = offset
            offset += engine.tp

        async def conversation(client: EngineClient) -> Checksums | EngineCallError | None:
            """The checksums of what the engine holds now; None if it takes no part.

            An error: it has left its groups and can try again. Raises if it is lost.
            """
            if client.url not in offsets:
                return None
            try:
                await _leave(client, leave, self._attempt_left_s())
                if join:
                    await _join(client, groups, offsets[client.url], self._attempt_left_s)
                return await _receive(client, groups, plan, self._attempt_left_s)
            except EngineCallError as error:
                self._failing_order.append(client.url)
                if await _leave(client, [g.name for g in groups], LEAVE_SHARE * self._left_s()):
                    return error
                raise

        self._receiving = self._fleet.submit(conversation)

    def finish_receiving(self, version: int, expected: Checksums, *, sent: bool) -> AttemptResult:
        """Gives `version` to the engines whose weights have the `expected` checksums.

        sent: whether the ranks of the trainer could send everything.
        """
        lost = len(self.failed)
        answers = self._results(self._receiving)
        self._retrying = {url: answer for url, answer in answers.items() if isinstance(answer, EngineCallError)}
        self._complete({url: answer for url, answer in answers.items() if isinstance(answer, list)}, expected, version)
        if sent and not self._retrying and len(self.failed) == lost:
            return AttemptResult(broken=False, waiting=())
        if len(self.failed) == lost:
            refused = (url for url in self._failing_order if self._retrying[url].answered)
            if (first := next(refused, None)) is not None:
                self._lose(first, self._retrying.pop(first))
        # Engines that hold the version leave the groups too, because these groups are not used again.
        self._fleet.call(lambda client: _leave(client, [g.name for g in self._groups], LEAVE_SHARE * self._left_s()))
        return AttemptResult(broken=True, waiting=[self._by_url[url] for url in self._retrying])

    def give_up(self) -> None:
        """Called when the time is over: engines that would have taken part in another attempt are lost."""
        for url, error in self._retrying.items():
            self._lose(url, error)

    def _complete(self, held: Mapping[str, Checksums], expected: Checksums, version: int) -> None:
        """Ends the update of each engine that holds what was sent; loses the others. held: by url."""
        for url, ranks in held.items():
            if wrong := _different(expected, ranks):
                self._lose(url, EngineError(f"engine {url} holds other weights than were pushed: {', '.join(wrong[:5])}"))

        async def end(client: EngineClient) -> None:
            if client.url in held:
                await client.end_weight_update(version, deadline_s=self._attempt_left_s())
                await client.continue_(deadline_s=self._attempt_left_s())

        self._results(self._fleet.submit(end))

    def _left_s(self) -> float:
        return max(self._ends_s - time.monotonic(), LAST_CALL_S)

    def _attempt_left_s(self) -> float:
        return max(self._attempt_ends_s - time.monotonic(), LAST_CALL_S)

    def _results(self, calls: Mapping[str, Future[T]]) -> dict[str, T]:
        """Waits for the calls, and returns the results of those that succeeded. An engine whose call failed is lost."""
        try:
            return self._fleet.wait(calls)
        except FleetError as error:
            for url, failure in error.failures.items():
                self._lose(url, failure)
            return error.results

    def _lose(self, url: str, error: EngineError) -> None:
        self.failed[self._by_url[url].id] = str(error)
        self._fleet.remove(url)


def _different(expected: Checksums, held: Checksums) -> list[str]:
    """The parameters that have another checksum than the trainer's."""
    return [
        f"{name} on rank {rank}"
        for rank, ours in enumerate(expected)
        for name, value in ours.items()
        if len(held) != len(expected) or held[rank].get(name) != value
    ]


async def _pause(client: EngineClient, left_s: LeftS) -> None:
    await client.pause("retract", deadline_s=left_s())
    await client.flush_cache(deadline_s=left_s())


async def _leave(client: EngineClient, groups: Sequence[str], deadline_s: float) -> bool:
    """Whether the engine answers that it is no longer in any of these groups."""
    try:
        for name in groups:
            await client.leave_push_group(name, deadline_s=deadline_s)
    except EngineCallError:
        return False
    return True


async def _join(client: EngineClient, groups: Sequence[WeightGroup], rank_offset: int, left_s: LeftS) -> None:
    """Joins stage by stage: engines that joined in different orders would wait for one another forever."""
    for group in groups:
        await client.init_push_group(
            group.address,
            group.port,
            rank_offset=rank_offset,
            world_size=group.world_size,
            group_name=group.name,
            backend=group.backend,
            deadline_s=left_s(),
        )


async def _receive(
    client: EngineClient, groups: Sequence[WeightGroup], plan: Sequence[Sequence[Bucket]], left_s: LeftS
) -> Checksums:
    await client.begin_weight_update(deadline_s=left_s())
    for group, buckets in zip(groups, plan, strict=True):
        for bucket in buckets:
            await client.receive_bucket(
                [t.name for t in bucket],
                [weight_group.dtype_name(t.dtype) for t in bucket],
                [t.shape for t in bucket],
                group_name=group.name,
                deadline_s=left_s(),
            )
    return await client.checksum(deadline_s=left_s())
