"""An engine that breaks in the middle of a push is lost; the others get through, with what they had in hand.

Each case runs over gloo and over a model of NCCL.
"""

import asyncio
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from aiohttp import web

from conf.shapes import Layout
from rollout.engine_client import EngineClient
from rollout.ledger.records import EngineInfo
from tests.rollout.engine_controls import version_of
from tests.rollout.fake_engine import FakeEngine, answer, serve
from tests.rollout.stage import free_ports
from tests.trainer import ranks
from tests.trainer.megatron.test_policy import batch, config, model_folder
from tests.trainer.push import nccl_model
from trainer.push.push import PushReport

ENGINES = 4
BROKEN = 2  # the engine that breaks, in the second push
PUSH_S, SHORT_PUSH_S = 16.0, 4.0
LATE_S = 1.0
STALLS = "its stream stalls"
NOT_THERE = (LATE, NEVER) = ("acknowledges at once, loads later", "acknowledges, never loads")
OLD_GROUP, NEW_GROUP = "old group", "new group"  # whether the engines of the second push were in the groups already


class BreakingEngine(FakeEngine):
    """Like the others, until version 0 is there; then it breaks at a call of this path, the n-th of the push."""

    def __init__(self, *, how: str, path: str, nth: int, **settings: Any) -> None:
        super().__init__(**settings)
        self._how, self._path, self._left = how, path, nth

    async def _init_group(self, http: web.Request) -> web.Response:
        return await self._break_at("join") or await super()._init_group(http)

    async def _begin(self, http: web.Request) -> web.Response:
        return await self._break_at("begin") or await super()._begin(http)

    async def _receive(self, http: web.Request) -> web.Response:
        held = dict(self.weights)
        response = await self._break_at("receive") or await super()._receive(http)
        if self._how in NOT_THERE and self.version != "-1":
            received, self.weights = self.weights, held
            if self._how == LATE:
                asyncio.get_running_loop().call_later(LATE_S, self.weights.update, received)
        return response

    async def _end(self, http: web.Request) -> web.Response:
        return await self._break_at("end") or await super()._end(http)

    async def _break_at(self, path: str) -> web.Response | None:
        if path != self._path or self._how in NOT_THERE or self.version == "-1":
            return None
        self._left -= 1
        if self._left > 0:
            return None
        if self._how == "refuses":
            return answer(False, "out of memory")
        number = signal.SIGKILL if self._how == "killed" else signal.SIGSTOP
        if path in ("join", "receive"):  # a little later: meanwhile the collective has begun
            asyncio.get_running_loop().call_later(0.005, os.kill, os.getpid(), number)
        else:
            os.kill(os.getpid(), number)
        return None


class EnqueuingEngine(FakeEngine):
    """Answers when a bucket's broadcast is enqueued, as SGLang does on a GPU. It may stall after the first push."""

    def __init__(self, *, how: str, path: str, nth: int, **settings: Any) -> None:
        super().__init__(**settings)
        self._stalls = how == STALLS

    async def _receive(self, http: web.Request) -> web.Response:
        body = await http.json()
        group = self._groups[body["group_name"]]
        group.blocking_wait = False
        if self._stalls and self.version != "-1":
            group.enqueue(threading.Event().wait)
        types = [getattr(torch, dtype) for dtype in body["dtypes"]]
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(body["shapes"], types, strict=True)]
        bucket = torch.empty(sum(sizes), dtype=torch.uint8)
        dist.broadcast(bucket, group_src=0, group=group)
        parts = zip(body["names"], bucket.split(sizes), types, body["shapes"], strict=True)
        group.enqueue(lambda: self.weights.update({name: p.clone().view(t).view(s) for name, p, t, s in parts}))
        return answer(True)

    async def _checksum(self, http: web.Request) -> web.Response:
        for group in self._groups.values():
            await asyncio.to_thread(group.synchronize)
        return await super()._checksum(http)


