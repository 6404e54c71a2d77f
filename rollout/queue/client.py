"""The clients of the queue server: `QueueClient` blocks, `AsyncQueueClient` awaits. Both send the requests in `messages.py`.

Both send a request again, with the same id, until it is answered or its deadline passes, so a restart of the server is only a
pause. Requests are idempotent: repeating one changes nothing. A client belongs to one thread or one event loop, and a process may
have several clients.
"""

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self, TypeVar

import numpy as np
import zmq
import zmq.asyncio

from rollout.ledger.records import (
    I32,
    NOT_SAMPLED,
    Answered,
    Batch,
    EngineInfo,
    EvalResult,
    GradingWork,
    Heard,
    Position,
    Segment,
    SegmentWork,
    Waiting,
)
from rollout.ledger.wire import WireError, decode, pack, unpack
from rollout.queue import messages as m
from rollout.queue.keys import RunKeys

RESEND_S = 3.0  # an unanswered request is sent again after this time
POLL_S = 0.1
A = TypeVar("A")


class QueueError(RuntimeError):
    """The queue server did not carry out a request."""


class QueueTimeout(QueueError):
    """No answer came before the deadline: the server is gone, or the client has the keys of another run."""


class Refused(QueueError):
    """The server refused the request. The message says why."""


class Stalled(QueueError):
    """Nothing has changed for `stall_s`. The message holds the table of who waits for what."""


class _Client:
    """The common part of both clients: socket options, envelopes and answers."""

    def __init__(self, endpoint: str, keys: RunKeys, name: str, timeout_s: float) -> None:
        self.endpoint = endpoint
        self.timeout_s = timeout_s
        self._client = f"{name}#{secrets.token_hex(4)}"
        self._ids = itertools.count(1)
        self._keys = keys

    def _connect(self, socket: zmq.Socket) -> None:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 5_000)  # detects a broken connection, so that the socket reconnects
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15_000)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2_000)
        socket.curve_serverkey = self._keys.server_public.encode()
        socket.curve_publickey = self._keys.client_public.encode()
        socket.curve_secretkey = self._keys.client_secret.encode()
        socket.connect(self.endpoint)

    def _envelope(self, request: Any) -> tuple[int, bytes]:
        request_id = next(self._ids)
        return request_id, pack({"client": self._client, "id": request_id, "op": type(request).__name__, "fields": request})

    def _read(self, request: Any, answer: m.Answer) -> Any:
        if answer.error:
            kind = Stalled if answer.error == "stalled" else Refused
            raise kind(f"{type(request).__name__}: {answer.value}")
        try:
            return decode(request.answer, answer.value)
        except WireError as error:
            raise QueueError(f"the queue server's answer cannot be read: {error}") from error

    def _timeout(self, request: Any, waited_s: float) -> QueueTimeout:
        return QueueTimeout(
            f"the queue server at {self.endpoint} did not answer {type(request).__name__} within {waited_s:.0f} s: "
            "it is not running, it is not reachable, or this process has the keys of another run"
        )


