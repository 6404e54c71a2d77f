"""The engines' side of a push, as rank 0 drives it: one conversation with each engine, all at once, in a thread of its own.

A weight group breaks for all when one of its engines does. So who fails leaves its groups at once, which frees those that wait
for it, and is asked again together with the other innocents: a later attempt sends everything anew, so it makes whole what
the broken one left half updated. Lost is only

    who does not even answer that it has left;
    where all answer, whoever refused first: it is what broke the group.
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

LAST_CALL_S = 1.0  # what a call still gets when the time is over
LEAVE_SHARE = 1 / 4  # of the time that is left, for an engine to say that it has left its groups

Bucket = tuple[HfTensor, ...]
LeftS = Callable[[], float]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """One stage's weight group: the source is rank 0, the engines' ranks follow in the order of the fleet."""

    name: str
    address: str  # of the source
    port: int
    world_size: int
    backend: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How an attempt went."""

    broken: bool  # the groups are of no further use, and nobody who answers is in them
    waiting: Sequence[EngineInfo]  # those that do not hold the version and are to be asked again


class Engines:
    """Those of one push. On the other ranks it is empty."""

    def __init__(self, engines: Sequence[EngineInfo], api_key: str, ends_s: float) -> None:
        """ends_s: when the push must be over, by the monotonic clock; each call gets what is left."""
        self._by_url = {e.url.rstrip("/"): e for e in engines}
        self._ends_s = self._attempt_ends_s = ends_s
        self._fleet = EngineFleet([EngineClient(e.url, api_key=api_key) for e in engines])
        self._groups: Sequence[Group] = ()
        self._receiving: dict[str, Future[EngineCallError | None]] = {}
        self._broke: list[str] = []  # urls, in the order in which their conversations failed
        self._innocent: dict[str, EngineCallError] = {}  # by url: to be asked again
        self.failed: dict[str, str] = {}  # id -> what went wrong: it is lost

    def __enter__(self) -> "Engines":
        return self

    def __exit__(self, *_: object) -> None:
        self._fleet.close()

    def pause(self) -> Sequence[EngineInfo]:
        """Has all engines stand still and forget their KV cache; returns those that did."""
        self._settle(self._fleet.submit(lambda client: _pause(client, self._left_s)))
        return [self._by_url[url] for url in self._fleet.clients]

    def start_receiving(
        self,
        engines: Sequence[EngineInfo],
        leave: Sequence[str],
        join: bool,
        groups: Sequence[Group],
        plan: Sequence[Sequence[Bucket]],
        version: int,
        ends_s: float,
    ) -> None:
        """Begins an attempt. leave: names of groups that those of an earlier push are still in; ends_s: of the attempt."""
        self._attempt_ends_s, self._groups, self._broke = ends_s, groups, []
        offsets, offset = {}, 1
        for engine in engines:
            offsets[engine.url.rstrip("/")] = offset
            offset += engine.tp

        async def conversation(client: EngineClient) -> EngineCallError | None:
            """None: it holds the version. An error: it has left its groups, to be asked again. Raises if it is lost."""
            if client.url not in offsets:
                return None
            try:
                await _left(client, leave, self._attempt_left_s())
                if join:
                    await _join(client, groups, offsets[client.url], self._attempt_left_s)
                await _receive(client, groups, plan, version, self._attempt_left_s)
            except EngineCallError as error:
                self._broke.append(client.url)
                if await _left(client, [g.name for g in groups], LEAVE_SHARE * self._left_s()):
                    return error
                raise
            return None

        self._receiving = self._fleet.submit(conversation)

    def finish_receiving(self, *, sent: bool) -> Ended:
        """sent: whether the trainer's ranks could send everything."""
        lost = len(self.failed)
        self._innocent = {url: error for url, error in self._settle(self._receiving).items() if error is not None}
        if sent and not self._innocent and len(self.failed) == lost:
            return Ended(broken=False, waiting=())
        if len(self.failed) == lost:
            refused = (url for url in self._broke if self._innocent[url].answered)
            if (first := next(refused, None)) is not None:
                self._lose(first, self._innocent.pop(first))
        # Those that hold the version leave the groups too: nobody will use them again.
        self._fleet.call(lambda client: _left(client, [g.name for g in self._groups], LEAVE_SHARE * self._left_s()))
        return Ended(broken=True, waiting=[self._by_url[url] for url in self._innocent])

    def give_up(self) -> None:
        """The time is over: who was to be asked again is lost."""
        for url, error in self._innocent.items():
            self._lose(url, error)

    def compare(self, expected: Sequence[Mapping[str, str]], engines: Sequence[EngineInfo]) -> None:
        """Fails each of `engines` that does not hold exactly the weights with these checksums, [tp]."""
        ids = {e.id for e in engines}

        async def check(client: EngineClient) -> None:
            if self._by_url[client.url].id not in ids:
                return
            held = await client.checksum(deadline_s=self._left_s())
            for rank, (ours, theirs) in enumerate(zip(expected, held, strict=True)):
                if wrong := [name for name, value in ours.items() if theirs.get(name) != value]:
                    raise EngineError(f"engine {client.url}, rank {rank}: other weights than were pushed: {', '.join(wrong[:5])}")

        self._settle(self._fleet.submit(check))

    def _left_s(self) -> float:
        return max(self._ends_s - time.monotonic(), LAST_CALL_S)

    def _attempt_left_s(self) -> float:
        return max(self._attempt_ends_s - time.monotonic(), LAST_CALL_S)

    def _settle(self, calls: Mapping[str, Future[T]]) -> dict[str, T]:
        """Waits for the calls; the results of those that did not fail. An engine whose call failed is lost."""
        try:
            return self._fleet.wait(calls)
        except FleetError as error:
            for url, failure in error.failures.items():
                self._lose(url, failure)
            return error.results

    def _lose(self, url: str, error: EngineError) -> None:
        self.failed[self._by_url[url].id] = str(error)
        self._fleet.remove(url)


async def _pause(client: EngineClient, left_s: LeftS) -> None:
    await client.pause("retract", deadline_s=left_s())
    await client.flush_cache(deadline_s=left_s())


async def _left(client: EngineClient, groups: Sequence[str], deadline_s: float) -> bool:
    """Whether it answers that it is in none of these groups any more."""
    try:
        for name in groups:
            await client.leave_push_group(name, deadline_s=deadline_s)
    except EngineCallError:
        return False
    return True


async def _join(client: EngineClient, groups: Sequence[Group], rank_offset: int, left_s: LeftS) -> None:
    """Stage by stage: an engine that joined them in another order than its neighbour would wait for ever."""
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
    client: EngineClient, groups: Sequence[Group], plan: Sequence[Sequence[Bucket]], version: int, left_s: LeftS
) -> None:
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
    await client.end_weight_update(version, deadline_s=left_s())
    await client.continue_(deadline_s=left_s())