def engine(port: int, how: str = "", path: str = "", nth: int = 1, kind: type[FakeEngine] = BreakingEngine) -> None:
    nccl_model.register()
    asyncio.run(serve(kind(port=port, version="-1", how=how, path=path, nth=nth, weight_group_s=PUSH_S / 4)))


@contextmanager
def fleet(how: str, path: str, nth: int, kind: type[FakeEngine] = BreakingEngine) -> Iterator[list[EngineInfo]]:
    port = free_ports(ENGINES)
    faults = [(how, path, nth, kind) if n == BROKEN else ("", "", 1, kind) for n in range(ENGINES)]
    processes = [ranks.start(engine, port + n, *fault) for n, fault in enumerate(faults)]
    infos = [EngineInfo(name=f"engine-{n}", url=f"http://127.0.0.1:{port + n}", tp=1, epoch=1) for n in range(ENGINES)]
    try:
        asyncio.run(healthy(infos))
        yield infos
    finally:
        for process in processes:
            process.kill()
            process.join()


async def healthy(infos: list[EngineInfo]) -> None:
    for info in infos:
        async with EngineClient(info.url) as client:
            while not await client.healthy():
                await asyncio.sleep(0.05)


class Fleet:
    """Stands for the queue: the engines that are there."""

    def __init__(self, engines: list[EngineInfo]) -> None:
        self.engines = engines

    def fleet(self) -> list[EngineInfo]:
        return self.engines


def push_three_times(
    folder: str, engines: list[EngineInfo], port: int, when: str, backend: str
) -> tuple[list[PushReport], list[bool]]:
    """Pushes versions 0, 1 and 2, one training step apart; the reports, and whether each engine that is left holds version 2."""
    from trainer import process_groups
    from trainer.learn.algorithm import load_algorithm
    from trainer.megatron import hf_weights
    from trainer.megatron.policy import load_policy
    from trainer.push import weight_group
    from trainer.push.push import Pusher
    from trainer.ranks import Control
    from trainer.step import Stopwatch, train_step

    settings = config()
    settings.model.path, settings.model.dtype, settings.algo.kl_coef = folder, "float32", 0.0
    mesh = process_groups.initialize(Layout(pp=2), seed=0, timeout_s=40)
    policy = load_policy(settings, mesh)
    there = Fleet(engines[: ENGINES - 1] if when == NEW_GROUP else engines)
    pusher = Pusher(
        policy, Control(timeout_s=40), there, address="127.0.0.1", first_port=port, bucket_bytes=5_000, deadline_s=PUSH_S,
        engine_api_key="",
    )  # fmt: skip
    nccl_model.register()
    pusher._backend = backend
    reports = []
    for version in range(3):
        reports.append(pusher.push(version))
        there.engines = [e for e in engines if e.id not in reports[-1].failed]
        train_step(policy, load_algorithm(settings.algo), batch(version), settings, Stopwatch()) if version < 2 else None
    values = ((name, value) for name, value in hf_weights.hf_tensors(policy.chunks, policy.shape, mesh) if value is not None)
    (mine,) = weight_group.expected_checksums(values)
    held = asyncio.run(checksums([e for e in engines if e.id in reports[-1].engines]))
    process_groups.shutdown()
    return reports, [all(found.get(name) == value for name, value in mine.items()) for found in held]


async def checksums(engines: list[EngineInfo]) -> list[dict[str, str]]:
    found = []
    for info in engines:
        async with EngineClient(info.url) as client:
            assert await version_of(client) == 2
            found += await client.checksum()
    return found