class QueueClient(_Client):
    """For the trainer, the judges and the launcher."""

    def __init__(
        self, endpoint: str, keys: RunKeys, name: str, timeout_s: float = 30.0, decode_tokens: Callable[[I32], str] | None = None
    ) -> None:
        """decode_tokens: turns the tokens of a completion into text. Only a judge needs it."""
        super().__init__(endpoint, keys, name, timeout_s)
        self._decode_tokens = decode_tokens
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._connect(self._socket)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._context.destroy(linger=0)

    # The trainer's requests.

    def take(self, step: int, wait_s: float = 10.0) -> Batch | Waiting:
        """The batch of this step; a repeated request gets the same batch. Raises Stalled if the batch can no longer come."""
        answer: m.TakeAnswer = self._call(m.Take(step=step, wait_s=wait_s), wait_s)
        if answer.groups is not None:
            return Batch(step=step, groups=tuple(group.assemble() for group in answer.groups))
        if answer.waiting is None:
            raise QueueError("the queue server answered `take` with neither a batch nor a reason")
        return answer.waiting

    def advance(self, version: int, engines: Sequence[EngineInfo | str]) -> None:
        """Reports that the step is done and that exactly these engines hold the new version."""
        self._call(m.Advance(version=version, engines=_ids(engines)))

    def published(self, version: int, engines: Sequence[EngineInfo | str]) -> None:
        """Reports that exactly these engines hold the current version, after the first push or a push to a new engine."""
        self._call(m.Published(version=version, engines=_ids(engines)))

    def rewind(self, version: int) -> None:
        """Reports that the trainer starts from the checkpoint of this version. Engines get leases only after `published`."""
        self._call(m.Rewind(version=version))

    def durable(self, version: int) -> None:
        """Reports that the checkpoint of this version is on disk, so that the ledger may forget the batches before it."""
        self._call(m.Durable(version=version))

    def fleet(self) -> list[EngineInfo]:
        return list(self._call(m.Fleet()).engines)

    def condemn(self, engine: EngineInfo | str, reason: str) -> None:
        """Removes an engine from the fleet after a push to it failed. The next heartbeat tells its worker to restart it."""
        self._call(m.Condemn(engine=_ids([engine])[0], reason=reason))

    def start_eval(self, eval_id: str, split: str = "heldout", completions: int = 1) -> None:
        """Starts an evaluation: every problem of the split is sampled and graded, before any training group."""
        self._call(m.StartEval(eval_id=eval_id, split=split, completions=completions))

    def eval_result(self, eval_id: str, wait_s: float = 10.0) -> EvalResult | None:
        """The result, or None if it is not complete yet. A result is returned only once, because this closes the evaluation."""
        result: EvalResult | None = self._call(m.AskEval(eval_id=eval_id, wait_s=wait_s), wait_s).result
        if result is not None:
            self.close_eval(eval_id)
        return result

    def close_eval(self, eval_id: str) -> None:
        """Ends an evaluation. What is left of it is not generated or graded."""
        self._call(m.CloseEval(eval_id=eval_id))

    # The judges' requests.

    def lease_grading(self, holder: str, n: int, wait_s: float = 5.0) -> list[GradingWork]:
        """At most n finished completions to grade, oldest first. Returns [] if there are none within `wait_s`."""
        if self._decode_tokens is None:
            raise QueueError("only a client with `decode_tokens` can lease completions to grade: they come as tokens")
        leases = self._call(m.LeaseGrading(holder=holder, count=n, wait_s=wait_s), wait_s).work
        return [_grading_work(lease, self._decode_tokens) for lease in leases]

    def answer(self, holder: str, answers: Sequence[Answered]) -> list[str]:
        """Reports verdicts and observations. Returns one outcome each: `recorded`, or `duplicate` or `gone`: not needed."""
        return list(self._call(m.ReportAnswers(holder=holder, answers=answers)).outcomes)

    def refuse_task(self, group: int, reason: str) -> None:
        """Reports that the task of this group cannot be run. The group is dropped as `unrunnable`."""
        self._call(m.RefuseGroup(group=group, kind="unrunnable", reason=reason))

    # Requests of all processes.

    def heartbeat(self, holder: str, role: str, held: Sequence[Position] = ()) -> Heard:
        """To be sent about every `lease_s / 3`. A holder that sends nothing for `lease_s` loses its leases."""
        return self._call(m.Heartbeat(holder=holder, role=role, held=tuple(held)))

    def status(self) -> dict[str, Any]:
        return dict(self._call(m.Status()).status)

    def stop(self) -> None:
        """Ends the run: from now on the answers to heartbeats say `closing`, and no leases are granted."""
        self._call(m.Stop())

    def _call(self, request: Any, wait_s: float = 0.0) -> Any:
        request_id, message = self._envelope(request)
        allowed_s = wait_s + self.timeout_s
        deadline = time.monotonic() + allowed_s
        resend = 0.0
        while (now := time.monotonic()) < deadline:
            if now >= resend:
                with suppress(zmq.Again):  # there is no connection yet; it is sent again later
                    self._socket.send(message, zmq.DONTWAIT)
                resend = now + RESEND_S
            if self._socket.poll(int(1000 * POLL_S)):
                answer: m.Answer = unpack(m.Answer, self._socket.recv())
                if answer.id == request_id:  # otherwise a late answer to an earlier request
                    return self._read(request, answer)
        raise self._timeout(request, allowed_s)


class AsyncQueueClient(_Client):
    """For the rollout worker. Any number of requests may be in flight. Create and use it inside one event loop."""

    def __init__(self, endpoint: str, keys: RunKeys, name: str, timeout_s: float = 30.0) -> None:
        super().__init__(endpoint, keys, name, timeout_s)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._connect(self._socket)
        self._answers: dict[int, asyncio.Future[m.Answer]] = {}
        self._reader: asyncio.Task[None] | None = None
        self._engine: EngineInfo | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        self._context.destroy(linger=0)

    async def register_engine(self, name: str, url: str, tp: int, epoch: int) -> None:
        """Joins the fleet. The engine gets leases only after the trainer has pushed weights to this epoch of it."""
        self._engine = EngineInfo(name=name, url=url, tp=tp, epoch=epoch)
        await self._call(m.RegisterEngine(name=name, url=url, tp=tp, epoch=epoch))

    async def unregister_engine(self, name: str) -> None:
        self._engine = None
        await self._call(m.UnregisterEngine(name=name))

    async def lease_segments(self, holder: str, n: int, wait_s: float = 5.0) -> list[SegmentWork]:
        """At most n segments to generate, or [] if there are none within `wait_s`. `holder` is a registered engine's name."""
        answer: m.SegmentsAnswer = await self._call(m.LeaseSegments(holder=holder, count=n, wait_s=wait_s), wait_s)
        return [_segment_work(lease) for lease in answer.work]

    async def report_segment(self, holder: str, position: Position, segment: Segment) -> str:
        """Reports a segment. Returns `recorded`, or why its tokens count as lost: `duplicate`, `stale`, `gone`, `restarted`.

        The caller need not react to the outcome. An empty segment with finish CUT gives the lease back.
        """
        return (await self._call(m.ReportSegment(holder=holder, position=position, segment=segment))).outcome

    async def refuse_prompt(self, group: int, reason: str) -> None:
        """Reports that the engine cannot run this prompt. Its group is dropped as `bad_prompt`."""
        await self._call(m.RefuseGroup(group=group, kind="bad_prompt", reason=reason))

    async def heartbeat(
        self, holder: str, role: str, held: Sequence[Position] = (), sums: Mapping[str, float] | None = None
    ) -> Heard:
        """To be sent about every `lease_s / 3`. It also registers the engine again after the server was restarted."""
        request = m.Heartbeat(holder=holder, role=role, held=tuple(held), engine=self._engine, sums=sums or {})
        return await self._call(request)

    async def status(self) -> dict[str, Any]:
        return dict((await self._call(m.Status())).status)

    async def _call(self, request: Any, wait_s: float = 0.0) -> Any:
        if self._reader is None:
            self._reader = asyncio.create_task(self._read_answers())
        request_id, message = self._envelope(request)
        allowed_s = wait_s + self.timeout_s
        deadline = time.monotonic() + allowed_s
        future: asyncio.Future[m.Answer] = asyncio.get_running_loop().create_future()
        self._answers[request_id] = future
        try:
            while (left_s := deadline - time.monotonic()) > 0:
                with suppress(zmq.Again):  # there is no connection yet; it is sent again later
                    await self._socket.send(message, zmq.DONTWAIT)
                waited_for: list[asyncio.Future[Any]] = [future, self._reader]
                await asyncio.wait(waited_for, timeout=min(RESEND_S, left_s), return_when=asyncio.FIRST_COMPLETED)
                if future.done():
                    return self._read(request, future.result())
                if self._reader.done():
                    raise QueueError(f"answers of the queue server cannot be read any more: {self._reader.exception()}")
        finally:
            del self._answers[request_id]
        raise self._timeout(request, allowed_s)

    async def _read_answers(self) -> None:
        while True:
            answer: m.Answer = unpack(m.Answer, await self._socket.recv())
            future = self._answers.get(answer.id)
            if future is not None and not future.done():
                future.set_result(answer)


def _segment_work(lease: m.SegmentLease) -> SegmentWork:
    return SegmentWork(
        position=lease.position,
        input_tokens=np.concatenate([lease.prompt, *lease.completion]),
        max_new_tokens=lease.max_new_tokens,
    )


def _grading_work(lease: m.GradingLease, decode_tokens: Callable[[I32], str]) -> GradingWork:
    turns = [np.concatenate(turn) for turn in lease.turns]
    return GradingWork(
        position=lease.position,
        prompt_id=lease.prompt_id,
        task=lease.task,
        prefill=lease.prefill,
        prompt=lease.prompt,
        metadata=lease.metadata,
        turns=[decode_tokens(turn) for turn in turns],
        observations=lease.observations,
        ends=[turn.item(-1) if len(turn) else NOT_SAMPLED for turn in turns],
        tokens=sum(map(len, turns)),
        finish=lease.finish,
    )


def _ids(engines: Sequence[EngineInfo | str]) -> tuple[str, ...]:
    return tuple(e if isinstance(e, str) else e.id for e in engines)