FAULTS = [
    ("killed", "receive", 2, OLD_GROUP),
    ("killed", "receive", 1, NEW_GROUP),
    ("refuses", "receive", 3, OLD_GROUP),
    (LATE, "receive", 1, OLD_GROUP),
    (NEVER, "receive", 1, OLD_GROUP),
    ("killed", "begin", 1, OLD_GROUP),
    ("killed", "end", 1, OLD_GROUP),
    ("killed", "join", 1, NEW_GROUP),
    ("killed", "join", 2, NEW_GROUP),
    ("frozen", "receive", 2, OLD_GROUP),
    ("frozen", "begin", 1, NEW_GROUP),
    ("frozen", "join", 1, NEW_GROUP),
    ("refuses", "join", 1, NEW_GROUP),
    ("refuses", "begin", 1, OLD_GROUP),
    ("refuses", "begin", 1, NEW_GROUP),
    ("refuses", "end", 1, OLD_GROUP),
]
OFTEN = [("gloo", *fault) for fault in FAULTS[:4]] + [(nccl_model.NAME, "refuses", "begin", 1, NEW_GROUP)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("backend", "how", "path", "nth", "when"),
    [
        case if case in OFTEN else pytest.param(*case, marks=pytest.mark.slow)
        for case in ((backend, *fault) for backend in ("gloo", nccl_model.NAME) for fault in FAULTS)
    ],
)
def test_only_the_engine_that_breaks_is_lost(tmp_path: Path, backend: str, how: str, path: str, nth: int, when: str) -> None:
    with fleet(how, path, nth) as engines:
        lose_one(tmp_path, engines, when, backend)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", ["", STALLS])
def test_an_engine_that_answers_before_its_weights_arrive_holds_them_when_it_is_reported(tmp_path: Path, how: str) -> None:
    with fleet(how, "", 1, EnqueuingEngine) as engines:
        lose_one(tmp_path, engines, OLD_GROUP, nccl_model.NAME, broken=[engines[BROKEN].id] if how else [])


def lose_one(tmp_path: Path, engines: list[EngineInfo], when: str, backend: str, broken: list[str] | None = None) -> None:
    """Three pushes, of which the second one loses the broken engine and reaches the others."""
    results = ranks.run(push_three_times, 2, model_folder(tmp_path), engines, free_ports(20), when, backend, deadline_s=90)
    broken = [engines[BROKEN].id] if broken is None else broken
    survivors = [e.id for e in engines if e.id not in broken]
    for reports, held in results:
        first, second, third = reports
        assert not first.failed
        assert list(second.engines) == survivors and list(second.failed) == broken, second.failed
        assert list(third.engines) == survivors and not third.failed
        assert held == [True] * len(survivors)
        assert second.stall_s < PUSH_S + 5


def push_while_torch_hangs(folder: str, engines: list[EngineInfo], port: int, hanging: str) -> PushReport:
    """Pushes once; a call of torch's on the source never returns."""
    from trainer import process_groups
    from trainer.megatron.policy import load_policy
    from trainer.push import push, weight_group
    from trainer.ranks import Control

    settings = config()
    settings.model.path, settings.model.dtype, settings.algo.kl_coef = folder, "float32", 0.0
    policy = load_policy(settings, process_groups.initialize(Layout(), seed=0, timeout_s=40))
    pusher = push.Pusher(
        policy, Control(timeout_s=40), Fleet(engines), address="127.0.0.1", first_port=port, bucket_bytes=5_000,
        deadline_s=SHORT_PUSH_S, engine_api_key="",
    )  # fmt: skip
    if hanging == "join":
        weight_group.join = lambda *_, **__: time.sleep(600)
    else:
        broadcast = push.dist.broadcast

        def hang_on_weights(*args: Any, **options: Any) -> Any:
            return time.sleep(600) if options.get("async_op") else broadcast(*args, **options)

        push.dist.broadcast = hang_on_weights
    return pusher.push(0)


@pytest.mark.parametrize("hanging", ["join", "broadcast"])
def test_the_deadline_of_a_push_holds_when_torch_never_returns(tmp_path: Path, hanging: str) -> None:
    """As NCCL does in its first broadcast to an engine that has died."""
    with fleet("", "", 1) as engines:
        (report,) = ranks.run(push_while_torch_hangs, 1, model_folder(tmp_path), engines, free_ports(20), hanging)
    assert report.stall_s < SHORT_PUSH_S + 5
    assert not report.engines and set(report.failed) == {engine.id for engine in engines}
